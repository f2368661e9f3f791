"""The command line: Lightning's ``fit``, ``validate``, ``test`` and ``predict``, and commands of our own."""

import importlib
import os
import sys
import traceback
from inspect import getfile, signature
from pathlib import Path
from typing import Any

import torch

from lightning_fed.callbacks import RunSummary
from lightning_fed.checkpoints.search import last_of_newest_run, roots
from lightning_fed.cli.parser import ArgsType, LightningArgumentParser, LightningCLI, Parser, arrange, refusal_in
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import MisconfigurationException
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.settings.environment import arguments_of_environment
from lightning_fed.trainer.trainer import FederatedTrainer

__all__ = ["FederatedCLI", "main"]

INITIAL = "initial"  # as a checkpoint: none, by intention
_EVALUATED = (
    f'The checkpoint to run, which must be given: a path, "last" or "best" of the newest run, or "{INITIAL}" for the'
    " model as it is made."
)

_ABOUT = (
    "Train an ordinary LightningModule across clients: `lightning-fed fit --config FILE`."
    " `lightning-fed new NAME` writes a small project to start from,"
    " `lightning-fed data --config FILE` draws how the data is dealt out; `lightning-fed diagnose --config FILE`"
    " says why it does not converge; `lightning-fed deploy` runs it on real clients; `lightning-fed reproduce`,"
    " `sweep` and `compare` run a paper's experiment, run a grid of your own, and put runs side by side."
)
_OWN = {  # by name, the function and what it does; a command is imported when it runs, and may be built on this one
    "new": ("lightning_fed.cli.new:new", "Write a small project to start from."),
    "data": ("lightning_fed.cli.data:picture", "Measure and plot how the data of a configuration is split."),
    "diagnose": ("lightning_fed.lab.diagnosis:diagnose", "Find out why a configuration does not converge."),
    "deploy": ("lightning_fed.deploy.command:deploy", "Run a configuration over Flower or NVFlare, on this machine."),
    "reproduce": ("lightning_fed.lab:reproduce", "Run an experiment of a paper."),
    "sweep": ("lightning_fed.lab:sweep", "Run a grid over a configuration."),
    "compare": ("lightning_fed.lab:compare", "Compare runs side by side."),
}
_STAGES = {
    "fit": "Train: run the rounds.",
    "validate": "Evaluate a checkpoint on the validation set.",
    "test": "Evaluate a checkpoint on the test set.",
    "predict": "Predict with the model of a checkpoint.",
}
_FRAMEWORKS = (Path(__file__).parents[1], *(Path(getfile(package)).parent for package in (pl, torch)))


class FederatedCLI(LightningCLI):
    """LightningCLI with a :class:`FederatedTrainer`, and model and data chosen by class.

    ``seed_everything`` also seeds cohorts, batch orders and random layers.
    """

    def __init__(self, **kwargs: Any) -> None:
        from_environment = arguments_of_environment(signature(FederatedTrainer.__init__).parameters)
        defaults = {
            "trainer_class": FederatedTrainer,
            "subclass_mode_model": True,
            "subclass_mode_data": True,
            "save_config_kwargs": {"overwrite": True},
            # the parser gives the trainer every argument: what the environment says must be the parser's default
            "trainer_defaults": {**from_environment, **(kwargs.pop("trainer_defaults", None) or {})},
            "parser_class": Parser,
            # an option that is only the beginning of another one's name is a mistake, not an abbreviation
            "parser_kwargs": {
                "prog": "lightning-fed",
                "description": _ABOUT,
                "allow_abbrev": False,
                **{
                    name: {"allow_abbrev": False, **({"description": _STAGES[name]} if name in _STAGES else {})}
                    for name in self.subcommands()
                },
            },
        }
        super().__init__(**{**defaults, **kwargs})

    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        """Add the commands, each with a line that says what it does here."""
        super()._add_subcommands(parser, **kwargs)
        commands: Any = parser._subcommands_action
        for choice in commands._choices_actions:
            choice.help = _STAGES.get(choice.dest, choice.help)

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Return the parser of a command, whose help is in the order of use."""
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        arrange(parser, klass)
        if subcommand in _STAGES and subcommand != "fit":
            next(action for action in parser._actions if action.dest == "ckpt_path").help = _EVALUATED
        return parser

    def _parse_ckpt_path(self) -> None:
        """Let the configuration alone say which model is made.

        Lightning puts a checkpoint's hyper-parameters over those of the configuration, class paths included: a file
        from elsewhere could then have any module imported, and any class made.
        """

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        """Return the arguments of a stage; which model is evaluated must be said."""
        arguments: dict[str, Any] = super()._prepare_subcommand_kwargs(subcommand)
        if subcommand != "fit":
            if arguments.get("ckpt_path") is None:
                raise _no_checkpoint(subcommand, self.trainer)
            if arguments["ckpt_path"] == INITIAL:
                arguments["ckpt_path"] = None
        return arguments

    def instantiate_classes(self) -> None:
        """Make trainer, model and data, and let the summary tell how to resume from the command line."""
        super().instantiate_classes()
        command = "lightning-fed fit --config {logs}/config.yaml --ckpt_path {path} --trainer.max_rounds {rounds}"
        if self.trainer.max_steps != -1:  # which would end the run at once
            command += " --trainer.max_steps -1"
        for callback in self.trainer.callbacks:
            if isinstance(callback, RunSummary):
                callback.resume_with = command


class _AllCommands(FederatedCLI):
    """What ``lightning-fed`` runs: it lists the commands that :func:`main` serves itself, too."""

    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        super()._add_subcommands(parser, **kwargs)
        commands: Any = parser._subcommands_action
        for name, (_, about) in _OWN.items():
            commands.add_subcommand(name, Parser(), help=about)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments of Lightning's commands; the others come first."""
        super().parse_arguments(parser, args)
        if self.config.subcommand in _OWN:
            parser.error(f"{self.config.subcommand} must be the first word: lightning-fed {self.config.subcommand} ...")


def main(args: list[str] | dict[str, Any] | None = None) -> None:
    """Run the command line: the commands of ``_OWN`` by themselves, and LightningCLI's for the rest.

    Args:
        args: The arguments; those of the process if None.

    Raises:
        SystemExit: With the message alone, where a setting cannot be federated or a client's work fails. Of an error
            in the user's own code, the part of the trace that is the user's is printed first.
    """
    words = sys.argv[1:] if args is None else args
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # a configuration names classes of the user's own; last, so as to hide nothing
    try:
        if isinstance(words, list) and words and words[0] in _OWN:
            module, _, function = _OWN[words[0]][0].partition(":")
            getattr(importlib.import_module(module), function)(words[1:])
            return
        _AllCommands(model_class=pl.LightningModule, datamodule_class=pl.LightningDataModule, args=args)
    except ValueError as error:
        refusal = refusal_in(error)
        if refusal is None:
            raise
        print("".join(_own_trace(refusal)), file=sys.stderr, end="")
        sys.exit(f"lightning-fed: {refusal}")
    except MisconfigurationException as error:  # Lightning's own refusals, such as `test` without a test_step
        sys.exit(f"lightning-fed: {error}")


def _no_checkpoint(stage: str, trainer: pl.Trainer) -> FederatedError:
    """Return the error that an evaluation would be that of a model nobody has trained."""
    latest = last_of_newest_run(trainer)
    found = (
        f"Add --ckpt_path last for the newest one, {latest}, --ckpt_path best for the best one of its run"
        if latest is not None
        else f"None lies under {' or '.join(map(str, roots(trainer)))}: add --ckpt_path PATH"
    )
    return FederatedError(
        f"`{stage}` needs a checkpoint, or it would run a model that nobody has trained. {found}, or --ckpt_path"
        f" {INITIAL} for the model as it is made."
    )


def _own_trace(error: FederatedError) -> list[str]:
    """Return the trace of what a client's work ran into, from the first line of code that is not a framework's."""
    cause: BaseException | None = error if isinstance(error, ClientError) else None
    while cause is not None and cause.__cause__ is not None:
        cause = cause.__cause__
    frames = [] if cause is None else traceback.extract_tb(cause.__traceback__)
    own = next((i for i, frame in enumerate(frames) if _is_users(Path(frame.filename))), None)
    if own is None or cause is None:
        return []
    return [
        "Traceback (from the user's own code on):\n",
        *traceback.format_list(frames[own:]),
        *traceback.format_exception_only(cause),
    ]


def _is_users(file: Path) -> bool:
    return file.is_file() and not any(file.is_relative_to(folder) for folder in _FRAMEWORKS)


if __name__ == "__main__":
    main()
