"""What a module holds beside parameters and buffers, looked at to see whether it changes."""

import argparse
import types
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.base_optimizers import BaseOptimizer

__all__ = ["INTERNAL", "PASSING", "Marks", "changed", "holders", "marks"]

Marks: TypeAlias = dict[tuple[str, str], Any]
"""What tells values apart, by module and attribute."""

PASSING = ("log", "log_dict", "_trainer", "_current_fx_name", "_metric_attributes")
"""Attributes of modules that Lightning and this package set and take back."""

INTERNAL = frozenset(vars(nn.Module()))
"""Attributes that every module has: parameters, buffers, hooks. Whatever happens to these is refused or undone."""

_OPAQUE = (type, nn.Module, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_FOREIGN = ("torch", "pytorch_lightning", "lightning_fabric", "torchmetrics", "lightning_fed")
_PLAIN = frozenset({int, str, bool, type(None)})
_DEPTH = 4  # of collections in collections
_MOST = 1_000  # values that are looked at in one attribute; of what holds more, how many


def marks(module: nn.Module, algorithm: Algorithm | None = None) -> Marks:
    """Return, by module and attribute, what changes when an attribute is set, a collection grows, a tensor is written.

    Collections and plain objects are looked into. Parameters and buffers are not looked at, nor are metrics, which
    evaluation resets. The same of a method and its base optimizer, if one is given.
    """
    owners: list[tuple[str, Any]] = [
        (name, part) for name, part in module.named_modules() if not isinstance(part, (Metric, MetricCollection))
    ]
    if algorithm is not None:
        parts = [value for value in vars(algorithm).values() if isinstance(value, BaseOptimizer)]
        owners += [("algorithm", algorithm), *((f"algorithm.{i}", part) for i, part in enumerate(parts))]
    return {
        (name, key): value if type(value) in _PLAIN else len(value) if key in INTERNAL else _mark(value, [_MOST])
        for name, part in owners
        for key, value in vars(part).items()
        if key not in PASSING
    }


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
    inner = _inside(value)
    if inner is None or depth == 0 or left[0] < len(inner):
        return
    left[0] -= len(inner)
    if isinstance(inner, (list, dict, set)):
        yield inner
    for part in inner.values() if isinstance(inner, Mapping) else inner:
        yield from _holders(part, left, depth - 1)


def _mark(value: Any, left: list[int], depth: int = _DEPTH) -> Any:
    if isinstance(value, (int, float, str, bool, type(None))):
        return value if value == value else "nan"
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, np.ndarray):
        return id(value), value.tobytes() if value.dtype != object and value.size <= left[0] else 0
    inner = _inside(value)
    if inner is None:
        return id(value), 0
    if depth == 0 or left[0] < len(inner):
        return id(value), len(inner)
    left[0] -= len(inner)
    if isinstance(inner, Mapping):
        return id(value), *((_mark(key, left, 0), _mark(part, left, depth - 1)) for key, part in inner.items())
    if isinstance(inner, (set, frozenset)):
        return id(value), frozenset(_mark(part, left, 0) for part in inner)
    return id(value), *(_mark(part, left, depth - 1) for part in inner)


def _inside(value: Any) -> Any:
    """Return the collection that a value is, or that its attributes are; None for a value that is looked at as one."""
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        return value
    if isinstance(value, _OPAQUE):
        return None
    if type(value).__module__.partition(".")[0] in _FOREIGN and not isinstance(value, argparse.Namespace):
        return None
    return getattr(value, "__dict__", None)
