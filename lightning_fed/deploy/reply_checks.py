"""What a server takes from a site: every number, name and tensor of a reply has its bounds here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import Run
from lightning_fed.core.types import State
from lightning_fed.deploy.message import shown
from lightning_fed.engines.optimizer import FederatedOptimizer
from lightning_fed.rounds.messages import Task

__all__ = ["MOST", "Expected", "Fields", "check_finite", "check_tensor"]

MOST = 2**53
"""The largest count: a float has every whole number up to here."""

_LENGTH, _NAMES = 200, 1000  # characters of a name, and names in one mapping


class Fields:
    """The plain values of a reply by name; those out of bounds raise :class:`FederatedError`."""

    def __init__(self, who: str, values: Any) -> None:
        self._who = who
        if not isinstance(values, Mapping):
            raise self._wrong("report", values, "a mapping")
        self._values = values

    def _wrong(self, name: str, value: Any, expected: str) -> FederatedError:
        return FederatedError(f"{self._who} is no reply: its {name} is {shown(value)}, where {expected} is expected.")

    def count(self, name: str) -> int:
        """Return a whole number from 0 to :data:`MOST`."""
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST:
            raise self._wrong(name, value, "a whole number from 0 to 2**53")
        return value

    def number(self, name: str) -> float:
        """Return a number, which may be infinite or none (nan)."""
        return self._number(name, self._values.get(name))

    def _number(self, name: str, value: Any) -> float:
        is_whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MOST
        if not is_whole and not isinstance(value, float):
            raise self._wrong(name, value, "a number")
        return float(value)

    def numbers(self, name: str) -> dict[str, float]:
        """Return numbers by name, which are finite or none (nan)."""
        found = {}
        for key, value in self._named(name).items():
            found[key] = self._number(f"{name} {key!r}", value)
            if math.isinf(found[key]):
                raise self._wrong(f"{name} {key!r}", value, "a finite number")
        return found

    def texts(self, name: str) -> dict[str, str]:
        """Return names by name."""
        found = self._named(name)
        for key, value in found.items():
            self._check_name(f"{name} {key!r}", value)
        return found

    def names(self, name: str) -> list[str]:
        """Return a list of names."""
        found = self._values.get(name)
        if not isinstance(found, list) or len(found) > _NAMES:
            raise self._wrong(name, found, "a list of names")
        for value in found:
            self._check_name(name, value)
        return found

    def _named(self, name: str) -> dict[str, Any]:
        found = self._values.get(name)
        if not isinstance(found, Mapping) or len(found) > _NAMES:
            raise self._wrong(name, found, "a mapping of names")
        for key in found:
            self._check_name(name, key)
        return dict(found)

    def _check_name(self, name: str, value: Any) -> None:
        if not isinstance(value, str) or len(value) > _LENGTH or not value.isprintable():
            raise self._wrong(name, value, f"a name of up to {_LENGTH} printable characters")


@dataclass(frozen=True, slots=True)
class Expected:
    """The messages of a method in a round.

    Attributes:
        like: Shape and type of each by name.
        implied: The names of those that need not travel.
    """

    like: Mapping[str, tuple[torch.Size, torch.dtype]]
    implied: frozenset[str]

    @staticmethod
    def of(algorithm: Algorithm, optimizer: FederatedOptimizer, task: Task, client: State) -> "Expected":
        """Ask the method what a client sends that stays where it is, given what a new client keeps."""
        x, zero = task.x, torch.zeros_like(task.x)
        gradients = dict.fromkeys(algorithm.full_grad_at, zero)
        lr = optimizer.spread(optimizer.rates)
        follows = optimizer.plan_of(algorithm).is_straight and isinstance(lr, float) and lr != 0
        local = algorithm.init_local(x, task.server, client)
        run = Run(
            x, zero, task.server, client, local, gradients, dict(task.cohort_grad),
            1.0, 1.0, 1, lr, lambda: zero, follows,
        )  # fmt: skip
        update = algorithm.finish(x, run)
        like = {name: (value.shape, value.dtype) for name, value in update.send.items()}
        return Expected(like, frozenset(update.implied))


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
