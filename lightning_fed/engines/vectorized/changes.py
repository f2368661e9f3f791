"""What clients that are run at once must all find alike: attributes of the module, options of the optimizer."""

import argparse
import pickle
import random
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.algorithms.base_optimizers import BaseOptimizer
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import rank_zero_warn
from lightning_fed.core.errors import FederatedError

__all__ = [
    "INTERNAL",
    "METRICS",
    "PASSING",
    "ChangeWatch",
    "Marks",
    "changed",
    "class_data",
    "class_marks",
    "holders",
    "inside",
    "mark",
    "marks",
    "own_classes",
    "parts_of",
    "tensor_marks",
    "values_in",
    "version_of",
]

_TELLING = 3  # rounds in a row that begin with another attribute, after which it is told

Marks: TypeAlias = dict[tuple[str, str], Any]
"""What tells values apart, by module and attribute."""

PASSING = ("log", "log_dict", "_trainer", "_current_fx_name", "_metric_attributes")
"""Attributes of modules that Lightning and this package set and take back."""

INTERNAL = frozenset(vars(nn.Module()))
"""Attributes that every module has: parameters, buffers, hooks. Whatever happens to these is refused or undone."""

METRICS = (Metric, MetricCollection)
"""Modules whose attributes evaluation resets, and whose updates are looked at in their place."""

_OPAQUE = (type, nn.Module, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_GROWING = (list, deque)
_FOREIGN = ("torch", "pytorch_lightning", "lightning_fabric", "lightning", "torchmetrics", "lightning_fed")
_PLAIN = frozenset({int, str, bool, type(None)})
_DEPTH = 4  # of collections in collections
_MOST = 1_000  # values that are looked at in one attribute; of what holds more, how many


def marks(module: nn.Module, algorithm: Algorithm | None = None) -> Marks:
    """Return, by module and attribute, what changes when an attribute is set, a collection grows, a tensor is written.

    Collections and plain objects are looked into. Parameters and buffers are not looked at, nor are metrics, which
    evaluation resets. The same of a method and its base optimizer, if one is given.
    """
    owners: list[tuple[str, Any]] = [*parts_of(module)]
    if algorithm is not None:
        owners.append(("algorithm", algorithm))
        parts = vars(algorithm).items()
        owners += [(f"algorithm.{name}", part) for name, part in parts if isinstance(part, BaseOptimizer)]
    found: Marks = {}
    for name, owner in owners:
        for key, value in () if isinstance(owner, METRICS) else vars(owner).items():
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


def parts_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module, its submodules, and modules that only collections or plain objects of these hold, by name.

    Layers of PyTorch hold no others, and looking into their attributes takes most of the time.
    """
    seen: set[nn.Module] = set()
    waiting = [("", module)]
    while waiting:
        prefix, root = waiting.pop(0)
        for name, part in root.named_modules(memo=seen, prefix=prefix):
            yield name, part
            for key, value in vars(part).items() if _is_own(type(part)) else ():
                if type(value) not in _PLAIN and key not in INTERNAL and key not in PASSING:
                    hidden = (v for v in values_in(value) if isinstance(v, nn.Module) and v not in seen)
                    waiting += [(f"{name}.{key}.{i}" if name else f"{key}.{i}", v) for i, v in enumerate(hidden)]


def tensor_marks(module: nn.Module, with_trained: bool) -> Marks:
    """Return, by kind ("buffer" or "parameter") and name, what changes when one is assigned or changed in place.

    Args:
        module: The module.
        with_trained: Whether to look at parameters that are trained too.
    """
    found: Marks = {}
    for prefix, part in parts_of(module):
        for kind, own in (("parameter", part._parameters), ("buffer", part._buffers)):
            for name, value in own.items():
                if value is not None and (with_trained or not value.requires_grad):
                    found[kind, f"{prefix}.{name}" if prefix else name] = _Same(value), version_of(value)
    return found


def class_marks(module: nn.Module) -> Marks:
    """Return the same as :func:`marks` of the user's classes of a module and its submodules."""
    classes = own_classes(part for _, part in parts_of(module))
    return {(c.__qualname__, key): mark(value, [_MOST]) for c in classes for key, value in class_data(c).items()}


def own_classes(parts: Iterable[nn.Module]) -> list[type]:
    """Return the classes of modules that are the user's, with their bases."""
    classes = dict.fromkeys(cls for part in parts for cls in type(part).__mro__)
    return [cls for cls in classes if _is_own(cls)]


def _is_own(cls: type) -> bool:
    """Whether a class is the user's."""
    return cls.__module__.partition(".")[0] not in (*_FOREIGN, "builtins")


def class_data(cls: type) -> dict[str, Any]:
    """Return what a class holds by itself, but for what Python puts there."""
    return {key: value for key, value in vars(cls).items() if not key.startswith("__")}


def version_of(value: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 of one that cannot be, made in inference mode."""
    return 0 if value.is_inference() else value._version


def holders(value: Any) -> Iterator[list[Any] | deque[Any] | dict[Any, Any] | set[Any]]:
    """Yield collections in a value that can change, and the attributes of plain objects; as far as :func:`marks`."""
    for part in values_in(value):
        inner = inside(part)
        if isinstance(inner, (*_GROWING, dict, set)):
            yield inner


def values_in(value: Any) -> Iterator[Any]:
    """Yield a value and what is in it, as far as :func:`marks` looks."""
    yield from _values_in(value, [_MOST], _DEPTH)


def _values_in(value: Any, left: list[int], depth: int) -> Iterator[Any]:
    inner = inside(value)
    is_open = inner is not None and depth > 0 and left[0] >= len(inner)
    if inner is None or is_open:
        yield value
    if is_open:
        left[0] -= len(inner)
        for part in inner.values() if isinstance(inner, Mapping) else inner:
            yield from _values_in(part, left, depth - 1)


class _Same:
    """Stand for an object, which is equal to itself alone; it lives on, so that no other takes its place in memory."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def mark(value: Any, left: list[int], depth: int = _DEPTH) -> Any:
    """Return what changes when a value is set, grows or is written to, looking at no more values than are left."""
    if isinstance(value, (int, float, str, bool, type(None))):
        return value if value == value else "nan"
    if isinstance(value, Tensor):
        return _Same(value), version_of(value)
    if isinstance(value, np.ndarray):
        return _Same(value), value.tobytes() if value.dtype != object and value.size <= left[0] else 0
    inner = inside(value)
    if inner is None:
        return _Same(value), _drawn(value)
    if depth == 0 or left[0] < len(inner):
        return _Same(value), len(inner)
    left[0] -= len(inner)
    if isinstance(inner, Mapping):
        parts = ((mark(key, left, 0), mark(part, left, depth - 1)) for key, part in inner.items())
        return _Same(value), *parts
    if isinstance(inner, (set, frozenset)):
        return _Same(value), frozenset(mark(part, left, 0) for part in inner)
    return _Same(value), *(mark(part, left, depth - 1) for part in inner)


def _drawn(value: Any) -> Any:
    """Return what changes when a generator is drawn from; 0 for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if type(value) is random.Random:
        return value.getstate()
    if isinstance(value, np.random.RandomState):
        return pickle.dumps(value.get_state(legacy=False))
    return pickle.dumps(value.bit_generator.state) if isinstance(value, np.random.Generator) else 0


def inside(value: Any) -> Any:
    """Return the collection that a value is, or that its attributes are; None for a value that is looked at as one."""
    if isinstance(value, (list, tuple, deque, dict, set, frozenset)):
        return value
    if isinstance(value, (*_OPAQUE, random.Random)):
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
        self._tensors: Marks = {}  # see begin_work
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

    def begin_work(self) -> None:
        """Take note of buffers, metrics and frozen parameters; before the first clients of a round."""
        if not self._worked:
            self._tensors = self._tensors_now()

    def check_work(self) -> None:
        """Refuse a ``training_step`` that has begun to leave something behind; after the first clients of a round.

        Raises:
            FederatedError: Naming one.
        """
        self._worked += 1
        if self._worked > 1:
            return
        tensors, self._tensors = self._tensors, {}
        what = self._changed_attribute() or self._changed_tensor(tensors)
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

    def _changed_tensor(self, before: Marks) -> str | None:
        after = self._tensors_now()
        kind, name = next((k for k in (*after, *before) if after.get(k) != before.get(k)), ("", ""))
        return f"the {kind} {name!r} of {type(self.module).__name__}" if kind else None

    def _tensors_now(self) -> Marks:
        metrics = ((name, part) for name, part in parts_of(self.module) if isinstance(part, Metric))
        updates: Marks = {("metric", name): part._update_count for name, part in metrics}
        return tensor_marks(self.module, with_trained=False) | updates
