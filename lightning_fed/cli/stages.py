"""Lightning's commands: ``fit``, ``validate``, ``test`` and ``predict``."""

import logging
import os
import shlex
import sys
from argparse import SUPPRESS, Action
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from lightning_fed.callbacks import RunSummary
from lightning_fed.callbacks.progress import shows_information
from lightning_fed.checkpoints.files import local_path
from lightning_fed.checkpoints.folders import last_of_newest_run, roots
from lightning_fed.cli.commands import STAGES
from lightning_fed.cli.parser import LightningArgumentParser, LightningCLI, Parser, arrange
from lightning_fed.compat.package import NAMES, USED, pl
from lightning_fed.compat.private import rank_zero_info
from lightning_fed.core.errors import FederatedError
from lightning_fed.settings.lightning_arguments import arguments_of_environment
from lightning_fed.trainer.trainer import FederatedTrainer

_INITIAL = "initial"  # a ckpt_path that means no checkpoint
_EVALUATED = (
    f'The checkpoint to run, which must be given: a path, "last" or "best" of the newest run, or "{_INITIAL}" for the'
    " model as it is made."
)

_SAVED = "saved by a run, and replaced by the next one in this folder"
_SHOWN = (pl.callbacks.ProgressBar, pl.callbacks.ModelSummary)
_WRITER = pl.callbacks.BasePredictionWriter


class FederatedCLI(LightningCLI):
    """LightningCLI with a :class:`FederatedTrainer`, and model and data chosen by class.

    ``seed_everything`` also seeds cohorts, batch orders and random layers.

    Args:
        model_class: The class of the model; with ``subclass_mode_model=False`` this one and no other.
        datamodule_class: The class of the data module, likewise.
        kwargs: The other arguments of LightningCLI.

    Attributes:
        program: What runs it, for usage and hints; by default the script.
    """

    program: str | None = None

    def __init__(self, model_class: Any = None, datamodule_class: Any = None, **kwargs: Any) -> None:
        from_environment = arguments_of_environment(signature(FederatedTrainer.__init__).parameters)
        defaults = {
            "trainer_class": FederatedTrainer,
            "subclass_mode_model": True,
            "subclass_mode_data": True,
            "save_config_callback": SavedConfig,
            # the parser passes every argument, so its defaults must include the environment's
            "trainer_defaults": {**from_environment, **(kwargs.pop("trainer_defaults", None) or {})},
            "parser_class": Parser,
            # a prefix of an option's name is a mistake, not an abbreviation
            "parser_kwargs": {
                "prog": self.program,
                "allow_abbrev": False,
                **{
                    name: {"allow_abbrev": False, **({"description": STAGES[name]} if name in STAGES else {})}
                    for name in self.subcommands()
                },
            },
        }
        super().__init__(model_class, datamodule_class, **{**defaults, **kwargs})

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Return the parser of a command, with its help in order of use."""
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        parser.add_argument("-q", "--quiet", action=_Quiet)
        arrange(parser, klass)
        if subcommand in STAGES and subcommand != "fit":
            next(action for action in parser._actions if action.dest == "ckpt_path").help = _EVALUATED
        return parser

    def _parse_ckpt_path(self) -> None:
        """Let only the configuration choose the model.

        Lightning overrides the configuration with a checkpoint's hyper-parameters, class paths included. An untrusted
        file could then import any module and instantiate any class.
        """

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        """Return the arguments of a stage; raise if an evaluation does not name its model."""
        arguments: dict[str, Any] = super()._prepare_subcommand_kwargs(subcommand)
        if subcommand != "fit":
            if arguments.get("ckpt_path") is None:
                raise _no_checkpoint(subcommand, self.trainer)
            if arguments["ckpt_path"] == _INITIAL:
                arguments["ckpt_path"] = None
        if subcommand == "predict" and not any(isinstance(c, _WRITER) for c in self._callbacks()):
            rank_zero_info(
                "No callback writes the predictions: add a subclass of BasePredictionWriter to trainer.callbacks, or"
                " call trainer.predict in Python, which returns them."
            )
        return arguments

    def instantiate_classes(self) -> None:
        """Create trainer, model and data; ``-q`` hides bar and table."""
        super().instantiate_classes()
        callbacks = self._callbacks()
        for callback in list(callbacks):
            if isinstance(callback, SavedConfig) and self.subcommand == "fit":
                callback.command = self.program or f"python {shlex.quote(sys.argv[0])}"
            elif isinstance(callback, _SHOWN) and not shows_information():
                callbacks.remove(callback)

    def _callbacks(self) -> list[pl.Callback]:
        return self.trainer.callbacks  # type: ignore[no-any-return,attr-defined]


class SavedConfig(pl.cli.SaveConfigCallback):  # type: ignore[name-defined,misc]
    """Save the configuration of a run in its log folder as ``config.yaml``, and let the summary resume with it.

    It never replaces a file that no run has saved, since without a logger the folder may hold the user's own
    configuration. The name is then ``config-v1.yaml``. An evaluation does not replace the file of a fit.

    Attributes:
        command: The program whose ``fit`` reads the saved configuration; empty if there is none.
    """

    command = ""

    def __init__(self, parser: LightningArgumentParser, config: Any, **options: Any) -> None:
        super().__init__(parser, config, **{**options, "save_to_log_dir": False})

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Save the configuration, in the first process."""
        self._folder = trainer.log_dir or trainer.default_root_dir  # all processes must ask for it
        super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Write the file, unless it is that of a fit and the run is an evaluation."""
        name, folder = self.config_filename, local_path(self._folder)
        if folder is None:  # a remote folder belongs to the run alone
            url_to_fs(self._folder)[0].makedirs(self._folder, exist_ok=True)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            stem, number = Path(name), 0
            while (folder / name).is_file() and not _is_saved(folder / name):
                number += 1
                name = f"{stem.stem}-v{number}{stem.suffix}"
            if stage != "fit" and (folder / name).is_file():
                return
        self.parser.dump_header = [*(self.parser.dump_header or ()), _SAVED]
        self.parser.save(
            self.config, os.path.join(self._folder, name), skip_none=False, overwrite=True, multifile=self.multifile
        )
        for callback in trainer.callbacks if self.command else ():  # type: ignore[attr-defined]
            if isinstance(callback, RunSummary):
                words = f"fit --config {{logs}}/{name} --ckpt_path {{path}} --trainer.max_rounds {{rounds}}"
                callback.resume_with = f"{self.command} {words}"
                if trainer.max_steps != -1:  # max_steps would end the resumed run at once
                    callback.resume_with += " --trainer.max_steps -1"
                callback.quote = shlex.quote


def _is_saved(file: Path) -> bool:
    """Return whether a run saved this configuration, rather than a user."""
    return f"# {_SAVED}\n" in file.read_text(encoding="utf-8", errors="replace")


def _no_checkpoint(stage: str, trainer: pl.Trainer) -> FederatedError:
    """Return the error for an evaluation without a checkpoint, which would use an untrained model."""
    latest = last_of_newest_run(trainer)
    found = (
        f"Add --ckpt_path last for the newest one, {latest}, --ckpt_path best for the best one of its run"
        if latest is not None
        else f"None lies under {' or '.join(map(str, roots(trainer)))}: add --ckpt_path PATH"
    )
    return FederatedError(
        f"`{stage}` needs a checkpoint, or it would run an untrained model. {found}, or --ckpt_path"
        f" {_INITIAL} for the model as it is made."
    )


class _Quiet(Action):
    """``-q``: show only warnings and errors. It is not part of a configuration."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        about = "Print warnings and errors alone: no bar, no lines, no summary."
        super().__init__(option_strings, SUPPRESS, nargs=0, default=SUPPRESS, help=about)

    def __call__(self, *_: Any) -> None:
        for name in NAMES[USED]:
            logging.getLogger(name).setLevel(logging.WARNING)


def run(args: list[str] | dict[str, Any] | None, first: str) -> None:
    """Run one of Lightning's commands; ``first`` is the first word."""
    own: dict[str, Any] = {"program": "lightning-fed"}
    if first in STAGES:  # building the parsers of all four takes a second
        one = {first: FederatedCLI.subcommands()[first]}
        own["subcommands"] = staticmethod(lambda: one)
    type("Command", (FederatedCLI,), own)(pl.LightningModule, pl.LightningDataModule, args=args)
