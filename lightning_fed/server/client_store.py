"""What clients keep between their rounds, by stored index."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fed.core.types import State

__all__ = ["ClientStore", "MemoryClientStore", "lasting_copies", "lasting_copy"]

_PAGES = 2**15  # bytes from which on a tensor's memory is worth being used again


def lasting_copy(value: Tensor) -> Tensor:
    """Return a copy of what a client keeps.

    Kept states come and go in one size. PyTorch asks for aligned memory, of which glibc cannot use again what was given
    back in the very same size: every state would be on new pages, each of which costs about as much as copying it. What
    NumPy asks for is used again.
    """
    if value.device.type != "cpu" or value.nbytes < _PAGES:
        return value.clone()
    memory = torch.from_numpy(np.empty(value.nbytes, np.uint8))
    return memory.view(value.dtype).view(value.shape).copy_(value)


def lasting_copies(rows: Tensor) -> Sequence[Tensor]:
    """Return a copy of every row of what clients keep, none of which holds on to the others."""
    if rows.device.type == "cpu" and rows[0].nbytes >= _PAGES:
        return [lasting_copy(row) for row in rows]
    copies: Sequence[Tensor] = torch.unbind_copy(rows)  # type: ignore[func-returns-value, assignment]
    return copies  # at once, which takes half the time where they are small


class ClientStore(ABC):
    """Kept client states; only clients that took part have one.

    States written during a round are staged and become visible with :meth:`commit`, together with the server's step:
    a checkpoint taken in the middle of a round then holds the state after the last completed one.
    """

    @abstractmethod
    def __len__(self) -> int:
        """The number of clients with a kept state."""

    @abstractmethod
    def get(self, index: int) -> State | None:
        """Return a client's committed state, or None if it has none yet."""

    @abstractmethod
    def stage(self, index: int, state: State) -> None:
        """Hold a client's new state until the round is complete; an empty one is not held."""

    @abstractmethod
    def commit(self) -> None:
        """Make the staged states the kept ones."""

    @abstractmethod
    def discard(self) -> None:
        """Forget the staged states."""

    @abstractmethod
    def state_dict(self) -> dict[int, State]:
        """Return all committed states, in memory."""

    @abstractmethod
    def load_state_dict(
        self, states: Mapping[int, Any], device: torch.device, is_mine: Callable[[int], bool] = lambda index: True
    ) -> None:
        """Replace all states.

        Args:
            states: States by stored index.
            device: Where states are read to.
            is_mine: Which clients' states this process keeps; others are left out.
        """


class MemoryClientStore(ClientStore):
    """Kept client states in memory, where they were made."""

    def __init__(self) -> None:
        self._states: dict[int, State] = {}
        self._staged: dict[int, State] = {}

    def __len__(self) -> int:
        """The number of clients with a kept state."""
        return len(self._states)

    def get(self, index: int) -> State | None:
        """Return a client's committed state, or None if it has none yet."""
        return self._states.get(index)

    def stage(self, index: int, state: State) -> None:
        """Hold a client's new state until the round is complete; an empty one is not held."""
        if state:
            self._staged[index] = {name: v.detach() if v.requires_grad else v for name, v in state.items()}

    def commit(self) -> None:
        """Make the staged states the kept ones."""
        self._states.update(self._staged)
        self._staged = {}

    def discard(self) -> None:
        """Forget the staged states."""
        self._staged = {}

    def state_dict(self) -> dict[int, State]:
        """Return the committed states."""
        return dict(self._states)

    def load_state_dict(
        self, states: Mapping[int, Any], device: torch.device, is_mine: Callable[[int], bool] = lambda index: True
    ) -> None:
        """Replace all states by those of the clients that are this process's own."""
        self._staged = {}
        self._states = {
            int(i): {k: v.to(device) for k, v in state.items()} for i, state in states.items() if is_mine(int(i))
        }
