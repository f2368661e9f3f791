"""What the command line says to a mistake: one line of usage, the error, and the name that was probably meant."""

import re
import sys
from argparse import HelpFormatter
from difflib import get_close_matches
from inspect import isabstract
from types import ModuleType
from typing import Any, NoReturn

from lightning_fed import algorithms, callbacks, data, models, server
from lightning_fed.cli.help import plain, plain_error
from lightning_fed.compat.cli import LightningArgumentParser
from lightning_fed.compat.one_package import advice_on_path

__all__ = ["Parser"]

_PARTS: tuple[ModuleType, ...] = (algorithms, callbacks, data, models, server)
_GROUP = r"Group '(\w+)' does not accept option '([\w.]+)'"
_CLASS = r"<class '([\w.]+)\.(\w+)'>"


class Parser(LightningArgumentParser):
    """Lightning's parser, whose errors are not preceded by its hundred options."""

    def print_usage(self, file: Any = None) -> None:
        """Print the usage in one line; ``--help`` has the options."""
        print(f"usage: {self._usage()}", file=file or sys.stdout)

    def _usage(self) -> str:
        command = self.prog.replace(" [options]", "") + (" COMMAND" if self._parsers_below() else "")
        return f"{command} --config FILE [--OPTION VALUE ...]"

    def format_help(self, formatter: HelpFormatter | None = None) -> str:
        """Return the help in plain words, with the usage in one line."""
        self.usage = self._usage()
        for action in self._actions:  # before lines are broken, which may be within a name
            action.help = plain(action.help) if isinstance(action.help, str) else action.help
        return plain(super().format_help(formatter))

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Add what was probably meant, and end.

        Raises:
            SystemExit: Always.
        """
        hints = self._hints(message)
        # the parser of a part is quoted by that of the whole, which still reads types in the message
        super().error("\n".join([plain_error(message) if self.exit_on_error else message, *hints]), ex)

    def _hints(self, message: str) -> list[str]:
        if any(hint in message for hint in ("Did you mean ", "There are ")):
            return []  # it quotes the parser of a part, which is such a one and has said what was meant
        options = [option for parser in (self, *self._parsers_below()) for option in parser._option_string_actions]
        keys = [option.removeprefix("--") for option in options]
        other = next(filter(None, map(advice_on_path, re.findall(r"[\w.]+\.\w+", message))), None)
        if other is not None:
            return [other]
        return [
            *_close(re.findall(r"invalid choice: '(\S+)' \(choose from", message), self._commands()),
            *_close(re.findall(r"unrecognized arguments:.*?(--[\w.+]+)", message), options),
            *_close(re.findall(r"(?:Option|Subcommand '\w+' does not accept option) '([\w.]+)'", message), keys),
            *_close([".".join(found) for found in re.findall(_GROUP, message)], keys),
            *_close_classes(message),
        ]

    def _commands(self) -> list[str]:
        actions = self._subcommands_action
        return [] if actions is None else list(actions._name_parser_map)

    def _parsers_below(self) -> list[Any]:
        actions = self._subcommands_action
        return [] if actions is None else list(actions._name_parser_map.values())


def _close_classes(message: str) -> list[str]:
    """Return a hint for each class that is not there; with all that there are of its kind, if none is close."""
    kinds = [getattr(sys.modules.get(module), name, None) for module, name in re.findall(_CLASS, message)]
    bases = tuple(kind for kind in kinds if isinstance(kind, type))
    ours = {name: getattr(part, name) for part in _PARTS for name in part.__all__}
    of_kind = [
        name
        for name, one in ours.items()
        if isinstance(one, type) and issubclass(one, bases) and one not in bases and not isabstract(one)
    ]
    hints = []
    for name in re.findall(r"Expected a dot import path string: (\S+)", message):
        hints += _close([name], of_kind or list(ours)) or _all_of(of_kind)
    for module, name in re.findall(r"module '([\w.]+)' has no attribute '(\w+)'", message):
        inside = _public_names(sys.modules.get(module))
        hints += _close([name], inside) or _all_of([one for one in of_kind if one in inside])
    return list(dict.fromkeys(hints))


def _public_names(module: ModuleType | None) -> list[str]:
    return list(getattr(module, "__all__", [name for name in dir(module) if not name.startswith("_")]))


def _all_of(known: list[str]) -> list[str]:
    return [f"There are {', '.join(known)}."] if known else []


def _close(found: list[str], known: list[str]) -> list[str]:
    """Return a hint for each name that resembles a known one, in whatever case it is written."""
    written = {name.lower(): name for name in known}
    matches = {name: get_close_matches(name.lower(), written, n=1, cutoff=0.8) for name in found}
    return [f"Did you mean {written[match[0]]} instead of {name}?" for name, match in matches.items() if match]
