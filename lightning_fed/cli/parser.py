"""The command-line parser: help in order of use, and errors that suggest the intended name."""

import importlib
import re
import sys
from argparse import SUPPRESS, HelpFormatter
from collections.abc import Callable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from inspect import isabstract, signature
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import yaml
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_fed import algorithms, callbacks, data, models, server
from lightning_fed.compat.package import advice_on_path, pl
from lightning_fed.core.yaml_keys import RepeatedKeyError, UniqueKeyLoader

importlib.import_module(f"{pl.__name__}.cli")  # Lightning does not import it by default
ArgsType = pl.cli.ArgsType
LightningArgumentParser = pl.cli.LightningArgumentParser

_PARTS: tuple[ModuleType, ...] = (algorithms, callbacks, data, models, server)
_PACKAGES = ("lightning_fed", "lightning", "pytorch_lightning", "torch")
_GROUP = r"Group '(\w+)' does not accept option '([\w.]+)'"
_CLASS = r"<class '([\w.]+)\.(\w+)'>"
_ROLE = re.compile(r":\w+(?::\w+)?:`~?(?:[\w.]*\.)?(\w+)`")
_ROLE_WITH_TITLE = re.compile(r":\w+(?::\w+)?:`([^`<]+?)\s*<[^`]*>`")
_MATH = re.compile(r":math:`([^`]+)`")
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_SIGNS = {"ge": ">=", "le": "<=", "to": "->", "times": "x", "in": "in"}
_NEEDED = (
    "Give a file with both, --config FILE, or name classes: --model MLPClassifier --data Digits --trainer.max_rounds 10"
    " --trainer.local_epochs 1. `lightning-fed new NAME` writes a file to start from."
)
_CODE = re.compile(r"``([^`]+)``")
_OF_STAGE = re.compile(r"\b(?:fit|validate|test|predict)\.(data|model)\b(?=,|$)", re.MULTILINE)
_ASSIGNED = ("--config=", "-c=")
_FEW = 30  # a hint lists fewer options than this
_IN_ROUNDS = {
    "max_steps": "End the run after the round in which the clients' local steps reach this number; -1 for no limit.",
    "min_steps": "Do not let a callback end the run before the clients' local steps reach this number.",
    "min_epochs": "Do not let a callback end the run before this number of rounds.",
    "check_val_every_n_epoch": "Validate the server's model every n rounds.",
    "val_check_interval": (
        'A time, such as "00:00:10:00" for ten minutes: validate at the end of the round in which it has passed since'
        " the last validation. Or a number of rounds, with check_val_every_n_epoch=None."
    ),
    "limit_train_batches": "The batches of a client's local epoch: a number, or a share of them as a float.",
}
"""The help of Lightning's Trainer arguments that count rounds or local steps here."""
_OPTIONAL = re.compile(
    r"\s+(?:- )?Does not validate against any of the Union subtypes"
    r"\n +Subtypes: [^\n]+, <class 'NoneType'>\]\n +Errors:"
    r"((?:\n.*)*?)\n +- Expected a <class 'NoneType'>\n +Given value type: [^\n]+\n +Given value: ([^\n]+)"
)
_LACKING = re.compile(
    r"Parser key \"(trainer\.\w+|data|model|optimizer|lr_scheduler)\":"
    r"\s+- Problem with given class_path '[\w.]*?(\w+)':\s+the following arguments are required: ([\w, ]+)"
)
_NO_NAME = re.compile(r"unhashable type: '(\w+)'")


class LightningCLI(pl.cli.LightningCLI):
    """Lightning's command line, with schedules by local step."""

    @staticmethod
    def configure_optimizers(
        lightning_module: pl.LightningModule, optimizer: Optimizer, lr_scheduler: Any = None
    ) -> Any:
        """Return the optimizer and its schedule, which steps per local step if the trainer has a ``local_schedule``."""
        trainer: Any = lightning_module.trainer
        by_step = lr_scheduler is not None and trainer.fit_loop.settings.local_schedule is not None
        if by_step and not isinstance(lr_scheduler, ReduceLROnPlateau):
            return [optimizer], [{"scheduler": lr_scheduler, "interval": "step"}]
        return pl.cli.LightningCLI.configure_optimizers(lightning_module, optimizer, lr_scheduler)


class Parser(LightningArgumentParser):
    """Lightning's parser, without its hundred options before every error."""

    def print_usage(self, file: Any = None) -> None:
        """Print the usage in one line; ``--help`` lists the options."""
        print(f"usage: {self._usage()}", file=file or sys.stdout)

    def _usage(self) -> str:
        command = self.prog.replace(" [options]", "") + (" COMMAND" if self._below() else "")
        return f"{command} --config FILE [--OPTION VALUE ...]"

    def format_help(self, *formatter: HelpFormatter | None) -> str:
        """Return the help without markup, with a one-line usage; jsonargparse accepts a formatter from 4.53 on."""
        self.usage = self._usage()
        for action in self._actions:  # before wrapping, which may split a name
            action.help = plain(action.help) if isinstance(action.help, str) else action.help
        return super().format_help(*formatter)

    def parse_args(self, args: Any = None, *rest: Any, **options: Any) -> Any:
        """Parse a command line; exit if a configuration repeats a key, since YAML would keep only the last."""
        words = sys.argv[1:] if args is None else args
        for path in _configs(words):
            try:
                yaml.compose(path.read_text(encoding="utf-8"), UniqueKeyLoader)
            except RepeatedKeyError as error:
                self.error(f"{path}, line {error.line}: the key {error.key!r} comes twice. Remove one.")
            except UnicodeDecodeError as error:
                self.error(f"{path} is not UTF-8, as its byte {error.start} shows ({error.reason}). Save it as UTF-8.")
            except (OSError, ValueError, yaml.YAMLError, RecursionError):
                continue  # the parser below refuses the file
        return super().parse_args(_replacing(words), *rest, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Add hints such as the intended name to the message, and exit."""
        cause = _OF_STAGE.sub(r"--\1", _only_cause(message))
        below = [*self._below().values()]
        parser: Any = below[0] if len(below) == 1 else self  # its --help lists the options
        LightningArgumentParser.error(parser, "\n".join([cause, *self._hints(message)]), ex)

    def _hints(self, message: str) -> list[str]:
        if any(hint in message for hint in ("Did you mean ", "There are ")):
            return []  # the parser of a part has already added a hint
        options = [option for parser in (self, *self._below().values()) for option in parser._option_string_actions]
        keys = [option.removeprefix("--") for option in options]
        if "required: " in message and "model" in message:
            return [_NEEDED]
        if lacking := _LACKING.search(_only_cause(message)):
            key, kind, names = lacking.groups()
            added = " ".join(f"--{key}.{name} VALUE" for name in names.split(", "))
            return [f"Add {added}. --{key}.help {kind} describes them."]
        other = next(filter(None, map(advice_on_path, re.findall(r"[\w.]+\.\w+", message))), None)
        if other is not None:
            return [other]
        hints = [
            *(_unreadable(sys.argv) if "Problems parsing config" in message else []),
            *_close(re.findall(r"invalid choice: '(\S+)' \(choose from", message), list(self._below())),
            *_close(re.findall(r"(?i:unrecognized) arguments:.*?(--[\w.+]+)", message), options),
            *_close(re.findall(r"(?:Option|Subcommand '\w+' does not accept option) '([\w.]+)'", message), keys),
            *_close([".".join(found) for found in re.findall(_GROUP, message)], keys),
            *_close_classes(message),
        ]
        if not hints and re.search(r"Option '[\w.]+' is not accepted", message) and len(keys) < _FEW:
            named = [key for key in keys if key.isidentifier() and key != "help"]  # options of one class
            return [f"There are the options {', '.join(named)}."] if named else []
        return hints

    def _below(self) -> dict[str, Any]:
        """Return the parsers of the commands by name."""
        actions = self._subcommands_action
        return {} if actions is None else actions._name_parser_map


def _only_cause(message: str) -> str:
    """Return a message without the extra errors that an optional value is not None."""
    lines = _OPTIONAL.sub(_cause, message).splitlines()
    return "\n".join(line for line, before in zip(lines, ["", *lines], strict=False) if line.strip() and line != before)


def _cause(found: re.Match[str]) -> str:
    causes, value = found.groups()
    if "class_path" in value:  # jsonargparse looks it up before checking that it is a name
        causes = _NO_NAME.sub(r"class_path must be the dotted name of a class, found a \1", causes)
    is_shown = re.search(rf"(?<!\w){re.escape(value)}(?!\w)", causes) or value.startswith(
        ("{", "NestedArg", "Namespace(")
    )
    return causes if is_shown else f"{causes}. Got value: {value}"


def _configs(words: Any) -> set[Path]:
    """Return the configuration files on a command line."""
    pairs = pairwise(word for whole in words for word in whole.split("=", maxsplit=whole.startswith(_ASSIGNED)))
    return {Path(file) for word, file in pairs if word in ("--config", "-c")}


def _replacing(words: Any) -> list[str]:
    """Return the words with an empty list before each list of classes for the trainer, such as its callbacks.

    jsonargparse passes the arguments of the n-th entry of the previous list to the n-th entry of a list, even if their
    classes differ. An EarlyStopping would get the ``mode`` of the ModelCheckpoint that it replaces.
    """
    replacing = []
    for word, following in pairwise([*words, ""]):
        option, is_assigned, value = word.partition("=")
        trainer: Any = None
        with suppress(OSError, ValueError, TypeError, LookupError, yaml.YAMLError, RecursionError):  # refused later
            value = value if is_assigned else following
            if option in ("--config", "-c"):
                trainer = yaml.safe_load(Path(value).read_text(encoding="utf-8"))["trainer"]
            elif found := re.fullmatch(r"--trainer\.(\w+)", option):
                trainer = {found[1]: yaml.safe_load(value)}
        given = trainer.items() if isinstance(trainer, dict) else ()
        replacing += [f"--trainer.{name}=[]" for name, parts in given if isinstance(parts, list) and _classes(parts)]
        replacing.append(word)
    return replacing


def _classes(parts: list[Any]) -> bool:
    return any(isinstance(part, str) or (isinstance(part, dict) and "class_path" in part) for part in parts)


def _unreadable(words: list[str]) -> list[str]:
    """Return a hint for each configuration of a command line that is not YAML."""
    hints = []
    for path in _configs(words):
        try:
            yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeError):
            continue
        except yaml.YAMLError:
            hints.append(f"The file is {path}.")
    return hints


def _close_classes(message: str) -> list[str]:
    """Return a hint for each unknown class: a close match, or else all classes of its kind."""
    kinds = [getattr(sys.modules.get(module), name, None) for module, name in re.findall(_CLASS, message)]
    bases = tuple(kind for kind in kinds if isinstance(kind, type))
    ours = {name: getattr(part, name) for part in _PARTS for name in part.__all__}
    of_kind = [
        name
        for name, one in ours.items()
        if isinstance(one, type) and issubclass(one, bases) and one not in bases and not isabstract(one)
    ]
    known = [*of_kind, *(name for kind in bases for name in class_names(kind))]
    hints = []
    for name in re.findall(r"Expected a dot import path string: (\S+)", message):
        hints += _close([name], known or list(ours)) or _all_of(sorted(set(known)))
    for module, name in re.findall(r"module '([\w.]+)' has no attribute '(\w+)'", message):
        found = sys.modules.get(module)
        inside = list(getattr(found, "__all__", [name for name in dir(found) if not name.startswith("_")]))
        hints += _close([name], inside) or _all_of([one for one in of_kind if one in inside])
    return list(dict.fromkeys(hints))


def class_names(kind: type, is_base: bool = True) -> Iterator[str]:
    """Yield the names of the imported classes that fit an argument's type: ours, Lightning's and PyTorch's.

    Example:
        >>> list(class_names(algorithms.FedNova))
        ['FedNova']
    """
    if kind.__module__.partition(".")[0] in _PACKAGES:
        below: list[type] = type.__subclasses__(kind)
        if not (isabstract(kind) or kind.__name__.startswith("_") or (is_base and below)):
            yield kind.__name__
        for one in below:
            yield from class_names(one, is_base=False)


def _all_of(known: list[str]) -> list[str]:
    return [f"There are {', '.join(known)}."] if known else []


def _close(found: list[str], known: list[str]) -> list[str]:
    """Return a hint for each name that resembles a known one, ignoring case."""
    written = {name.lower(): name for name in known}
    matches = {name: get_close_matches(name.lower(), written, n=1, cutoff=0.8) for name in found}
    return [f"Did you mean {written[match[0]]} instead of {name}?" for name, match in matches.items() if match]


def arrange(parser: Any, trainer_class: Callable[..., pl.Trainer]) -> None:
    """Group the options of a command in order of use; options of this package come first."""
    own = [f"trainer.{name}" for name in signature(trainer_class).parameters]
    actions = [action for group in parser._action_groups for action in group._group_actions]
    general = [
        "help",
        "config",
        "print_config",
        "seed_everything",
        "ckpt_path",
        "weights_only",
        SUPPRESS,
    ]  # SUPPRESS is -q
    titles: dict[str, Callable[[str], bool]] = {
        "Options": general.__contains__,
        "The rounds": lambda name: name == "trainer" or name.removesuffix(".help") in own,
        "The data of the clients": lambda name: name.split(".")[0] == "data",
        "The model": lambda name: name.split(".")[0] == "model",
        "The clients' optimizer, in place of the model's own": lambda name: name.split(".")[0] == "optimizer",
        "Its schedule": lambda name: name.split(".")[0] == "lr_scheduler",
        "Lightning's arguments of a Trainer": lambda name: name.split(".")[0] == "trainer",
        "Others": lambda name: True,
    }
    for action in actions:
        if (said := _IN_ROUNDS.get(action.dest.removeprefix("trainer."))) is not None:
            action.help = f"{said} (type: %(type)s, default: %(default)s)"
    making = [group for group in parser._action_groups if hasattr(group, "instantiate_class")]
    parser._action_groups.clear()
    for title, belongs in titles.items():
        chosen = [action for action in actions if belongs(action.dest)]
        actions = [action for action in actions if action not in chosen]
        if title == "Options":
            chosen.sort(key=lambda action: general.index(action.dest))
        if chosen:
            parser.add_argument_group(title)._group_actions.extend(chosen)
    for group in making:  # not shown, but jsonargparse makes a class of them that is not chosen by its name
        group.description, group._group_actions = None, []
    parser._action_groups.extend(making)


def plain(text: str) -> str:
    """Return a text without docstring markup.

    Example:
        >>> plain("A :class:`~torch.optim.Adam`, ``lr`` included.")
        'A Adam, lr included.'
    """
    text = _MATH.sub(lambda found: _COMMAND.sub(lambda sign: _SIGNS.get(sign[1], sign[1]), found[1]), text)
    for pattern in (_ROLE_WITH_TITLE, _ROLE, _CODE):
        text = pattern.sub(r"\1", text)
    return text
