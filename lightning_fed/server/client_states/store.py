"""Client states between rounds, by stored index."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fed.core.types import State

_FIRST = 64  # rows at the start
_NEW = 0  # the scratch row for the state of a new client


class StateRows:
    """States with equal names, shapes and types, each a row of one tensor per name.

    Reading and writing the small states of a cohort is faster in rows than client by client.
    """

    def __init__(self, like: State, count: int = 0) -> None:
        self._tensors = {name: _new_rows(value[None], max(_FIRST, count + 1)) for name, value in like.items()}
        self._at: dict[int, int] = {}  # each client's row
        self._free: list[int] = []  # rows of removed clients

    def __len__(self) -> int:
        """The number of clients."""
        return len(self._at)

    def fit(self, like: State, dims: int = 0) -> bool:
        """Return whether a state, or stacked states with ``dims=1``, has the names, shapes and types of the rows."""
        return fit_rows(like, self._tensors, dims)

    def put(self, indices: Sequence[int], states: State) -> None:
        """Write the states [S, ...] of the clients with these stored indices."""
        at, free = self._at, self._free
        self._grow(1 + len(at) + len(free) + sum(index not in at for index in indices))
        for index in indices:
            if index not in at:
                at[index] = free.pop() if free else 1 + len(at)
        rows = torch.from_numpy(np.array([at[index] for index in indices]))
        for name, value in states.items():
            self._tensors[name].index_copy_(0, rows, value)

    def get(self, index: int) -> State | None:
        """Return a copy of a client's state, or None."""
        row = self._at.get(index)
        return None if row is None else {name: own[row].clone() for name, own in self._tensors.items()}

    def stacked(self, indices: Sequence[int], new: State) -> State:
        """Return copies of clients' states [S, ...]."""
        at = [self._at.get(index, _NEW) for index in indices]
        if _NEW in at:
            for name, value in new.items():
                self._tensors[name][_NEW] = value
        rows = torch.from_numpy(np.array(at))
        return {name: own.index_select(0, rows) for name, own in self._tensors.items()}

    def remove(self, index: int) -> None:
        """Remove a client, if present."""
        if index in self._at:
            self._free.append(self._at.pop(index))

    def states(self) -> dict[int, State]:
        """Return copies of all states, each in its own memory."""
        return {
            index: {name: own[row].clone() for name, own in self._tensors.items()} for index, row in self._at.items()
        }

    def _grow(self, count: int) -> None:
        """Allocate at least ``count`` rows before any index refers to them, since allocation may fail."""
        for name, own in self._tensors.items():
            if len(own) < count:
                self._tensors[name] = _new_rows(own, max(count, 2 * len(own)))


def fit_rows(state: State, rows: State, dims: int = 0) -> bool:
    """Return whether a state has the names, shapes and types of rows [S, ...]."""
    return state.keys() == rows.keys() and all(
        (value.shape[dims:], value.dtype) == (rows[name].shape[1:], rows[name].dtype) for name, value in state.items()
    )


def _new_rows(old: Tensor, count: int) -> Tensor:
    """Return ``count`` rows that begin with the old ones.

    NumPy requests large pages; page faults on small ones would take longer than the copy.
    """
    memory = torch.from_numpy(np.empty(count * old[0].nbytes, np.uint8))
    rows = memory.view(old.dtype).view(count, *old.shape[1:])
    rows[: len(old)] = old
    return rows


_PAGES = 2**15  # smallest size in bytes of tensors whose memory is worth reusing
_AT_ONCE = 2**10  # states stacked at a time before they are copied into rows


def clone_tensor(value: Tensor) -> Tensor:
    """Return a copy of a tensor of a client's state.

    Client states are allocated and freed in one size. PyTorch requests aligned memory, and glibc cannot reuse freed
    blocks of exactly that size. Every state would use new pages, which cost about as much as the copy. NumPy's memory
    is reused.
    """
    if value.device.type != "cpu" or value.nbytes < _PAGES:
        return value.clone()
    memory = torch.from_numpy(np.empty(value.nbytes, np.uint8))
    return memory.view(value.dtype).view(value.shape).copy_(value)


def clone_rows(rows: Tensor) -> Sequence[Tensor]:
    """Return a copy of every row of a tensor, each in its own memory."""
    if rows.device.type == "cpu" and rows[0].nbytes >= _PAGES:
        return [clone_tensor(row) for row in rows]
    copies: Sequence[Tensor] = torch.unbind_copy(rows)  # type: ignore[func-returns-value, assignment]
    return copies  # one call takes half the time for small rows


class ClientStore(ABC):
    """Client states; only clients that have participated have one.

    States written during a round are staged. :meth:`commit` makes them visible together with the server's step. A
    checkpoint saved in the middle of a round thus has the state after the last completed one. Staged states may be on
    any device; committed ones are returned in host memory.
    """

    @abstractmethod
    def __len__(self) -> int:
        """The number of clients with a state."""

    @abstractmethod
    def get(self, index: int) -> State | None:
        """Return a client's committed state, or None if it has none yet."""

    @abstractmethod
    def stage(self, index: int, state: State) -> None:
        """Stage a client's new state until the round is complete; an empty state is ignored."""

    def stacked(self, indices: Sequence[int], new: State) -> State | None:
        """Return copies of committed states [S, ...]; None if reading them one by one is cheaper."""
        return None

    def stage_all(self, indices: Sequence[int], states: State) -> None:
        """Stage copies of several clients' new states [S, ...] until the round is complete."""
        columns = zip(*map(clone_rows, states.values()), strict=True)
        for index, row in zip(indices, columns, strict=True):
            self.stage(index, dict(zip(states, row, strict=True)))

    @abstractmethod
    def commit(self) -> None:
        """Replace committed states with the staged ones."""

    @abstractmethod
    def discard(self) -> None:
        """Discard the staged states."""

    @abstractmethod
    def state_dict(self) -> dict[int, State]:
        """Return all committed states, in memory."""

    @abstractmethod
    def load_state_dict(self, states: Mapping[int, Any], is_mine: Callable[[int], bool] = lambda index: True) -> None:
        """Load the states of this process's clients; the store must be new."""


class MemoryClientStore(ClientStore):
    """Client states in host memory: small states of one kind in rows, others separately.

    Staged states stay on their device until the round is complete. They are then copied to the host together, so
    training does not wait for copies.
    """

    def __init__(self) -> None:
        self._states: dict[int, State] = {}
        self._rows: StateRows | None = None
        self._staged: dict[int, State] = {}
        self._staged_rows: list[tuple[Sequence[int], State]] = []

    def __len__(self) -> int:
        """The number of clients with a state."""
        return len(self._states) + (0 if self._rows is None else len(self._rows))

    def get(self, index: int) -> State | None:
        """Return a client's committed state, or None if it has none yet."""
        found = self._states.get(index)
        return self._rows.get(index) if found is None and self._rows is not None else found

    def stacked(self, indices: Sequence[int], new: State) -> State | None:
        """Return copies of committed states [S, ...]; None if any of them differs in kind from ``new``."""
        if self._rows is None or not self._rows.fit(new) or not self._states.keys().isdisjoint(indices):
            return None
        return self._rows.stacked(indices, new)

    def stage(self, index: int, state: State) -> None:
        """Stage a client's new state until the round is complete; an empty state is ignored."""
        if state:
            self._staged[index] = {name: v.detach() if v.requires_grad else v for name, v in state.items()}

    def stage_all(self, indices: Sequence[int], states: State) -> None:
        """Stage copies of several clients' new states [S, ...] until the round is complete."""
        if _is_on_host(states) and not _is_small({name: value[0] for name, value in states.items()}):
            super().stage_all(indices, states)
        else:
            self._staged_rows.append((indices, {name: value.detach().clone() for name, value in states.items()}))

    def commit(self) -> None:
        """Replace committed states with the staged ones."""
        if not self._staged and not self._staged_rows:
            return
        for indices, stacked in self._staged_rows:
            states = _on_host(stacked)
            if _is_small({name: value[0] for name, value in states.items()}):
                self._put(indices, states)
            else:
                super().stage_all(indices, states)
        rows = self._rows
        for state in self._staged.values():
            if rows is None and _is_small(state) and not _is_on_host(state):
                rows = self._rows = StateRows(state)
        alike = [] if rows is None else [index for index, state in self._staged.items() if rows.fit(state)]
        for start in range(0, len(alike), _AT_ONCE):
            indices = alike[start : start + _AT_ONCE]
            found = [self._staged.pop(index) for index in indices]
            self._put(indices, _on_host({name: _stack([state[name] for state in found]) for name in found[0]}))
        self._states.update((index, _on_host(state)) for index, state in self._staged.items())
        if rows is not None:
            for index in self._staged:
                rows.remove(index)
        self.discard()

    def discard(self) -> None:
        """Discard the staged states."""
        self._staged, self._staged_rows = {}, []

    def state_dict(self) -> dict[int, State]:
        """Return the committed states."""
        return {**self._states, **({} if self._rows is None else self._rows.states())}

    def load_state_dict(self, states: Mapping[int, Any], is_mine: Callable[[int], bool] = lambda index: True) -> None:
        """Replace all states with those of this process's clients."""
        self.discard()
        self._states, self._rows = {}, None
        for i, saved in states.items():
            if not is_mine(int(i)):
                continue
            state = _on_host(saved)
            if self._rows is None and _is_small(state):
                self._rows = StateRows(state, len(states))
            self._staged[int(i)] = state
        self.commit()

    def _put(self, indices: Sequence[int], states: State) -> None:
        """Write stacked states [S, ...] into rows, or separately if their kind differs from the rows."""
        if self._rows is None:
            self._rows = StateRows({name: value[0] for name, value in states.items()})
        if self._rows.fit(states, dims=1):
            self._rows.put(indices, states)
            for index in indices if self._states else ():
                self._states.pop(index, None)
            return
        for row, index in enumerate(indices):
            self._states[index] = {name: value[row].clone() for name, value in states.items()}
            self._rows.remove(index)


def _is_small(state: State) -> bool:
    """Return whether a state is small enough to be stored in a row."""
    return bool(state) and sum(value.nbytes for value in state.values()) < _PAGES


def _is_on_host(state: State) -> bool:
    return all(value.device.type == "cpu" for value in state.values())


def _on_host(state: State) -> State:
    return {name: value.cpu() for name, value in state.items()}


def _stack(values: Sequence[Tensor]) -> Tensor:
    """Stack tensors [n, ...]; some, received from other processes, may already be on the host."""
    if any(value.device != values[0].device for value in values):
        values = [value.cpu() for value in values]
    return torch.stack(list(values))
