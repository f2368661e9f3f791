"""Random states that data sets and transforms own: found by their attributes, and seeded so that a run repeats."""

import functools
import hashlib
import random
import sys
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from numbers import Number
from pathlib import PurePath
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info

__all__ = ["RandomStates", "WorkerSeeds"]

_MOST = 10_000  # objects that are looked at: the search takes milliseconds
_LONG = 256  # a longer list holds examples, unless it starts with a data set or a function
_SHOWN = 12  # the last parts of the name of a place
_FRAMEWORKS = ("pytorch_lightning", "lightning", "lightning_fabric")
_LEAVES = (str, bytes, bytearray, Number, Tensor, PurePath, type, types.ModuleType, DataLoader)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_GENERATORS = (np.random.RandomState, np.random.Generator, np.random.BitGenerator, random.Random, torch.Generator)
_GLOBAL = (np.random.mtrand._rand, random._inst, torch.default_generator)  # type: ignore[attr-defined]

Place: TypeAlias = tuple[Any, str]
"""The place of the object that holds a value, and the name of the value there; for messages."""


class RandomStates:
    """The random states that data sets, transforms and collate functions own.

    They are found by walking attributes, lists, mappings and closures. Seeded are objects with
    ``set_random_state(seed)`` (then their parts are theirs to seed, unless they are data sets), and attributes that are
    a NumPy ``RandomState``, ``Generator`` or ``BitGenerator``, a ``random.Random`` or a ``torch.Generator``. Global
    generators are left alone: a run seeds them itself. A state that cannot be seeded is named in a warning.

    Args:
        roots: Where the search starts.
        besides: Generators that somebody else seeds.
    """

    def __init__(self, *roots: Any, besides: tuple[Any, ...] = ()) -> None:
        self._seeders: list[Callable[[int], None]] = []
        seen = {id(value) for value in besides}
        kept: list[Any] = []  # alive while their ids are in use
        todo: list[tuple[Any, Place, bool]] = [
            (root, (None, type(root).__name__), False) for root in roots if _kind_of(type(root)) is not _LEAF
        ]
        for value, place, is_seeded in todo:  # which grows
            if id(value) in seen:
                continue
            if len(kept) == _MOST:
                _warn(f"{_path(place)} and what comes after it: {_MOST:,} objects were searched")
                break
            seen.add(id(value))
            kept.append(value)
            kind = _kind_of(type(value))
            if kind is _STATE:
                if not is_seeded and value not in _GLOBAL:
                    self._note(value, place)
                continue
            seeds_parts = kind.takes_seed and not kind.is_data
            if kind.takes_seed:
                self._seeders.append(functools.partial(_set_random_state, value, place))
            if not seeds_parts:
                todo += [
                    (part, (place, name), kind.takes_seed)
                    for name, part in kind.parts(value)
                    if _kind_of(type(part)) is not _LEAF
                ]

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._seeders)

    def seed(self, *key: int) -> None:
        """Seed every state by the key, each one differently."""
        for position, seeder in enumerate(self._seeders):
            text = "/".join(map(str, (*key, position))).encode()
            seeder(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))

    def _note(self, value: Any, place: Place) -> None:
        if isinstance(value, random.SystemRandom):
            _warn(f"{_path(place)} (random.SystemRandom, which takes no seed)")
            return
        self._seeders.append(functools.partial(_seed, value, place))


class WorkerSeeds:
    """Seeds what a loader's worker process has of random states, and then calls the user's own ``worker_init_fn``.

    PyTorch seeds a worker's global generators by the loader's generator and the worker's number; these states get
    seeds of the same kind.
    """

    def __init__(self, collate_fn: Any = None, then: Callable[[int], Any] | None = None) -> None:
        self.collate_fn, self.then = collate_fn, then

    def __call__(self, worker_id: int) -> None:
        """Seed, in the worker."""
        worker = get_worker_info()
        assert worker is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the main process has said it
            states = RandomStates(worker.dataset, self.collate_fn)
        states.seed(worker.seed)
        if self.then is not None:
            self.then(worker_id)


class _Kind(NamedTuple):
    """What is done with values of a class.

    Attributes:
        parts: Yields what may hold random states within a value, by name.
        takes_seed: Whether it has ``set_random_state``.
        is_data: Whether it is a data set.
    """

    parts: Callable[[Any], Iterable[tuple[str, Any]]]
    takes_seed: bool = False
    is_data: bool = False


_LEAF = _Kind(lambda _: ())
_STATE = _Kind(lambda _: ())


def _find_kind(kind: type) -> _Kind:
    """Return what is done with values of a class."""
    if issubclass(kind, _LEAVES) or kind is type(None):
        return _LEAF
    if issubclass(kind, _GENERATORS):
        return _STATE
    if issubclass(kind, Mapping):
        return _Kind(_of_mapping)
    if issubclass(kind, _CONTAINERS):
        return _Kind(_of_list)
    special = {
        functools.partial: _of_partial,
        types.MethodType: lambda method: [(".__self__", method.__self__)],
        types.FunctionType: _of_function,
        Subset: lambda subset: [(".dataset", subset.dataset)],
    }
    takes_seed = callable(getattr(kind, "set_random_state", None))
    if kind not in special and not takes_seed and not _may_own(kind):
        return _LEAF
    return _Kind(special.get(kind, _of_object), takes_seed, issubclass(kind, Dataset))


_kind_of: Callable[[type], _Kind] = functools.lru_cache(maxsize=4096)(_find_kind)


def _may_own(kind: type) -> bool:
    """Whether attributes of a class's objects may be random states; arrays, frameworks and the like have none."""
    if hasattr(kind, "__array__"):
        return False
    heads = [base.__module__.partition(".")[0] for base in kind.__mro__]
    if any(head in _FRAMEWORKS for head in heads):
        return False
    if issubclass(kind, (Dataset, nn.Module)) or kind is types.SimpleNamespace:
        return True
    if heads[0] == "lightning_fed":
        return callable(getattr(kind, "__call__", None))  # noqa: B004 - of its objects
    return heads[0] not in ("torch", "numpy") and heads[0] not in sys.stdlib_module_names


def _of_mapping(value: Any) -> Iterable[tuple[str, Any]]:
    return ((f"[{key!r}]", part) for key, part in value.items()) if _is_searched(value, value.values()) else ()


def _of_list(value: Any) -> Iterable[tuple[str, Any]]:
    return ((f"[{i}]", part) for i, part in enumerate(value)) if _is_searched(value, value) else ()


def _is_searched(value: Any, parts: Any) -> bool:
    """Whether to look at each part of a list or mapping: not at those of a long one that holds examples."""
    if len(value) <= _LONG:
        return True
    first = next(iter(parts))
    return isinstance(first, Dataset) or (callable(first) and not isinstance(first, type))


def _of_partial(value: Any) -> Iterable[tuple[str, Any]]:
    return ((".func", value.func), (".args", value.args), (".keywords", value.keywords))


def _of_function(value: Any) -> Iterable[tuple[str, Any]]:
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:
            continue  # a variable without a value yet
    yield from ((".__defaults__", value.__defaults__), (".__kwdefaults__", value.__kwdefaults__))


def _of_object(value: Any) -> Iterable[tuple[str, Any]]:
    is_module = isinstance(value, nn.Module)
    for name, part in getattr(value, "__dict__", {}).items():
        if not is_module or name == "_modules" or not name.startswith("_"):
            yield f".{name}", part
    for name in _slots_of(type(value)):
        if hasattr(value, name):
            yield f".{name}", getattr(value, name)


def _find_slots(kind: type) -> list[str]:
    slots = [base.__dict__.get("__slots__", ()) for base in kind.__mro__]
    return [name for own in slots for name in ((own,) if isinstance(own, str) else own)]


_slots_of: Callable[[type], list[str]] = functools.lru_cache(maxsize=4096)(_find_slots)


def _seed(state: Any, place: Place, seed: int) -> None:
    """Seed a generator of any of the known kinds."""
    try:
        if isinstance(state, torch.Generator):
            state.manual_seed(seed >> 1)
        elif isinstance(state, random.Random):
            state.seed(seed)
        elif isinstance(state, np.random.RandomState):
            state.seed([seed & 0xFFFFFFFF, seed >> 32])
        else:
            bits = state.bit_generator if isinstance(state, np.random.Generator) else state
            bits.state = type(bits)(seed).state
    except Exception as error:
        _warn(f"{_path(place)} ({type(state).__name__}: {error})")


def _set_random_state(owner: Any, place: Place, seed: int) -> None:
    try:
        try:
            owner.set_random_state(seed=seed & 0x7FFFFFFF)
        except TypeError:
            owner.set_random_state(seed & 0x7FFFFFFF)
    except Exception as error:
        _warn(f"{_path(place)}.set_random_state ({type(error).__name__}: {error})")


def _path(place: Place) -> str:
    """Return the way from a root to a value; a long one is shortened."""
    names: list[str] = []
    holder: Any = place
    while holder is not None:
        holder, name = holder
        names.append(name)
    root, *rest = reversed(names)
    return "".join((root, *rest) if len(rest) <= _SHOWN else (root, " ... ", *rest[-_SHOWN:]))


def _warn(what: str) -> None:
    warnings.warn(
        f"A random state of the data cannot be seeded: {what}. A run with the same seed, or a resumed one, may see"
        " other random numbers there. Draw from torch's, NumPy's or Python's global generators, or from an attribute"
        " that is a torch.Generator, a numpy.random.Generator or RandomState, or a random.Random.",
        stacklevel=2,
    )
