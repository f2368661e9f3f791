"""Find the random states of data sets and transforms, and seed them for reproducible runs."""

import functools
import hashlib
import random
import sys
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from numbers import Number
from pathlib import PurePath
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

_MOST = 10_000  # maximum number of objects to visit, which takes milliseconds
_LONG = 256  # longer collections count as examples unless they start with a data set or a function
_SHOWN = 12  # trailing parts of an attribute's path to show in messages
_FRAMEWORKS = ("pytorch_lightning", "lightning", "lightning_fabric")
_LEAVES = (str, bytes, bytearray, Number, Tensor, PurePath, type, types.ModuleType, types.NoneType, DataLoader)
_CONTAINERS = (Mapping, list, tuple, set, frozenset, deque)
_FUNCTIONS = (functools.partial, types.MethodType, types.FunctionType)
_GENERATORS = (np.random.RandomState, np.random.Generator, np.random.BitGenerator, random.Random, torch.Generator)
_GLOBAL = (np.random.mtrand._rand, random._inst, torch.default_generator)  # type: ignore[attr-defined]

NamePath: TypeAlias = tuple[str, ...]
"""A path of names from a root to a value, for messages; the middle of a long path is left out."""


class RandomStates:
    """The random states in data sets, transforms and collate functions.

    The search walks attributes, lists, mappings and closures. It finds objects with ``set_random_state(seed)``, and
    skips their parts unless they are data sets. It also finds every NumPy ``RandomState``, ``Generator`` or
    ``BitGenerator``, ``random.Random`` and ``torch.Generator``, except those in ``besides``. The run seeds global
    generators. A warning names each state that cannot be seeded.
    """

    def __init__(self, *roots: Any, besides: tuple[Any, ...] = ()) -> None:
        self._states: list[tuple[Any, NamePath]] = []
        left_alone = {id(value) for value in (*besides, *_GLOBAL)}
        seen: dict[int, Any] = {}  # holds references, so that no id is reused
        todo: list[tuple[Any, NamePath, bool]] = [
            (root, (type(root).__name__,), False) for root in roots if not _is_leaf(type(root))
        ]
        for value, path, is_seeded in todo:  # grows during the loop
            if id(value) in seen or id(value) in left_alone:
                continue
            if len(seen) == _MOST:
                _warn(path, f" and what comes after it: {_MOST:,} objects were searched")
                break
            seen[id(value)] = value
            if isinstance(value, _GENERATORS):
                if isinstance(value, random.SystemRandom) and not is_seeded:
                    _warn(path, " (random.SystemRandom, which takes no seed)")
                elif not is_seeded:
                    self._states.append((value, path))
                continue
            takes_seed = callable(getattr(value, "set_random_state", None))
            if takes_seed:
                self._states.append((value, (*path, ".set_random_state")))
            if not takes_seed or isinstance(value, Dataset):
                todo += [
                    (part, _inside(path, name), takes_seed) for name, part in _parts(value) if not _is_leaf(type(part))
                ]

    def __bool__(self) -> bool:
        """Return whether any state was found."""
        return bool(self._states)

    def __contains__(self, value: object) -> bool:
        """Return whether an object is among the states."""
        return any(state is value for state, _ in self._states)

    def seed(self, *key: int) -> None:
        """Seed each state with a different number derived from the key."""
        for position, (state, path) in enumerate(self._states):
            text = "/".join(map(str, (*key, position))).encode()
            try:
                _seed(state, int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))
            except Exception as error:
                _warn(path, f" ({type(error).__name__}: {error})")


class WorkerSeeds:
    """Seeds the random states of a loader's worker process, then calls the user's ``worker_init_fn``.

    Like PyTorch for global generators, it derives seeds from the loader's generator and the worker's number.
    """

    def __init__(self, collate_fn: Any = None, then: Callable[[int], Any] | None = None) -> None:
        self.collate_fn, self.then = collate_fn, then

    def __call__(self, worker_id: int) -> None:
        """Seed the states, in the worker."""
        worker = get_worker_info()
        assert worker is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the main process has already warned
            states = RandomStates(worker.dataset, self.collate_fn)
        states.seed(worker.seed)
        if self.then is not None:
            self.then(worker_id)


def _has_no_random_states(kind: type) -> bool:
    """Return whether objects of a class hold no random states, such as arrays and framework objects."""
    if issubclass(kind, _LEAVES):
        return True
    searched = issubclass(kind, (*_GENERATORS, *_CONTAINERS)) or kind in _FUNCTIONS
    if searched or callable(getattr(kind, "set_random_state", None)):
        return False
    heads = [base.__module__.partition(".")[0] for base in kind.__mro__]
    if hasattr(kind, "__array__") or any(head in _FRAMEWORKS for head in heads):
        return True
    if issubclass(kind, (Dataset, nn.Module)) or kind is types.SimpleNamespace:
        return False
    if heads[0] == "lightning_fed":
        return not callable(getattr(kind, "__call__", None))  # noqa: B004 - of its objects
    return heads[0] in ("torch", "numpy") or heads[0] in sys.stdlib_module_names


_is_leaf: Callable[[type], bool] = functools.lru_cache(maxsize=4096)(_has_no_random_states)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value that may hold random states, by name."""
    if isinstance(value, _CONTAINERS):
        if len(value) > _LONG:
            first = next(iter(value.values() if isinstance(value, Mapping) else value))
            if not isinstance(first, Dataset) and (not callable(first) or isinstance(first, type)):
                return
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield f"[{key!r}]", part
    elif type(value) is functools.partial:
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # a closure variable may have no value yet
                yield f".{name}", cell.cell_contents
        yield from ((".__defaults__", value.__defaults__), (".__kwdefaults__", value.__kwdefaults__))
    else:
        is_module = isinstance(value, nn.Module)
        for name, part in getattr(value, "__dict__", {}).items():
            if not is_module or name == "_modules" or not name.startswith("_"):
                yield f".{name}", part
        for base in type(value).__mro__:
            slots = base.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name):
                    yield f".{name}", getattr(value, name)


def _inside(path: NamePath, name: str) -> NamePath:
    return (*path, name) if len(path) <= _SHOWN else (path[0], " ... ", *path[1 - _SHOWN :], name)


def _seed(state: Any, seed: int) -> None:
    """Seed a known generator, or an object that seeds itself."""
    if isinstance(state, torch.Generator):
        state.manual_seed(seed >> 1)
    elif isinstance(state, random.Random):
        state.seed(seed)
    elif isinstance(state, np.random.RandomState):
        state.seed([seed & 0xFFFFFFFF, seed >> 32])
    elif isinstance(state, (np.random.Generator, np.random.BitGenerator)):
        bits = state.bit_generator if isinstance(state, np.random.Generator) else state
        bits.state = type(bits)(seed).state
    else:
        try:
            state.set_random_state(seed=seed & 0x7FFFFFFF)
        except TypeError:
            state.set_random_state(seed & 0x7FFFFFFF)


def _warn(path: NamePath, why: str) -> None:
    warnings.warn(
        f"A random state of the data cannot be seeded: {''.join(path)}{why}. A run with the same seed, or a resumed"
        " one, may see other random numbers there. Draw from torch's, NumPy's or Python's global generators, or from an"
        " attribute that is a torch.Generator, a numpy.random.Generator or RandomState, or a random.Random.",
        stacklevel=2,
    )
