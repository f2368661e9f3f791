"""The help and the errors of the parser in plain words: groups in the order of use, no markup, no Python types."""

import re
from collections.abc import Callable
from inspect import signature
from typing import Any

from lightning_fed.compat.package import pl

__all__ = ["arrange", "plain", "plain_error"]

_ROLE = re.compile(r":\w+(?::\w+)?:`~?(?:[\w.]*\.)?(\w+)`")
_ROLE_WITH_TITLE = re.compile(r":\w+(?::\w+)?:`([^`<]+?)\s*<[^`]*>`")
_MATH = re.compile(r":math:`([^`]+)`")
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_SIGNS = {"ge": ">=", "le": "<=", "to": "->", "times": "x", "in": "in"}
_CODE = re.compile(r"``([^`]+)``")
_CLASS = re.compile(r"<class '(?:[\w.]*\.)?(\w+)'>")
_DOTTED = re.compile(r"\b(?:\w+\.)+(\w+)")
_NESTED = re.compile(r"NestedArg\(key='([\w.]+)', val='?(.*?)'?\)$")


def arrange(parser: Any, trainer_class: Callable[..., pl.Trainer]) -> None:
    """Put the options of a command into groups in the order of use; those of this package come first.

    Args:
        parser: The parser of a command such as ``fit``.
        trainer_class: The trainer, whose own arguments are told from Lightning's.
    """
    own = [f"trainer.{name}" for name in signature(trainer_class).parameters]
    actions = [action for group in parser._action_groups for action in group._group_actions]
    general = ["help", "config", "print_config", "seed_everything", "ckpt_path", "weights_only"]
    titles: dict[str, Callable[[str], bool]] = {
        "Options": general.__contains__,
        "The rounds": lambda name: name == "trainer" or name.removesuffix(".help") in own,
        "The data of the clients": lambda name: _is_of(name, "data"),
        "The model": lambda name: _is_of(name, "model"),
        "The clients' optimizer, in place of the model's own": lambda name: _is_of(name, "optimizer"),
        "Its schedule": lambda name: _is_of(name, "lr_scheduler"),
        "Lightning's arguments of a Trainer": lambda name: _is_of(name, "trainer"),
        "Others": lambda name: True,
    }
    parser._action_groups.clear()
    for title, belongs in titles.items():
        chosen = [action for action in actions if belongs(action.dest)]
        actions = [action for action in actions if action not in chosen]
        if title == "Options":
            chosen.sort(key=lambda action: general.index(action.dest))
        if chosen:
            parser.add_argument_group(title)._group_actions.extend(chosen)


def _is_of(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def plain(text: str) -> str:
    """Return a text without the markup of docstrings, and with classes by their names.

    Example:
        >>> plain("A :class:`~torch.optim.Adam`, ``lr`` included, or <class 'NoneType'>.")
        'A Adam, lr included, or null.'
    """
    text = _MATH.sub(lambda found: _COMMAND.sub(lambda sign: _SIGNS.get(sign[1], sign[1]), found[1]), text)
    for pattern in (_ROLE_WITH_TITLE, _ROLE, _CODE, _CLASS):
        text = pattern.sub(r"\1", text)
    return text.replace("NoneType", "null")


def plain_error(message: str) -> str:
    """Return the parser's message without Python's types: what was expected, and what was found."""
    lines = [line for line in map(_plain_line, message.split("\n")) if line is not None]
    lines = [line for line, before in zip(lines, ["", *lines], strict=False) if line != before]
    kept = [
        line
        for line, after in zip(lines, [*lines[1:], ""], strict=True)
        if line.strip() and (line.strip() != "Errors:" or after.lstrip().startswith("- "))
    ]
    return "\n".join(kept)


def _plain_line(line: str) -> str | None:
    """Return one line of a message in plain words; None if it says nothing that another does not."""
    text = line.strip().removeprefix("- ")
    start = line[: len(line) - len(line.lstrip())] + ("- " if line.lstrip().startswith("- ") else "")
    if text.startswith("Given value type:") or re.fullmatch(r"Expected an? <class '[\w.]+'>", text):
        return None
    if text.startswith("Does not validate against any of the Union subtypes"):
        return None
    if found := re.fullmatch(r"Subtypes: \[(.*)\]", text):
        return f"{start}Expected one of: {_DOTTED.sub(_last, plain(found[1]))}"
    if found := re.fullmatch(r"Given value: (.*)", text):
        return f"{start}Found: {_NESTED.sub(_assigned, found[1])}"
    if found := re.fullmatch(r"Expected a path but (.*) either not accessible or invalid", text):
        return f"{start}There is no file {found[1]}"
    if found := re.fullmatch(r"Expected a dot import path string: (.*)", text):
        return f"{start}There is no class {found[1]}"
    return start + plain(re.sub(r"Expected an? (<class)", r"Expected \1", text))


def _last(found: re.Match[str]) -> str:
    return found[1]


def _assigned(found: re.Match[str]) -> str:
    return f"{found[1]}={found[2]}"
