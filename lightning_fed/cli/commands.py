"""The commands, each with a one-line description."""

STAGES = {
    "fit": "Train: run the rounds.",
    "validate": "Evaluate a checkpoint on the validation set.",
    "test": "Evaluate a checkpoint on the test set.",
    "predict": "Predict with the model of a checkpoint.",
}
"""Lightning's commands and their descriptions."""

OWN = {
    "new": ("lightning_fed.cli.new:new", "Write a small project: a model, data, a configuration and a test."),
    "data": ("lightning_fed.cli.data:picture", "Measure and plot how the data of a configuration is split."),
    "diagnose": (
        "lightning_fed.lab.diagnosis.command:diagnose",
        "Find what limits a run: step size, drift, noise, data, a fault.",
    ),
    "deploy": (
        "lightning_fed.deploy.configured:deploy",
        "Try a configuration over Flower or NVFlare, on this machine.",
    ),
    "reproduce": ("lightning_fed.lab.reproducing:reproduce", "Run an experiment of a paper, and check its claims."),
    "sweep": ("lightning_fed.lab.sweeping:sweep", "Run a grid of settings over a configuration."),
    "compare": ("lightning_fed.lab.comparing:compare", "Compare runs: a table and a plot of their logs."),
    "completion": ("lightning_fed.cli.completion:completion", "Print a script for completion in a shell."),
}
"""The other commands: the function of each, imported lazily, and its description."""
