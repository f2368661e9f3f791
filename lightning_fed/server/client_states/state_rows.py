"""Small client states side by side in memory."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_fed.core.types import State

__all__ = ["StateRows", "fit_rows"]

_FIRST = 64  # rows at the start
_NEW = 0  # the row that new clients' state is read from


class StateRows:
    """States of one kind, each a row of one tensor per name.

    Where states are small, those of a cohort come and go in less time so than client by client.

    Args:
        like: A state of the kind: its names, shapes and types, and the device.
        count: How many there will be, as far as is known; there may be more.
    """

    def __init__(self, like: State, count: int = 0) -> None:
        self._tensors = {name: _new_rows(value[None], max(_FIRST, count + 1)) for name, value in like.items()}
        self._at: dict[int, int] = {}  # each client's row
        self._free: list[int] = []  # rows of clients that have left

    def __len__(self) -> int:
        """The number of clients."""
        return len(self._at)

    def fit(self, like: State, dims: int = 0) -> bool:
        """Whether a state is of the kind; stacked ones are with ``dims=1``."""
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
            own = self._tensors[name]
            own.index_copy_(0, rows.to(own.device), value)

    def get(self, index: int) -> State | None:
        """Return a copy of a client's state, None if it has none here."""
        row = self._at.get(index)
        return None if row is None else {name: own[row].clone() for name, own in self._tensors.items()}

    def stacked(self, indices: Sequence[int], new: State) -> State:
        """Return copies of clients' states [S, ...].

        Args:
            indices: The clients' stored indices.
            new: The state of those that have none here.
        """
        rows = torch.from_numpy(np.array([self._at.get(index, _NEW) for index in indices]))
        for name, value in new.items():
            self._tensors[name][_NEW] = value
        return {name: own.index_select(0, rows.to(own.device)) for name, own in self._tensors.items()}

    def remove(self, index: int) -> None:
        """Forget a client, if it is here."""
        if index in self._at:
            self._free.append(self._at.pop(index))

    def states(self) -> dict[int, State]:
        """Return copies of all states, none of which holds on to the others."""
        return {
            index: {name: own[row].clone() for name, own in self._tensors.items()} for index, row in self._at.items()
        }

    def _grow(self, count: int) -> None:
        """Make room for so many rows, before anything refers to them: there may be no memory for them."""
        for name, own in self._tensors.items():
            if len(own) < count:
                self._tensors[name] = _new_rows(own, max(count, 2 * len(own)))


def fit_rows(state: State, rows: State, dims: int = 0) -> bool:
    """Whether a state has the names, shapes and types of the rows [S, ...] of others, and lives where they do.

    Args:
        state: The state.
        rows: The rows.
        dims: How many leading dimensions of the state do not count: 1 for stacked ones.
    """
    return state.keys() == rows.keys() and all(
        (value.shape[dims:], value.dtype, value.device) == (rows[name].shape[1:], rows[name].dtype, rows[name].device)
        for name, value in state.items()
    )


def _new_rows(old: Tensor, count: int) -> Tensor:
    """Return so many rows, the first ones copied.

    On a CPU from NumPy, which asks for large pages: first writes to small ones take longer than what is written.
    """
    shape = (count, *old.shape[1:])
    if old.device.type == "cpu":
        memory = torch.from_numpy(np.empty(count * old[0].nbytes, np.uint8))
        rows = memory.view(old.dtype).view(shape)
    else:
        rows = old.new_empty(shape)
    rows[: len(old)] = old
    return rows
