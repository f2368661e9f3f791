"""Check a site's reply: every number, name and tensor of it has its bounds here."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import Run
from lightning_fed.core.types import State
from lightning_fed.data.files.tables import is_word
from lightning_fed.deploy.message import MOST, Message, is_count, quoted
from lightning_fed.engines.optimizer import FederatedOptimizer
from lightning_fed.rounds.messages import Task

NAMES = 1000
"""The most names in one mapping or list."""

_LENGTH = 200  # characters of a name


class Fields:
    """The plain values of a reply by name; those out of bounds raise :class:`FederatedError`."""

    def __init__(self, who: str, values: Any, name: str = "report") -> None:
        self._who = who
        self._values = self._checked(name, values, isinstance(values, Mapping), "a mapping")

    def _checked(self, name: str, value: Any, is_good: bool, expected: str) -> Any:
        if not is_good:
            raise FederatedError(
                f"{self._who} is not valid: its {name} is {quoted(value)}, and {expected} is expected."
            )
        return value

    def count(self, name: str) -> int:
        """Return a whole number from 0 to 2**53."""
        value = self._values.get(name)
        return int(self._checked(name, value, is_count(value), "a whole number from 0 to 2**53"))

    def number(self, name: str) -> float:
        """Return a number, which may be infinite or none (nan)."""
        return self._number(name, self._values.get(name))

    def _number(self, name: str, value: Any) -> float:
        return float(self._checked(name, value, isinstance(value, float) or is_count(value, -MOST), "a number"))

    def numbers(self, name: str) -> dict[str, float]:
        """Return numbers by name, which are finite or none (nan)."""
        found = {key: self._number(f"{name} {key!r}", value) for key, value in self._items(name)}
        for key, value in found.items():
            self._checked(f"{name} {key!r}", value, not math.isinf(value), "a finite number")
        return found

    def texts(self, name: str) -> dict[str, str]:
        """Return names by name."""
        return {key: self._name(f"{name} {key!r}", value) for key, value in self._items(name)}

    def names(self, name: str) -> list[str]:
        """Return a list of names."""
        found = self._values.get(name)
        self._checked(name, found, isinstance(found, list) and len(found) <= NAMES, "a list of names")
        return [self._name(name, value) for value in found]

    def _items(self, name: str) -> list[tuple[str, Any]]:
        found = self._values.get(name)
        self._checked(name, found, isinstance(found, Mapping) and len(found) <= NAMES, "a mapping of names")
        return [(self._name(name, key), value) for key, value in found.items()]

    def _name(self, name: str, value: Any) -> str:
        is_good = isinstance(value, str) and len(value) <= _LENGTH and value.isprintable()
        return str(self._checked(name, value, is_good, f"a name of up to {_LENGTH} printable characters"))


def words_in(message: Message, who: str, columns: Iterable[str] | None = None) -> dict[str, list[str]]:
    """Return the words of columns in a message, by default of all columns that it has."""
    given = message.header.get("words", {})
    words = Fields(who, given, "words")
    found = {name: words.names(name) for name in (given if columns is None else columns)}
    for name, own in found.items():
        if wrong := [word for word in own if not is_word(word)]:
            raise FederatedError(
                f"{who} is not valid: {wrong[0]!r} in its {name} stands for a missing value or has spaces around it."
            )
        if len(set(own)) < len(own):
            raise FederatedError(f"{who} is not valid: its {name} is a list with a word twice.")
    return found


@dataclass(frozen=True, slots=True)
class Expected:
    """The content of a method's messages in a round.

    Attributes:
        like: Shape and type of each.
        implied: The names of those that need not travel.
        model: Whether the model comes in the place of the change "delta", so that the server knows the norm of that.
    """

    like: Mapping[str, tuple[torch.Size, torch.dtype]]
    implied: frozenset[str]
    model: bool

    @staticmethod
    def of(algorithm: Algorithm, optimizer: FederatedOptimizer, task: Task, client: State) -> "Expected":
        """Ask the method what a client sends that stays where it is, given what a new client keeps."""
        x, zero = task.x, torch.zeros_like(task.x)
        gradients = dict.fromkeys(algorithm.full_grad_at, zero)
        lr = optimizer.spread(optimizer.rates)
        is_straight, moves = optimizer.plan_of(algorithm).is_straight, optimizer.schedule is not None
        follows = is_straight and isinstance(lr, float) and (lr != 0 or moves)  # a client's rates may not be zero
        local = algorithm.init_local(x, task.server, client)
        run = Run(
            x, zero, task.server, client, local, gradients, dict(task.cohort_grad),
            1.0, 1.0, 1, lr, lambda: zero, follows,
        )  # fmt: skip
        update = algorithm.finish(x, run)
        like = {name: (value.shape, value.dtype) for name, value in update.send.items()}
        model = update.send.get("delta") is zero and "delta" not in update.implied
        return Expected(like, frozenset(update.implied), model)


def check_tensor(who: str, name: str, value: Tensor, like: tuple[torch.Size, torch.dtype]) -> None:
    """Refuse a tensor of another shape or type, or with numbers that are not finite."""
    shape, dtype = like
    if value.shape != shape:
        raise FederatedError(f"{who} has {name!r} of shape {list(value.shape)}, where {list(shape)} is expected.")
    if value.dtype != dtype:
        raise FederatedError(f"{who} has {name!r} of {value.dtype}, where {dtype} is expected.")
    check_finite(who, name, value)


def check_finite(who: str, name: str, value: Tensor) -> None:
    """Refuse a tensor with numbers that are not finite."""
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        raise FederatedError(f"{who} has {name!r} with numbers that are not finite. Look at its data and rates.")
