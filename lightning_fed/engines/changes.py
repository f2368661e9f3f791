"""Detecting and undoing changes of a module's state, other than its trained parameters."""

import argparse
import copy
import pickle
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.algorithms.base_optimizers import BaseOptimizer

PASSING = ("log", "log_dict", "_trainer", "_current_fx_name", "_metric_attributes")
"""Module attributes that Lightning and this package set and reset."""

INTERNAL = frozenset(vars(nn.Module()))
"""Attributes of every module: parameters, buffers, hooks. Their changes are rejected or undone elsewhere."""

METRICS = (Metric, MetricCollection)
"""Modules whose attributes evaluation resets; their updates are counted instead."""

_OPAQUE = (type, nn.Module, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
_FOREIGN = ("torch", "pytorch_lightning", "lightning_fabric", "lightning", "torchmetrics", "lightning_fed")
_PLAIN = frozenset({int, str, bool, type(None)})
_DEPTH = 20  # nesting of collections, such as a configuration
_CLOSED = (0,) * _DEPTH  # the ids above a value that is not looked into
_MOST = 1_000  # values inspected in one attribute; larger collections are described by length
_SMALL = 2**14  # tensors up to this size are compared in full


class Marks(dict[tuple[str, str], Any]):
    """Descriptions by module and attribute, which change with the value."""

    alive: list[Any]  # objects described by identity, kept alive so that ids stay unique


def marks(module: nn.Module, algorithm: Algorithm | None = None) -> Marks:
    """Return marks by module and attribute that detect set attributes, grown collections and written tensors.

    Includes the attributes of the method and its base optimizer, if given. Looks into collections and plain objects,
    but omits parameters, buffers and metrics.
    """
    owners: list[tuple[str, Any]] = [*parts_of(module)]
    if algorithm is not None:
        owners.append(("algorithm", algorithm))
        for name, part in vars(algorithm).items():
            if isinstance(part, BaseOptimizer):
                owners.append((f"algorithm.{name}", part))
    found = Marks()
    alive = found.alive = []
    for name, owner in owners:
        for key, value in () if isinstance(owner, METRICS) else vars(owner).items():
            if key in PASSING:
                continue
            if type(value) in _PLAIN:
                found[name, key] = value
            else:
                found[name, key] = len(value) if key in INTERNAL else describe(value, alive)
    return found


def tensor_marks(module: nn.Module, with_trained: bool) -> Marks:
    """Return marks by kind and name that detect changed parameters and buffers, and updated metrics.

    Trained parameters are included if ``with_trained``.
    """
    found, parts = Marks(), list(parts_of(module))
    alive = found.alive = []
    for key, value in own_tensors(parts):
        if with_trained or not value.requires_grad:
            found[key] = id(value), _version_of(value)
            alive.append(value)
    for name, part in parts:
        if isinstance(part, Metric):
            states = [getattr(part, state) for state in part._defaults]
            versions = [(id(s), _version_of(s) if isinstance(s, Tensor) else len(s)) for s in states]
            found["metric", name] = part._update_count, versions
            alive += states
    return found


def changed(before: Marks, after: Marks) -> str | None:
    """Return the first name, "module.attribute" or "kind.name", with a changed description, or None."""
    if before == after:
        return None
    for key in dict.fromkeys((*after, *before)):  # not in the order of a set, which varies between runs
        if after.get(key) != before.get(key):
            return ".".join(filter(None, key))
    return None


# ------------------------------------------------------------------ parts of a module


def parts_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield by name a module, its submodules, and modules that are only in their collections or plain objects."""
    seen: set[nn.Module] = set()
    waiting = [("", module)]
    while waiting:
        prefix, root = waiting.pop(0)
        for name, part in root.named_modules(memo=seen, prefix=prefix):
            yield name, part
            cls: Any = type(part)
            # layers of PyTorch contain no others, and inspecting their attributes takes most of the time
            for key, value in vars(part).items() if _is_own(cls) else ():
                if type(value) in _PLAIN or key in INTERNAL or key in PASSING:
                    continue
                number = 0
                for hidden in values_in(value):
                    if isinstance(hidden, nn.Module) and hidden not in seen:
                        waiting.append((f"{name}.{key}.{number}" if name else f"{key}.{number}", hidden))
                        number += 1


def own_tensors(parts: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Yield the parameters and buffers of modules by kind ("parameter" or "buffer") and name."""
    for prefix, part in parts:
        for kind, own in (("parameter", part._parameters), ("buffer", part._buffers)):
            for name, value in own.items():
                if value is not None:
                    yield (kind, f"{prefix}.{name}" if prefix else name), value


def attribute_values(parts: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield the values in other attributes of modules, with the module and the attribute's name."""
    for prefix, part in parts:
        for name, attribute in vars(part).items():
            if name not in INTERNAL and name not in PASSING:
                for value in values_in(attribute):
                    yield part, f"{prefix}.{name}" if prefix else name, value


def attribute_tensors(parts: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Yield the tensors in other attributes of modules by kind ("attribute" or "metric") and name."""
    for part, name, value in attribute_values(parts):
        if isinstance(value, Tensor):
            yield ("metric" if isinstance(part, METRICS) else "attribute", name), value


def kept_in_attributes(
    parts: Iterable[tuple[str, nn.Module]],
) -> tuple[dict[str, list[Any]], dict[str, list[float]], dict[str, list[bytes]]]:
    """Return by name what goes in attributes from one client's work to the next.

    These are the shapes and numbers of tensors, such as an average of weights; other numbers in modules of the user's
    classes, such as a count of labels; and the states of generators.
    """
    tensors, numbers, generators = dict[str, list[Any]](), dict[str, list[float]](), dict[str, list[bytes]]()
    for part, name, value in attribute_values(parts):
        cls: Any = type(part)
        if isinstance(value, Tensor):
            is_computed = isinstance(value, nn.Parameter) or value.grad_fn is not None  # as by weight_norm
            if not is_computed and not isinstance(part, METRICS):
                tensors.setdefault(name, []).append((value.shape, numbers_in(value)))
        elif type(value) in (int, float) and _is_own(cls):
            numbers.setdefault(name, []).append(value)
        elif isinstance(value, _GENERATORS) and (state := _state_of(value)) is not None:
            generators.setdefault(name, []).append(pickle.dumps(state[0]))
    return tensors, numbers, generators


def empty_attributes(parts: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module, str]]:
    """Return the attributes that are None in modules of the user's classes: by name, the module and its attribute."""
    found = []
    for prefix, part in parts:
        cls: Any = type(part)
        empty = [key for key, value in vars(part).items() if value is None] if _is_own(cls) else []
        found += [(f"{prefix}.{key}" if prefix else key, part, key) for key in empty if key not in PASSING]
    return found


def kept_in_callbacks(callbacks: Iterable[object], module: nn.Module) -> dict[str, list[Any]]:
    """Return by name what tensors goes in attributes of the user's callbacks from one client's work to the next.

    These are the shapes and numbers of tensors, and of modules such as a moving average, but not of the run's module.
    """
    tensors, own = dict[str, list[Any]](), {id(value) for _, value in own_tensors(parts_of(module))}
    for callback in callbacks:
        cls: Any = type(callback)
        for name, attribute in vars(callback).items() if _is_own(cls) else ():
            for value in values_in(attribute):
                held = [*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else [value]
                found = [(t.shape, numbers_in(t)) for t in held if isinstance(t, Tensor) and id(t) not in own]
                if found:
                    tensors.setdefault(f"{cls.__name__}.{name}", []).extend(found)
    return tensors


def own_classes(parts: Iterable[nn.Module]) -> list[type]:
    """Return the user-defined classes of modules, including bases."""
    classes = dict.fromkeys(cls for part in parts for cls in type(part).__mro__)
    return [cls for cls in classes if _is_own(cls)]


@lru_cache(1024)
def _is_own(cls: type) -> bool:
    """Return whether a class is user-defined."""
    return cls.__module__.partition(".")[0] not in (*_FOREIGN, "builtins")


def class_data(cls: type) -> dict[str, Any]:
    """Return the attributes of a class, without those that Python sets."""
    return {key: value for key, value in vars(cls).items() if not key.startswith("__")}


# ------------------------------------------------------------------ parts of a value


def values_in(value: Any, left: list[int] | None = None, above: tuple[int, ...] = ()) -> Iterator[Any]:
    """Yield a value and its contents, to the depth of :func:`marks`; ``above`` are the ids of what contains it."""
    left = [_MOST] if left is None else left  # number of values that may still be inspected
    inner = _inside(value)
    may_open = len(above) < _DEPTH and id(value) not in above
    is_open = inner is not None and may_open and left[0] >= len(inner)
    if inner is None or is_open:
        yield value
    if is_open:
        left[0] -= len(inner)
        for part in inner.values() if isinstance(inner, Mapping) else inner:
            yield from values_in(part, left, (*above, id(value)))


def _inside(value: Any) -> Any:
    """Return a value that is a collection, or else its attributes, or None if it is not inspected."""
    if isinstance(value, (list, tuple, deque, dict, set, frozenset)):
        return value
    if isinstance(value, (*_OPAQUE, random.Random)):
        return None
    if type(value).__module__.partition(".")[0] in _FOREIGN and not isinstance(value, argparse.Namespace):
        return None
    inner = getattr(value, "__dict__", None)
    slots = slots_in(value)
    return {**slots, **(inner or {})} if slots else inner


@lru_cache(1024)
def _slots_of(cls: Any) -> tuple[str, ...]:
    """Return the names of the slots of a class, such as a dataclass with slots; none of Python's own classes."""
    if cls.__module__.partition(".")[0] in sys.stdlib_module_names:
        return ()
    found = list[str]()
    for base in cls.__mro__:
        names = base.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            is_mangled = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if is_mangled else name)
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def slots_in(value: Any) -> dict[str, Any]:
    """Return what an object holds in slots, by name."""
    missing: Any = object()
    cls: Any = type(value)
    found = {name: getattr(value, name, missing) for name in _slots_of(cls)}
    return {name: own for name, own in found.items() if own is not missing}


def describe(value: Any, alive: list[Any], left: list[int] | None = None, above: tuple[int, ...] = ()) -> Any:
    """Return a description that changes when a value is set, grows or is written: contents of collections, and ids.

    The described objects are added to ``alive``, and must live as long as the description, which is unique to them.
    """
    if isinstance(value, (int, float, str, bool, type(None))):
        return value if value == value else "nan"
    left = [_MOST] if left is None else left  # number of values that may still be inspected
    alive.append(value)
    if isinstance(value, Tensor):
        return id(value), _version_of(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return id(value), value.tobytes() if value.size <= left[0] else 0
    if isinstance(value, _GENERATORS):
        generator = _state_of(value)
        return id(value), pickle.dumps(generator and generator[0])
    inner = _inside(value)
    if inner is None:
        return id(value)
    if len(above) >= _DEPTH or id(value) in above or left[0] < len(inner):
        return id(value), len(inner)
    left[0] -= len(inner)
    if isinstance(inner, (set, frozenset)):
        return id(value), frozenset(describe(part, alive, left, _CLOSED) for part in inner)
    found: list[Any] = [id(value)]
    above = (*above, id(value))
    for part in inner.items() if isinstance(inner, Mapping) else inner:
        if isinstance(inner, Mapping):
            found.append(describe(part[0], alive, left, _CLOSED))
            part = part[1]
        found.append(describe(part, alive, left, above))
    return tuple(found)


def _version_of(value: Tensor) -> int:
    """Return the number of in-place changes of a tensor; 0 for inference tensors, which do not count them."""
    return 0 if value.is_inference() else value._version


def numbers_in(tensor: Tensor) -> Any:
    """Return a key that is equal for tensors of equal numbers; for a large one, its id and some numbers."""
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return id(tensor), _version_of(tensor)
    kind, flat = (tuple(tensor.shape), tensor.dtype, tensor.device), tensor.detach().reshape(-1)
    if tensor.numel() > _SMALL:
        kind = (*kind, id(tensor), _version_of(tensor), tensor.data_ptr())  # type: ignore[assignment]
        flat = flat[:: tensor.numel() // _MOST]
    return *kind, flat.cpu().contiguous().view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def has_other_numbers(tensor: Tensor, numbers: Any, copied: Tensor) -> bool:
    """Return whether a tensor has other numbers than before, given :func:`numbers_in` and a copy from then."""
    if numbers_in(tensor) != numbers:
        return True
    is_compared = tensor.numel() <= _SMALL or tensor.layout != torch.strided or tensor.device.type == "meta"
    return not is_compared and not torch.equal(tensor.nan_to_num(), copied.nan_to_num())


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


# ------------------------------------------------------------------ restoring


_Place: TypeAlias = tuple[Any, str]  # an object, and the name of an attribute


class Snapshot:
    """A snapshot of attributes, contents of collections and states of generators, to restore.

    Values are not copied, so the numbers in tensors are not restored.
    """

    def __init__(self, owners: Iterable[Any]) -> None:
        # the names of the attributes to restore; None for all
        self._attributes: list[tuple[Any, dict[str, Any], set[str] | None]] = []
        # each with the object and the name of its attribute where it is
        self._contents: list[tuple[Any, Any, _Place]] = []
        self._slots: list[tuple[Any, dict[str, Any], set[str] | None, _Place]] = []  # like the attributes
        self._generators: list[tuple[Any, Callable[[Any], Any]]] = []
        for owner in owners:
            self.add_attributes(owner)
            for name, value in vars(owner).items():
                if name in INTERNAL and isinstance(owner, nn.Module):
                    if isinstance(value, (dict, set)):
                        self._contents.append((value, copy.copy(value), (owner, name)))
                elif name not in PASSING:
                    self.add(value, (owner, name))

    def add_attributes(self, owner: Any, *names: str) -> None:
        """Save attributes of an object without their contents, by default all."""
        self._attributes.append((owner, dict(vars(owner)), set(names) if names else None))

    def add(self, value: Any, place: _Place = (None, "")) -> None:
        """Save a value's contents."""
        for part in values_in(value):
            cls: Any = type(part)
            inner, generator, slots = _inside(part), _state_of(part), _slots_of(cls)
            if slots and inner is not None:
                self._slots.append((part, slots_in(part), None, place))
                inner = getattr(part, "__dict__", None)
            if isinstance(inner, (list, deque, dict, set)):
                self._contents.append((inner, copy.copy(inner), place))
            if generator is not None:
                self._generators.append(generator)

    def add_options(self, options: dict[str, Any]) -> None:
        """Save a mapping as if its keys were attributes, and their contents."""
        self._contents.append((options, copy.copy(options), (options, "")))
        for name, value in options.items():
            self.add(value, (options, name))

    def noted(self) -> list[tuple[dict[str, Any], str]]:
        """Return the attributes that were None and are strings now, each as the dictionary that holds it and its name.

        Strings of one character are left out, since Python has one object for all equal ones.
        """
        held = [(vars(owner), was) for owner, was, _ in self._attributes]
        held += [(inner, was) for inner, was, _ in self._contents if isinstance(inner, dict)]
        found = {  # several may hold one dictionary
            (id(now), name): (now, name)
            for now, was in held
            for name, value in now.items()
            if type(value) is str and len(value) > 1 and was.get(name, "") is None
        }
        return list(found.values())

    def keep_changed(self) -> None:
        """Forget what is unchanged by now, so that only changes so far are restored; generators keep their state."""
        self._attributes = list(self._changed_attributes())
        self._contents = list(self._changed_contents())
        self._slots = list(self._changed_slots())
        self._generators = []

    def changed(self) -> _Place | None:
        """Return an object and the name of one of its attributes that is or has something changed by now, or None."""
        for owner, _, names in self._changed_attributes():
            return owner, min(names)
        for inner, content, (owner, name) in self._changed_contents():
            return owner, name or min(changed_names(content, inner))
        return next((place for *_, place in self._changed_slots()), None)

    def _changed_attributes(self) -> Iterator[tuple[Any, dict[str, Any], set[str]]]:
        for owner, alive, own in self._attributes:
            names = changed_names(alive, vars(owner)) - set(PASSING)
            if names := names if own is None else names & own:
                yield owner, alive, names

    def _changed_contents(self) -> Iterator[tuple[Any, Any, _Place]]:
        return (own for own in self._contents if not _is_same(*own[:2]))

    def _changed_slots(self) -> Iterator[tuple[Any, dict[str, Any], set[str], _Place]]:
        for part, alive, _, place in self._slots:
            if names := changed_names(alive, slots_in(part)):
                yield part, alive, names, place

    def restore(self) -> None:
        """Restore everything, or after :meth:`keep_changed` what had changed."""
        for owner, alive, names in self._attributes:
            now = vars(owner)
            for key in (now.keys() | alive.keys()) - set(PASSING) if names is None else names:
                if key in alive:
                    now[key] = alive[key]
                else:
                    now.pop(key, None)
        for inner, content, _ in self._contents:
            inner.clear()
            (inner.extend if isinstance(inner, (list, deque)) else inner.update)(content)
        for part, alive, names, _ in self._slots:
            for name in (slots_in(part).keys() | alive.keys()) if names is None else names:
                if name in alive:
                    object.__setattr__(part, name, alive[name])
                else:
                    object.__delattr__(part, name)
        for state, set_state in self._generators:
            set_state(state)


def changed_names(alive: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """Return the names that have other objects now; plain values are compared."""
    missing = object()
    names = {name for name in (*alive, *now) if now.get(name, missing) is not alive.get(name, missing)}
    return {
        n for n in names if type(alive.get(n)) not in _PLAIN or not (n in alive and n in now and alive[n] == now[n])
    }


def _is_same(inner: Any, content: Any) -> bool:
    """Return whether a collection has the same objects as its copy."""
    if isinstance(inner, dict):
        return inner.keys() == content.keys() and not changed_names(content, inner)
    if isinstance(inner, set):
        return bool(inner == content)
    return len(inner) == len(content) and all(one is other for one, other in zip(inner, content, strict=True))
