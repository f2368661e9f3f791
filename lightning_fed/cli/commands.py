"""The commands, each with a line of description."""

__all__ = ["OWN", "STAGES"]

STAGES = {
    "fit": "Train: run the rounds.",
    "validate": "Evaluate a checkpoint on the validation set.",
    "test": "Evaluate a checkpoint on the test set.",
    "predict": "Predict with the model of a checkpoint.",
}
"""Lightning's commands, and what each does here."""

OWN = {
    "new": ("lightning_fed.cli.new:new", "Write a small project to start from."),
    "data": ("lightning_fed.cli.data:picture", "Measure and plot how the data of a configuration is split."),
    "diagnose": ("lightning_fed.lab.diagnosis.command:diagnose", "Find out why a configuration does not converge."),
    "deploy": ("lightning_fed.deploy.command:deploy", "Run a configuration over Flower or NVFlare, on this machine."),
    "reproduce": ("lightning_fed.lab.reproducing:reproduce", "Run an experiment of a paper."),
    "sweep": ("lightning_fed.lab.sweeping:sweep", "Run a grid over a configuration."),
    "compare": ("lightning_fed.lab.comparing:compare", "Compare runs side by side."),
    "completion": ("lightning_fed.cli.completion:completion", "Print a script for completion in a shell."),
}
"""The other commands: the function of each, imported when it runs, and what it does."""
