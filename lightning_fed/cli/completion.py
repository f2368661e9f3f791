"""The command ``lightning-fed completion``: a script for shell completion of commands, options and class names.

jsonargparse's own generator recurses into the arguments of every subclass of every type, and never ends for ours. This
module copies the options of each command instead, with class names as choices, and does not recurse.
"""

import argparse
import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Literal, get_args, get_origin

from jsonargparse import ArgumentParser, Namespace

from lightning_fed.cli.commands import OWN, STAGES
from lightning_fed.core.errors import FederatedError

_FILES = ("config", "ckpt_path", "grid", "add", "out", "runs", "data_root")
_KNOWN = {"trainer.accelerator": ("auto", "cpu", "gpu"), "trainer.strategy": ("auto", "clients", "ddp")}


def completion(args: list[str] | None = None) -> None:
    """Print the completion script for a shell."""
    shell = make_parser().parse_args(args).shell
    if find_spec("shtab") is None:
        raise FederatedError("completion needs the package shtab: pip install shtab.")
    import shtab

    whole = argparse.ArgumentParser(prog="lightning-fed")
    whole.add_argument("--version", action="store_true", help="Print the version.")
    commands = whole.add_subparsers()
    for name, parser in _parsers().items():
        copied = commands.add_parser(name, help=(STAGES.get(name) or OWN[name][1]), add_help=False)
        for action in parser._actions:  # shtab skips options with help=SUPPRESS
            _copy(action, copied, shtab.FILE)
    print(shtab.complete(whole, shell))


def make_parser() -> ArgumentParser:
    """Return the parser of the command."""
    parser = ArgumentParser(
        prog="lightning-fed completion",
        description="Print a script with which a shell completes commands, options and class names. It needs shtab.",
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=["bash", "zsh"], help="The shell.")
    return parser


def _parsers() -> dict[str, ArgumentParser]:
    """Return the parser of every command."""
    from lightning_fed.cli.stages import FederatedCLI
    from lightning_fed.compat.package import pl

    class Stages(FederatedCLI):
        def parse_arguments(self, parser: Any, args: Any) -> None:
            self.config = Namespace(subcommand=None, seed_everything=False)

        def instantiate_classes(self) -> None:
            """Skip instantiation."""

    made = Stages(model_class=pl.LightningModule, datamodule_class=pl.LightningDataModule, args=[])
    modules = {name: importlib.import_module(where.partition(":")[0]) for name, (where, _) in OWN.items()}
    return {**made._subcommand_parsers, **{name: module.make_parser() for name, module in modules.items()}}


def _copy(action: argparse.Action, parser: argparse.ArgumentParser, files: Any) -> None:
    """Add a copy of an option, with its choices or with path completion."""
    help_text = (action.help or "").replace("%", "%%").partition("\n")[0]
    if action.nargs == 0:
        parser.add_argument(*action.option_strings, action="store_true", help=help_text)
        return
    found = _KNOWN.get(action.dest) or action.choices or _choices(getattr(action, "_typehint", None))
    choices = list(dict.fromkeys(map(str, found)))
    copied = parser.add_argument(
        *(action.option_strings or [action.dest]), nargs=action.nargs, choices=choices or None, help=help_text
    )
    if action.dest in _FILES:
        copied.complete = files  # type: ignore[attr-defined] # shtab reads it


def _choices(kind: Any) -> Iterator[str]:
    """Yield the choices for an argument of a type: the values of a Literal, and the names of classes."""
    from lightning_fed.cli.parser import class_names

    if kind is bool:
        yield from ("true", "false")
    elif get_origin(kind) is Literal:
        yield from map(str, get_args(kind))
    elif isinstance(kind, type):
        yield from class_names(kind)
    else:
        for part in get_args(kind):
            yield from _choices(part)
