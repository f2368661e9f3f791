"""Clients that are trained in another process than the one that keeps their state: it travels there and back."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_fed.core.types import State
from lightning_fed.engines.kept_parts import KeptParts, parts_of, residuals_of
from lightning_fed.engines.ranks import Ranks
from lightning_fed.server.client_store import lasting_copy
from lightning_fed.server.server import Server

__all__ = ["Guests", "Kinds", "kinds_of", "send_states"]

Kinds: TypeAlias = Mapping[int, Mapping[str, tuple[tuple[int, ...], torch.dtype]]]
"""Shapes and types of clients' states, by stored index and name."""

_ALIGNED = 16  # bytes that every tensor starts at a multiple of


class Guests:
    """What the clients of a round keep, also of those that are trained elsewhere than it is kept.

    Args:
        server: The server's side, with this process's store.
        ranks: The processes.
        moves: Who is trained elsewhere, and where: ranks by stored index, of the clients of all processes.
    """

    def __init__(self, server: Server, ranks: Ranks, moves: Mapping[int, int]) -> None:
        self.server, self.ranks, self.moves = server, ranks, moves
        self._arrived: dict[int, State] = {}
        self._leaving: dict[int, State] = {}

    def receive(self) -> None:
        """Bring what clients keep to the processes that train them; all processes must call it."""
        if not self.moves:
            return
        own: dict[int, State] = {}

        def read() -> Kinds:
            for index in sorted(self.moves):
                if self.ranks.is_home_of(index) and (state := self.server.clients.get(index)):
                    own[index] = state
            return kinds_of(own)

        self._arrived = send_states(self.ranks, own, self.moves, self.ranks.exchange(read))

    def parts_of(self, index: int) -> KeptParts:
        """Return what a client to be trained here keeps, checked."""
        return parts_of(self.server, index, self._arrived.get(index))

    def residuals_of(self, index: int, send: State) -> State:
        """Return what compression left out of its messages before."""
        return residuals_of(self.server, index, send, self._arrived.get(index))

    def keep(self, index: int, parts: KeptParts) -> None:
        """Hold what a client that was trained here keeps until the round is complete."""
        if index in self.moves:
            self._leaving[index] = parts.joined()
        else:
            self.server.clients.stage(index, parts.joined())

    def outline(self) -> Kinds:
        """Return what other processes need to know before :meth:`send_home`."""
        return kinds_of(self._leaving)

    def send_home(self, outlines: Sequence[Kinds]) -> None:
        """Bring what clients keep to the processes that keep it; all processes must call it.

        Args:
            outlines: Everybody's :meth:`outline`.
        """
        homes = {index: self.ranks.home_of(index) for index in self.moves}
        for index, state in send_states(self.ranks, self._leaving, homes, outlines).items():
            self.server.clients.stage(index, state)


def kinds_of(states: Mapping[int, State]) -> Kinds:
    """Return what other processes need to know of states before these arrive."""
    return {
        index: {name: (tuple(value.shape), value.dtype) for name, value in state.items()}
        for index, state in states.items()
    }


def send_states(
    ranks: Ranks, states: Mapping[int, State], to: Mapping[int, int], kinds: Sequence[Kinds]
) -> dict[int, State]:
    """Send clients' states to other processes, and return those that arrive here, by stored index; all must call it.

    Args:
        ranks: The processes.
        states: This process's states that leave.
        to: The rank to which each goes, for the clients of all processes.
        kinds: Everybody's :func:`kinds_of`.
    """
    if not any(kinds):
        return {}
    outgoing = [[states[index] for index in sorted(states) if to[index] == rank] for rank in range(ranks.size)]
    incoming = [[(index, of[index]) for index in sorted(of) if to[index] == ranks.rank] for of in kinds]
    received = ranks.exchange_bytes(
        [[_bytes(value) for state in leaving for value in state.values()] for leaving in outgoing],
        [sum(_padded(*kind) for _, kind_of in arriving for kind in kind_of.values()) for arriving in incoming],
    )
    start = 0
    arrived: dict[int, State] = {}
    for index, kind_of in (client for arriving in incoming for client in arriving):
        arrived[index] = {}
        for name, (shape, dtype) in kind_of.items():
            part = received[start : start + prod(shape) * dtype.itemsize]
            arrived[index][name] = lasting_copy(part.view(dtype).view(shape))
            start += _padded(shape, dtype)
    return arrived


def _padded(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED


def _bytes(value: Tensor) -> Tensor:
    """Return a tensor's bytes, filled up to where the next one starts."""
    own = value.detach().contiguous().view(-1).view(torch.uint8)
    return torch.nn.functional.pad(own, (0, _padded(tuple(value.shape), value.dtype) - len(own)))
