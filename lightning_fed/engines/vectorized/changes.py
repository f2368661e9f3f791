"""What clients that are run at once must all find alike: attributes of the module, options of the optimizer."""

import argparse
import types
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_fed._compat import rank_zero_warn
from lightning_fed._lightning import pl
from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.base_optimizers import BaseOptimizer
from lightning_fed.core.errors import FederatedError

__all__ = ["INTERNAL", "PASSING", "ChangeWatch", "Marks", "changed", "holders", "inside", "mark", "marks"]

_TELLING = 3  # rounds in a row that begin with another attribute, after which it is told

Marks: TypeAlias = dict[tuple[str, str], Any]
"""What tells values apart, by module and attribute."""

PASSING = ("log", "log_dict", "_trainer", "_current_fx_name", "_metric_attributes")
"""Attributes of modules that Lightning and this package set and take back."""

INTERNAL = frozenset(vars(nn.Module()))
"""Attributes that every module has: parameters, buffers, hooks. Whatever happens to these is refused or undone."""

_OPAQUE = (type, nn.Module, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_FOREIGN = ("torch", "pytorch_lightning", "lightning_fabric", "lightning", "torchmetrics", "lightning_fed")
_PLAIN = frozenset({int, str, bool, type(None)})
_DEPTH = 4  # of collections in collections
_MOST = 1_000  # values that are looked at in one attribute; of what holds more, how many


def marks(module: nn.Module, algorithm: Algorithm | None = None) -> Marks:
    """Return, by module and attribute, what changes when an attribute is set, a collection grows, a tensor is written.

    Collections and plain objects are looked into. Parameters and buffers are not looked at, nor are metrics, which
    evaluation resets. The same of a method and its base optimizer, if one is given.
    """
    owners: list[tuple[str, Any]] = [*module.named_modules()]
    if algorithm is not None:
        owners.append(("algorithm", algorithm))
        parts = vars(algorithm).items()
        owners += [(f"algorithm.{name}", part) for name, part in parts if isinstance(part, BaseOptimizer)]
    found: Marks = {}
    for name, owner in owners:
        for key, value in () if isinstance(owner, (Metric, MetricCollection)) else vars(owner).items():
            if type(value) in _PLAIN and key not in PASSING:
                found[name, key] = value
            elif key not in PASSING:
                found[name, key] = len(value) if key in INTERNAL else mark(value, [_MOST])
    return found


def changed(before: Marks, after: Marks) -> str | None:
    """Return the name of an attribute that has changed, None if none has."""
    if before == after:
        return None
    for key in dict.fromkeys((*after, *before)):  # not in the order of a set, which differs from run to run
        if after.get(key) != before.get(key):
            return ".".join(filter(None, key))
    return None


def holders(value: Any) -> Iterator[list[Any] | dict[Any, Any] | set[Any]]:
    """Yield lists, dicts and sets in a value, and the attributes of plain objects; as far as :func:`marks` looks."""
    yield from _holders(value, [_MOST], _DEPTH)


def _holders(value: Any, left: list[int], depth: int) -> Iterator[list[Any] | dict[Any, Any] | set[Any]]:
    inner = inside(value)
    if inner is None or depth == 0 or left[0] < len(inner):
        return
    left[0] -= len(inner)
    if isinstance(inner, (list, dict, set)):
        yield inner
    for part in inner.values() if isinstance(inner, Mapping) else inner:
        yield from _holders(part, left, depth - 1)


def mark(value: Any, left: list[int], depth: int = _DEPTH) -> Any:
    """Return what changes when a value is set, grows or is written to, looking at no more values than are left."""
    if isinstance(value, (int, float, str, bool, type(None))):
        return value if value == value else "nan"
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, np.ndarray):
        return id(value), value.tobytes() if value.dtype != object and value.size <= left[0] else 0
    inner = inside(value)
    if inner is None:
        return id(value), 0
    if depth == 0 or left[0] < len(inner):
        return id(value), len(inner)
    left[0] -= len(inner)
    if isinstance(inner, Mapping):
        return id(value), *((mark(key, left, 0), mark(part, left, depth - 1)) for key, part in inner.items())
    if isinstance(inner, (set, frozenset)):
        return id(value), frozenset(mark(part, left, 0) for part in inner)
    return id(value), *(mark(part, left, depth - 1) for part in inner)


def inside(value: Any) -> Any:
    """Return the collection that a value is, or that its attributes are; None for a value that is looked at as one."""
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        return value
    if isinstance(value, _OPAQUE):
        return None
    if type(value).__module__.partition(".")[0] in _FOREIGN and not isinstance(value, argparse.Namespace):
        return None
    return getattr(value, "__dict__", None)


class ChangeWatch:
    """Sees to it that nothing changes between clients that are run at once.

    Args:
        trainer: The trainer, with its module attached.
        algorithm: The method.
    """

    def __init__(self, trainer: pl.Trainer, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self.module = trainer.lightning_module
        self._marks: Marks = {}
        self._hooks_changed = False  # whether hooks of this round's clients have changed an attribute
        self._has_hooks = False  # whether any callback hears of single clients in this round
        self._worked = 0  # times that clients have been at work in this round
        self._in_a_row = 0  # rounds before which an attribute has changed
        self._has_warned = False

    def remember(self) -> None:
        """Take note of all attributes."""
        self._marks = marks(self.module, self.algorithm)

    def begin_round(self) -> bool:
        """Take note of everything; return whether an attribute has changed since this was last done."""
        before = self._marks
        self.remember()
        self._worked, self._has_hooks = 0, False
        name = changed(before, self._marks)
        if name is None and not self._hooks_changed:
            self._in_a_row = 0
        self._hooks_changed = False
        self._tell(name)
        return name is not None

    def _tell(self, name: str | None) -> None:
        """Count the rounds in a row in which an attribute changes, and warn once if these are many."""
        self._in_a_row += name is not None
        if name is not None and self._in_a_row == _TELLING:
            rank_zero_warn(
                f"The attribute {name!r} of {type(self.module).__name__} changes from round to round, so that"
                " engine='vectorized' tries the module out and traces it anew each time, which is slow. If no step"
                " reads it, keep it elsewhere, in a callback for one; or use engine='sequential'."
            )

    def expect_hooks(self) -> None:
        """Take note of all attributes between chunks, where hooks of clients may have set some.

        :class:`~lightning_fed.engines.vectorized.client_settings.ClientSettings` compares these; the work of every
        chunk is then compared with this note, and not only that of the first.
        """
        before, is_first = self._marks, not self._has_hooks
        self.remember()
        self._worked, self._has_hooks = 0, True
        name = changed(before, self._marks) if is_first else None
        self._hooks_changed = self._hooks_changed or name is not None
        self._tell(name)

    def check_work(self) -> None:
        """Refuse a ``training_step`` that has begun to change attributes; after the first clients of a round.

        Raises:
            FederatedError: Naming one.
        """
        self._worked += 1
        if self._worked > 1:
            return
        what = self._changed_attribute()
        if what is not None:
            raise FederatedError(
                f"engine='vectorized' cannot go on with {type(self.module).__name__}.training_step: it changes {what},"
                " which it did not when it was tried out. Change that, or use engine='sequential'."
            )

    def end_round(self) -> None:
        """Warn, once, of attributes that changed while clients were at work."""
        if self._has_warned or self._has_hooks or self._worked <= 1:
            return
        what = self._changed_attribute()
        if what is not None:
            self._has_warned = True
            rank_zero_warn(
                f"{what[:1].upper()}{what[1:]} changes while a round's clients are at work. With engine='vectorized'"
                " their local steps go by its value at the start of the round."
            )

    def _changed_attribute(self) -> str | None:
        name = changed(self._marks, marks(self.module, self.algorithm))
        return None if name is None else f"the attribute {name!r} of {type(self.module).__name__}"
