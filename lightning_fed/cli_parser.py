"""What the command line says to a mistake: one line of usage, the error, and the name that was probably meant."""

import re
import sys
from difflib import get_close_matches
from types import ModuleType
from typing import Any, NoReturn

from pytorch_lightning.cli import LightningArgumentParser

from lightning_fed import algorithms, callbacks, data, models, server

__all__ = ["Parser"]

_PARTS: tuple[ModuleType, ...] = (algorithms, callbacks, data, models, server)


class Parser(LightningArgumentParser):
    """Lightning's parser, whose errors are not preceded by its hundred options."""

    def print_usage(self, file: Any = None) -> None:
        """Print the usage in one line; ``--help`` has the options."""
        command = self.prog.replace(" [options]", "") + (" COMMAND" if self._parsers_below() else "")
        print(f"usage: {command} --config FILE [--OPTION VALUE ...]", file=file or sys.stdout)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Add what was probably meant, and end.

        Raises:
            SystemExit: Always.
        """
        options = [option for parser in (self, *self._parsers_below()) for option in parser._option_string_actions]
        hints = [
            *_close(re.findall(r"unrecognized arguments:.*?(--[\w.+]+)", message), options),
            *_close(re.findall(r"Expected a dot import path string: (\S+)", message), _class_names()),
        ]
        super().error("\n".join([message, *hints]), ex)

    def _parsers_below(self) -> list[Any]:
        actions = self._subcommands_action
        return [] if actions is None else list(actions._name_parser_map.values())


def _class_names() -> list[str]:
    return [name for part in _PARTS for name in part.__all__]


def _close(found: list[str], known: list[str]) -> list[str]:
    """Return a hint for each name that resembles a known one."""
    matches = {name: get_close_matches(name, known, n=1, cutoff=0.8) for name in found}
    return [f"Did you mean {match[0]} instead of {name}?" for name, match in matches.items() if match]
