"""Client states between rounds, by stored index."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fed.core.types import State

_PAGES = 2**15  # smallest size in bytes of tensors whose memory is worth reusing
_AT_ONCE = 2**10  # states stacked at a time before they are copied to the host


def fit_rows(state: State, rows: State) -> bool:
    """Return whether a state has the names, shapes and types of rows [S, ...]."""
    return state.keys() == rows.keys() and all(
        (value.shape, value.dtype) == (rows[name].shape[1:], rows[name].dtype) for name, value in state.items()
    )


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
    return copies  # at once, which takes half the time for small rows


class ClientStore(ABC):
    """Client states; only clients that have participated have one.

    States written during a round are staged. :meth:`commit` makes them visible together with the server's step, so a
    checkpoint saved in the middle of a round has the state after the last completed one. Staged states may be on any
    device; committed ones are returned in host memory.
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

    @abstractmethod
    def stage_all(self, indices: Sequence[int], states: State) -> None:
        """Stage copies of several clients' new states [S, ...] until the round is complete."""

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
    """Client states in host memory.

    Staged states stay on their device until the round is complete, and then are copied to the host together, so that
    training does not wait for copies.
    """

    def __init__(self) -> None:
        self._states: dict[int, State] = {}
        self._staged: dict[int, State] = {}
        self._on_device: dict[int, State] = {}  # staged too, and to be copied to the host
        self._rows_on_device: list[tuple[Sequence[int], State]] = []

    def __len__(self) -> int:
        """The number of clients with a state."""
        return len(self._states)

    def get(self, index: int) -> State | None:
        """Return a client's committed state, or None if it has none yet."""
        return self._states.get(index)

    def stacked(self, indices: Sequence[int], new: State) -> State | None:
        """Return copies of committed states [S, ...]; None if they are large or any differs in kind from ``new``."""
        if not _is_small(new):
            return None
        if not self._states.keys() >= set(indices):  # else the copy would wait for the device in vain
            new = _on_host(new)
        like = {name: value[None] for name, value in new.items()}
        states = [self._states.get(index, new) for index in indices]
        if not all(fit_rows(state, like) for state in states):
            return None
        return {name: torch.stack([state[name] for state in states]) for name in new}

    def stage(self, index: int, state: State) -> None:
        """Stage a client's new state until the round is complete; an empty state is ignored."""
        if state:
            staged = self._staged if _is_on_host(state) else self._on_device
            staged[index] = {name: v.detach() if v.requires_grad else v for name, v in state.items()}

    def stage_all(self, indices: Sequence[int], states: State) -> None:
        """Stage copies of several clients' new states [S, ...] until the round is complete."""
        states = {name: value.detach() for name, value in states.items()}
        if _is_on_host(states):
            self._staged.update(_copies_of_each(indices, states))
        else:
            self._rows_on_device.append((indices, {name: value.clone() for name, value in states.items()}))

    def commit(self) -> None:
        """Replace committed states with the staged ones."""
        if not self._staged and not self._on_device and not self._rows_on_device:
            return
        for indices, states in self._rows_on_device:
            self._staged.update(_copies_of_each(indices, _on_host(states)))
        small = [index for index, state in self._on_device.items() if _is_small(state)]
        like = {name: value[None] for name, value in self._on_device[small[0]].items()} if small else {}
        alike = [index for index in small if fit_rows(self._on_device[index], like)]
        for start in range(0, len(alike), _AT_ONCE):
            indices = alike[start : start + _AT_ONCE]
            found = [self._on_device.pop(index) for index in indices]
            together = {name: _stack([state[name] for state in found]) for name in like}
            self._staged.update(_copies_of_each(indices, _on_host(together)))
        self._staged.update((index, _on_host(state)) for index, state in self._on_device.items())
        self._states.update(self._staged)
        self.discard()

    def discard(self) -> None:
        """Discard the staged states."""
        self._staged, self._on_device, self._rows_on_device = {}, {}, []

    def state_dict(self) -> dict[int, State]:
        """Return the committed states."""
        return dict(self._states)

    def load_state_dict(self, states: Mapping[int, Any], is_mine: Callable[[int], bool] = lambda index: True) -> None:
        """Replace all states with those of this process's clients."""
        self.discard()
        self._states = {int(index): _on_host(state) for index, state in states.items() if is_mine(int(index))}


def _copies_of_each(indices: Sequence[int], states: State) -> dict[int, State]:
    """Return a copy of each client's state, given stacked ones [S, ...]."""
    rows = zip(*map(clone_rows, states.values()), strict=True)
    return {index: dict(zip(states, row, strict=True)) for index, row in zip(indices, rows, strict=True)}


def _is_small(state: State) -> bool:
    """Return whether a state is small enough that copies of several are faster in one tensor."""
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
