"""Snapshots of modules and other objects, without trained parameters: they detect changes and restore them."""

import argparse
import copy
import logging
import math
import operator
import pickle
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric, MetricCollection

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.algorithms.base_optimizers import BaseOptimizer
from lightning_fed.core.plain import bytes_of

PASSING = frozenset(
    {"log", "log_dict", "_trainer", "_current_fx_name", "_metric_attributes", "_param_requires_grad_state"}
)
"""Module attributes that Lightning and this package set and reset."""

INTERNAL = frozenset(vars(nn.Module()))
"""Attributes of every module: parameters, buffers, hooks."""

METRICS = (Metric, MetricCollection)
"""Modules whose attributes evaluation resets; their updates are counted instead."""

_METRIC_COUNTS = ("_update_count", "_computed", "_forward_cache")  # of a metric, in addition to its state
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_OPAQUE = (type, nn.Module, types.ModuleType, *_FUNCTIONS, logging.Logger)  # a logger caches its enabled levels
_GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
_FOREIGN = ("torch", "pytorch_lightning", "lightning_fabric", "lightning", "torchmetrics", "lightning_fed")
_PLAIN = (int, float, str, type(None))  # compared by value
_DEPTH = 20  # the deepest nesting of collections that is inspected, such as in a configuration
_MOST = 1_000  # values inspected in one attribute; larger collections are compared by length
_SMALL = 2**14  # tensors up to this size are compared in full
_ARRAY = 2**20  # arrays up to this size are compared in full, and restored
_ABSENT = object()  # marks a missing attribute

Key: TypeAlias = tuple[str, str]
"""A kind, such as "attribute" or "buffer", and a name."""


# ------------------------------------------------------------------ parts of a module


def parts_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module, its submodules, and modules found only in their collections or plain objects, with names."""
    seen: set[nn.Module] = set()
    waiting = [("", module)]
    while waiting:
        prefix, root = waiting.pop(0)
        for name, part in root.named_modules(memo=seen, prefix=prefix):
            yield name, part
            cls: Any = type(part)
            # skip PyTorch's layers: they hide no modules, and inspecting their attributes would take most of the time
            for key, value in vars(part).items() if _is_own(cls) else ():
                if isinstance(value, _PLAIN) or key in INTERNAL or key in PASSING:
                    continue
                number = 0
                for hidden in values_in(value):
                    if isinstance(hidden, nn.Module) and hidden not in seen:
                        waiting.append((f"{name}.{key}.{number}" if name else f"{key}.{number}", hidden))
                        number += 1


def without_metrics(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the same as :func:`parts_of`, without metrics."""
    return (own for own in parts_of(module) if not isinstance(own[1], METRICS))


def own_tensors(parts: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[Key, Tensor]]:
    """Yield the parameters and buffers of modules by kind ("parameter" or "buffer") and name."""
    for prefix, part in parts:
        for kind, own in (("parameter", part._parameters), ("buffer", part._buffers)):
            for name, value in own.items():
                if value is not None:
                    yield (kind, f"{prefix}.{name}" if prefix else name), value


def attribute_values(parts: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield the values in all other attributes of modules, each with its module and the attribute's name."""
    for prefix, part in parts:
        for name, attribute in vars(part).items():
            if name not in INTERNAL and name not in PASSING:
                for value in values_in(attribute):
                    yield part, f"{prefix}.{name}" if prefix else name, value


def attribute_tensors(parts: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[Key, Tensor]]:
    """Yield the tensors in other attributes of modules by kind ("attribute" or "metric") and name."""
    for part, name, value in attribute_values(parts):
        if isinstance(value, Tensor):
            yield ("metric" if isinstance(part, METRICS) else "attribute", name), value


def parts_of_method(algorithm: Algorithm) -> Iterator[tuple[str, Any]]:
    """Yield a method and its base optimizer, with the prefixes of their attributes."""
    yield "", algorithm
    for name, part in vars(algorithm).items():
        if isinstance(part, BaseOptimizer):
            yield f"{name}.", part


def own_classes(parts: Iterable[nn.Module]) -> list[type]:
    """Return the user-defined classes of modules, including bases."""
    classes = dict.fromkeys(cls for part in parts for cls in type(part).__mro__)
    return [cls for cls in classes if _is_own(cls)]


def attributes_of(module: nn.Module) -> "Snapshot":
    """Return a snapshot of the attributes of a module and its submodules, without metrics, and of their classes."""
    found = Snapshot(without_metrics(module))
    for cls in own_classes(part for _, part in parts_of(module)):
        found.add("attribute", f"{cls.__qualname__}.", cls)
    return found


@lru_cache(1024)
def _is_own(cls: type) -> bool:
    """Return whether a class is user-defined."""
    return cls.__module__.partition(".")[0] not in (*_FOREIGN, "builtins")


# ------------------------------------------------------------------ metrics


def metric_state(metric: Metric) -> dict[str, Any]:
    """Return a copy of a metric's state and counts, and of the results that it keeps.

    A wrapper may name the states of the metric inside, which is a part of its own: ``ClasswiseWrapper`` does.
    """
    own = vars(metric)
    return copy_state({name: own[name] for name in (*metric.metric_state, *_METRIC_COUNTS) if name in own})


def copy_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a metric's state. Its tensors may have a graph, which ``deepcopy`` does not take."""
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else list(value) if isinstance(value, list) else value
        for name, value in state.items()
    }


def copy_metric(metric: Metric | MetricCollection) -> Any:
    """Return a copy of a metric, a wrapper of metrics or a collection, whatever values they have seen."""
    memo: dict[int, Any] = {}  # what deepcopy takes as copied
    for part in metric.modules():
        if isinstance(part, Metric):
            memo |= {id(vars(part)[name]): copied for name, copied in metric_state(part).items()}
    return copy.deepcopy(metric, memo)


# ------------------------------------------------------------------ parts of a value


def values_in(value: Any, left: list[int] | None = None, above: tuple[int, ...] = ()) -> Iterator[Any]:
    """Yield a value and, recursively, its contents; ``above`` has the ids of its containers."""
    if type(value) in weakref.ProxyTypes:  # a proxy passes for its object, which may be gone
        return
    left = [_MOST] if left is None else left  # number of values that may still be inspected
    yield value
    inner = _inside(value)
    if inner is not None and len(above) < _DEPTH and id(value) not in above and left[0] >= len(inner):
        left[0] -= len(inner)
        for part in inner.values() if isinstance(inner, Mapping) else inner:
            yield from values_in(part, left, (*above, id(value)))


def _inside(value: Any) -> Any:
    """Return the value itself if it is a collection, otherwise its attributes; None if it is not inspected."""
    if isinstance(value, tuple):
        return tuple.__getitem__(value, slice(None))  # without the methods of its class: e3nn's refuse len()
    if isinstance(value, (list, deque, dict, set, frozenset)):
        return value
    if isinstance(value, (*_OPAQUE, random.Random)):
        return None
    if type(value).__module__.partition(".")[0] in _FOREIGN and not isinstance(value, argparse.Namespace):
        return None
    inner = _own_attribute(value, "__dict__", None)
    slots = _slots_in(value)
    return {**slots, **(inner or {})} if slots else inner


def _own_attribute(value: Any, name: str, default: Any) -> Any:
    """Return an object's own attribute, bypassing its ``__getattr__``."""
    try:
        return object.__getattribute__(value, name)
    except Exception:  # raised by a property, say
        return default


@lru_cache(1024)
def _slots_of(cls: Any) -> tuple[str, ...]:
    """Return the names of a class's slots, such as a dataclass may have; none for classes of the standard library."""
    if cls.__module__.partition(".")[0] in sys.stdlib_module_names:
        return ()
    found = list[str]()
    for base in cls.__mro__:
        names = base.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            is_mangled = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if is_mangled else name)
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def _slots_in(value: Any) -> dict[str, Any]:
    missing: Any = object()
    cls: Any = type(value)
    found = {name: _own_attribute(value, name, missing) for name in _slots_of(cls)}
    return {name: own for name, own in found.items() if own is not missing}


def _class_data(cls: type) -> dict[str, Any]:
    """Return the attributes of a class, without names that start with two underscores, which Python sets."""
    return {key: value for key, value in vars(cls).items() if not key.startswith("__")}


def _version_of(value: Tensor) -> int:
    """Return the number of in-place changes of a tensor; 0 for inference tensors, which do not count them."""
    return 0 if value.is_inference() else value._version


def _state_of(value: Any) -> tuple[Any, Callable[[Any], Any]] | None:
    """Return the state of a generator and its setter, or None for any other value."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy(), lambda state: value.set_state(torch.from_numpy(state))
    if type(value) is random.Random:
        return value.getstate(), value.setstate
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False), value.set_state
    if isinstance(value, np.random.Generator):
        return copy.deepcopy(value.bit_generator.state), partial(setattr, value.bit_generator, "state")
    return None


# ------------------------------------------------------------------ attributes and their contents


class Snapshot:
    """The state of objects at one time, to detect later changes and restore them.

    It compares attributes, contents of collections and plain objects, states of generators, numbers in arrays, and how
    often tensors were written to. For parameters and buffers, :meth:`changed` only compares how many a module has,
    unless asked for replaced ones. Numbers in tensors are not restored (see :class:`TensorCopies`), and numbers in
    arrays only if there are few.

    ``owners`` are modules by name.
    """

    def __init__(self, owners: Iterable[tuple[str, nn.Module]] = ()) -> None:
        # each entry: key, object, its reader (None for a collection), the result, and the names to compare or restore
        # (None for all). If the name in a key is empty or ends with a dot, the names of attributes are added to it.
        self._held: list[tuple[Key, Any, Callable[[Any], Any] | None, Any, Collection[str] | None]] = []
        self._tensors: list[tuple[Key, Any, None, Any, None]] = []  # the same for each module's parameters and buffers
        for name, owner in owners:
            self.add("attribute", f"{name}." if name else "", owner)

    def add(self, kind: str, prefix: str, owner: Any, names: Collection[str] | None = None, deep: bool = True) -> None:
        """Save attributes of an object or class, or values of a dict, by default all; with contents if ``deep``."""
        read = None if isinstance(owner, dict) else _class_data if isinstance(owner, type) else vars
        was = dict(owner if read is None else read(owner))
        self._held.append(((kind, prefix), owner, read, was, names))
        for name, value in was.items() if deep else ():
            key = kind, prefix + name
            if name in INTERNAL and isinstance(owner, nn.Module):
                if name in ("_parameters", "_buffers") and isinstance(value, dict):  # a scripted module's are not
                    self._tensors.append((key, value, None, value.copy(), None))
                elif isinstance(value, (dict, set)):
                    self._held.append((key, value, None, value.copy(), None))
            elif name not in PASSING and not isinstance(value, _PLAIN):
                for part in values_in(value):
                    # skip the parameters in an optimizer's group: each step changes their numbers
                    if not (isinstance(owner, dict) and isinstance(part, nn.Parameter)):
                        self._add_value(key, part)

    def _add_value(self, key: Key, value: Any) -> None:
        if isinstance(value, (list, deque, dict, set)) and len(value) <= _MOST:
            kind: Any = dict if isinstance(value, dict) else set if isinstance(value, set) else list
            self._held.append((key, value, None, kind(value), None))  # not of its class, which may need arguments
        elif (mark := _mark_of(value)) is not None:
            self._held.append((key, value, _mark_of, mark, None))
        elif not isinstance(value, (*_PLAIN, tuple, frozenset)) and (inner := _inside(value)) is not None:
            self._held.append((key, value, _inside, dict(inner), None))

    def changed(self, *kinds: str, replaced: bool = False) -> Key | None:
        """Return the kind and name of an attribute that has changed, or whose contents have; by default of any kind.

        A new attribute that is None does not count as a change. If ``replaced``, a module's parameter or buffer that is
        another object now counts, too.
        """
        for (kind, name), part, read, was, names in self._held:
            if read is None and not was and not part:  # fast path: most modules have no hooks
                continue
            if (not kinds or kind in kinds) and (found := _changed_names(part, read, was, names, None)):
                return kind, _full_name((kind, name), found[0])
        for key, inner, _, was, _ in self._tensors:
            if len(inner) != len(was):
                return key
            if replaced and (found := _changed_names(inner, None, was)):
                kind, name = key
                return kind, name.removesuffix("_buffers").removesuffix("_parameters") + found[0]
        return None

    def filled(self) -> list[tuple[dict[str, Any], str]]:
        """Return the dictionaries and keys of values that were None and no longer are."""
        found = {}  # several entries may hold the same dictionary
        for _, part, read, was, _ in self._held:
            now = part if read is None else read(part)
            for key, value in now.items() if isinstance(now, dict) else ():
                if value is not None and was.get(key, "") is None:
                    found[id(now), key] = (now, key)
        return list(found.values())

    def keep_changed(self, without: Collection[str] = ()) -> list[str]:
        """Keep only the changes so far, so that :meth:`restore` touches nothing else; it then skips generators, too.

        Drop attributes named in ``without`` as well. Return the names of the changed attributes that remain.
        """
        held, self._held, changed = self._held, [], dict[str, None]()
        for key, part, read, was, names in held:
            found = {own: _full_name(key, own) for own in _changed_names(part, read, was, names)}
            if kept := [own for own, name in found.items() if name not in without]:
                self._held.append((key, part, read, was, kept))
                changed |= dict.fromkeys(found[own] for own in kept)
        self._tensors = [own for own in self._tensors if _changed_names(*own[1:])]
        return list(changed)

    def restore(self) -> None:
        """Restore everything, or after :meth:`keep_changed` only the changes that it kept."""
        for _, part, read, was, names in (*self._held, *self._tensors):
            if read is None:
                if _changed_names(part, read, was):  # a frozen dictionary, or one in iteration, must not be rewritten
                    part.clear()
                    (part.extend if isinstance(part, (list, deque)) else part.update)(was)
            elif isinstance(part, np.ndarray):
                if part.size <= _ARRAY and _mark_of(part) != was:
                    part[...] = np.frombuffer(was, part.dtype).reshape(part.shape)
            elif read is not _mark_of:
                for name in _changed_names(part, read, was) if names is None else names:
                    _put_back(part, name, was)
            elif names is None and (generator := _state_of(part)) is not None:
                generator[1](pickle.loads(was))  # noqa: S301 - pickled by _mark_of


def _full_name(key: Key, own: str) -> str:
    """Return the full name of an attribute, given its own name and its owner's key."""
    _, name = key
    return name if name and name[-1] != "." else f"{name}{own}"


def _put_back(owner: Any, name: str, was: Mapping[str, Any]) -> None:
    """Restore an object's attribute, or remove one that it did not have."""
    cls: Any = type(owner)
    if isinstance(owner, type) or name in _slots_of(cls):
        kind: Any = type if isinstance(owner, type) else object  # bypasses the object's own __setattr__
        kind.__setattr__(owner, name, was[name]) if name in was else kind.__delattr__(owner, name)
    elif name in was:
        vars(owner)[name] = was[name]
    else:
        vars(owner).pop(name, None)


def _mark_of(value: Any) -> Any:
    """Return a value that changes with a tensor, an array, a generator or a large collection's length, else None."""
    if isinstance(value, Tensor):
        return _version_of(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.tobytes() if value.size <= _ARRAY else value.flat[:: value.size // _MOST].tobytes()
    if isinstance(value, _GENERATORS):
        generator = _state_of(value)
        return pickle.dumps(generator and generator[0])
    if isinstance(value, (list, deque, dict, set)) and len(value) > _MOST:
        return len(value)
    return None


def _changed_names(
    part: Any,
    read: Callable[[Any], Any] | None,
    was: Any,
    names: Collection[str] | None = None,
    absent: object = _ABSENT,
) -> list[str]:
    """Return the changed names, of all or of ``names``; [""] if a value other than a mapping has changed.

    Numbers and strings are compared by value, other objects by identity. A missing attribute counts as ``absent``.
    """
    now = part if read is None else read(part)
    if isinstance(was, list):
        return [] if len(was) == len(now) and all(map(_is_one, was, now)) else [""]
    if not isinstance(was, dict):
        return [] if was == now else [""]
    found = list[str]()
    is_ordered = read is not None or list(was) == list(now)  # the order of attributes does not matter
    if is_ordered and was.keys() == now.keys() and all(map(operator.is_, was.values(), now.values())):  # fast path
        return found
    missing, passing = (absent, PASSING) if read is vars else (_ABSENT, ())
    for name in dict.fromkeys((*was, *now)):
        is_seen = name not in passing and (names is None or name in names)
        if is_seen and not _is_one(was.get(name, missing), now.get(name, missing)):
            found.append(name)
    return found if found or is_ordered else list(now)


def _is_one(value: Any, other: Any) -> bool:
    """Return whether two values are one object, or equal numbers or strings."""
    if value is other:
        return True
    are_plain = isinstance(value, _PLAIN) and isinstance(other, _PLAIN)
    return are_plain and (value == other or (value != value and other != other))


# ------------------------------------------------------------------ numbers in tensors


class TensorMarks:
    """The identities and write counts of a module's parameters and buffers, and the update counts of its metrics.

    Trained parameters are included if ``with_trained``. ``parts`` are the module's :func:`parts_of` if these stay the
    same; a search takes longer than the rest.
    """

    def __init__(
        self, module: nn.Module, with_trained: bool = False, parts: Sequence[tuple[str, nn.Module]] | None = None
    ) -> None:
        self._module, self._with_trained, self._parts = module, with_trained, parts
        self._marks, self._alive = dict[Key, Any](), list[Any]()  # kept alive so that ids stay unique
        parts = list(parts_of(module)) if parts is None else parts
        for key, value in own_tensors(parts):
            if with_trained or not value.requires_grad:
                self._marks[key] = id(value), _version_of(value)
                self._alive.append(value)
        for name, part in parts:
            if isinstance(part, Metric):
                states = [getattr(part, state) for state in part._defaults]
                versions = [(id(s), _version_of(s) if isinstance(s, Tensor) else len(s)) for s in states]
                self._marks["metric", name] = part._update_count, versions
                self._alive += states

    def changed(self, *kinds: str) -> Key | None:
        """Return the kind ("parameter", "buffer" or "metric") and name of a changed one, by default of any kind."""
        was, now = self._marks, TensorMarks(self._module, self._with_trained, self._parts)._marks
        if was == now:
            return None
        keys = (key for key in (*was, *now) if was.get(key) != now.get(key))
        return next((key for key in keys if not kinds or key[0] in kinds), None)


class TensorCopies:
    """The numbers of tensors at one time, to detect changes by ``.data`` too, which PyTorch does not count.

    Tensors of more than ``most`` numbers have no copy: only a sample is compared, and they cannot be restored.
    """

    def __init__(self, tensors: Iterable[tuple[Key, Tensor]], most: float = math.inf) -> None:
        self._held: list[tuple[Key, Tensor, Any, Tensor | None]] = [
            (key, t, numbers_in(t), t.detach().clone() if t.numel() <= most else None)
            for key, t in tensors
            if not (is_lazy(t) or t.is_quantized or t.is_inference() or t.is_nested)
        ]

    def changed(self, *kinds: str) -> Iterator[tuple[Key, Tensor, bool]]:
        """Yield the changed tensors with their keys, by default of all kinds, and whether each has a copy."""
        for key, tensor, numbers, copied in self._held:
            if (not kinds or key[0] in kinds) and _has_other_numbers(tensor, numbers, copied):
                yield key, tensor, copied is not None

    def keep_changed(self) -> None:
        """Keep only the changed ones, so that :meth:`restore` touches nothing else."""
        self._held = [own for own in self._held if _has_other_numbers(*own[1:])]

    def restore(self) -> None:
        """Restore the tensors that have copies."""
        for _, tensor, numbers, copied in self._held:
            if copied is not None and _has_other_numbers(tensor, numbers, copied):
                tensor.data.copy_(copied)


def numbers_in(tensor: Tensor) -> Any:
    """Return a key that is equal for tensors of equal numbers; for a large one, from its id and a sample of numbers."""
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return id(tensor), _version_of(tensor)
    kind: tuple[Any, ...] = (tuple(tensor.shape), tensor.dtype, tensor.device)
    if tensor.numel() > _SMALL:
        kind = (*kind, id(tensor), _version_of(tensor), tensor.data_ptr())
    return *kind, sample_of(tensor).cpu().numpy().tobytes()


def sample_of(tensor: Tensor) -> Tensor:
    """Return the bytes of all numbers of a tensor, or of a sample if it is large."""
    return bytes_of(_plain(tensor).reshape(-1)[:: 1 if tensor.numel() <= _SMALL else tensor.numel() // _MOST])


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor without the methods of its subclass: pina's refuse another shape."""
    found = tensor.detach()
    is_wrapper = hasattr(found, "__tensor_flatten__")  # it has no numbers of its own
    return found if type(found) is Tensor or is_wrapper else found.as_subclass(Tensor)


def _has_other_numbers(tensor: Tensor, numbers: Any, copied: Tensor | None) -> bool:
    """Return whether a tensor's numbers have changed, given its earlier :func:`numbers_in` and a copy, if any."""
    if numbers_in(tensor) != numbers:
        return True
    is_compared = tensor.numel() <= _SMALL or tensor.layout != torch.strided or tensor.device.type == "meta"
    return not is_compared and copied is not None and not torch.equal(*map(bytes_of, map(_plain, (tensor, copied))))


# ------------------------------------------------------------------ state that goes from one client to the next


def kept_between_clients(
    module: nn.Module, callbacks: Iterable[object], optimizers: Iterable[Optimizer]
) -> dict[Key, list[tuple[Any, Any]]]:
    """Return the values in attributes that go from one client's work to the next, with shapes, by kind and name.

    A "tensor" is an average of weights, say, and a "number" a count of labels in a user-defined module. A "generator"
    has its state, and a "schedule" of learning rates its class and its steps, if it sets those of ``optimizers``. A
    "callback" has the tensors in a user's callback, including its modules such as a moving average, but not the tensors
    of the run's module.
    """
    found, parts = dict[Key, list[tuple[Any, Any]]](), list(parts_of(module))
    groups = {id(optimizer.param_groups) for optimizer in optimizers}  # which a wrapper shares

    def note(kind: str, name: str, shape: Any, value: Any) -> None:
        found.setdefault((kind, name), []).append((shape, value))

    for part, name, value in attribute_values(parts):
        cls: Any = type(part)
        if isinstance(value, Tensor):
            is_computed = isinstance(value, nn.Parameter) or value.grad_fn is not None  # by weight_norm, say
            if not is_computed and not isinstance(part, METRICS) and not value.is_nested:
                note("tensor", name, value.shape, numbers_in(value))
        elif isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and _is_own(cls):
            if not (isinstance(part, Metric) and name.endswith("._update_count")):  # which torchmetrics keeps
                note("number", name, None, value)
        elif isinstance(value, _GENERATORS) and (state := _state_of(value)) is not None:
            note("generator", name, None, pickle.dumps(state[0]))
        elif isinstance(value, LRScheduler) and id(value.optimizer.param_groups) in groups:
            note("schedule", name, type(value).__name__, value.last_epoch)
    own = {id(value) for _, value in own_tensors(parts)}
    for callback in callbacks:
        cls = type(callback)
        for name, attribute in vars(callback).items() if _is_own(cls) else ():
            for value in values_in(attribute):
                for held in [*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else [value]:
                    if isinstance(held, Tensor) and id(held) not in own:
                        note("callback", f"{cls.__name__}.{name}", held.shape, numbers_in(held))
    return found
