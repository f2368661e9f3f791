"""Clients that are trained in another process than the one that keeps their state: it travels there and back."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_fed.core.types import State
from lightning_fed.server.client_state import KeptParts, Stacked, parts_of, residuals_of
from lightning_fed.server.client_store import lasting_copy
from lightning_fed.server.server import Server
from lightning_fed.server.state_rows import fit_rows
from lightning_fed.stopping import Failure
from lightning_fed.strategies.processes import Ranks, Sent, padded

__all__ = ["Guests", "Kinds", "pack", "unpack"]

Kinds: TypeAlias = Mapping[int, Mapping[str, tuple[tuple[int, ...], torch.dtype]]]
"""Shapes and types of clients' states, by stored index and name."""


class Guests:
    """What the clients of a round keep, also of those that are trained elsewhere than it is kept.

    Args:
        server: The server's side, with this process's store.
        ranks: The processes.
        moves: Who is trained elsewhere, and where: ranks by stored index, of the clients of all processes.
    """

    def __init__(self, server: Server, ranks: Ranks, moves: Mapping[int, int]) -> None:
        self.server, self.ranks, self.moves = server, ranks, moves
        self._deliver: Callable[[], list[tuple[tuple[Kinds, Failure | None], Tensor]]] | None = None
        self._arrived: dict[int, State] = {}
        self._leaving: dict[int, State] = {}

    def send(self) -> None:
        """Send what clients keep to the processes that train them; all processes must call it.

        Raises:
            FederatedError: If it cannot be read.
        """
        if not self.moves:
            return
        own: dict[int, State] = {}
        failure = None
        try:
            for index in sorted(self.moves):
                if self.ranks.is_home_of(index) and (state := self.server.clients.get(index)):
                    own[index] = state
        except BaseException as error:
            failure, own = error, {}
        kinds, sent = pack(own, self.moves, self.ranks.size)
        self._deliver = self.ranks.deliver((kinds, Failure.of(failure)), sent)
        if failure is not None:
            raise failure

    def receive(self, indices: Sequence[int]) -> None:
        """Wait until what these clients keep is here, those among them whose state is kept elsewhere.

        Raises:
            ClientError: If the process that keeps it has failed.
        """
        if self._deliver is None or self.moves.keys().isdisjoint(indices):
            return
        letters, received = zip(*self._deliver(), strict=True)
        self._deliver = None
        Failure.raise_first([failure for _, failure in letters])
        self._arrived = unpack([kinds for kinds, _ in letters], received, self.moves, self.ranks.rank)

    def parts_of(self, indices: Sequence[int]) -> list[KeptParts]:
        """Return what clients to be trained here keep, checked; new ones share what they begin with."""
        new: KeptParts | None = None
        found = []
        for index in indices:
            if (state := self._state_of(index)) is not None:
                found.append(parts_of(self.server, index, state))
                continue
            new = new or KeptParts(self.server.algorithm.init_client(self.server.x))
            found.append(new)
        return found

    def stacked(self, indices: Sequence[int]) -> Stacked | None:
        """Return the method's states of several clients to be trained here, where nothing else is kept of them.

        Returns:
            Tensors that nobody else has; None where :meth:`parts_of` has to be asked.
        """
        if len(indices) == 1 or not self.server.new_client:
            return None
        found = self.server.clients.stacked(indices, self.server.algorithm.init_client(self.server.x))
        if found is None:
            return None
        arrived = {row: self._arrived[index] for row, index in enumerate(indices) if self._arrived.get(index)}
        if not all(fit_rows(state, found) for state in arrived.values()):
            return None
        for row, state in arrived.items():
            for name, value in state.items():
                found[name][row] = value
        return Stacked(found)

    def residuals_of(self, index: int, send: State) -> State:
        """Return what compression left out of its messages before."""
        state = self._state_of(index)
        return {} if state is None else residuals_of(self.server, index, send, state)

    def _state_of(self, index: int) -> State | None:
        return self._arrived.get(index) or self.server.clients.get(index)

    def keep(self, index: int, state: State) -> None:
        """Hold what a client that was trained here keeps until the round is complete."""
        if index in self.moves:
            self._leaving[index] = state
        else:
            self.server.clients.stage(index, state)

    def keep_all(self, indices: Sequence[int], states: State) -> None:
        """Do the same for several clients' states [S, ...], which are copied."""
        staying = []
        for row, index in enumerate(indices):
            if index in self.moves:
                self._leaving[index] = {name: lasting_copy(value[row]) for name, value in states.items()}
            else:
                staying.append(row)
        if len(staying) < len(indices):
            indices = [indices[row] for row in staying]
            states = {name: value[staying] for name, value in states.items()}
        if indices:
            self.server.clients.stage_all(indices, states)

    def leaving(self) -> tuple[Kinds, Sent]:
        """Return what goes home, and what others need to know of it before :meth:`take_home`."""
        return pack(self._leaving, self._homes, self.ranks.size)

    def take_home(self, kinds: Sequence[Kinds], received: Sequence[Tensor]) -> None:
        """Hold what clients keep that comes home.

        Args:
            kinds: What is to be known of what everybody has sent.
            received: The bytes that came here.
        """
        for index, state in unpack(kinds, received, self._homes, self.ranks.rank).items():
            self.server.clients.stage(index, state)

    @property
    def _homes(self) -> Mapping[int, int]:
        return {index: self.ranks.home_of(index) for index in self.moves}


def pack(states: Mapping[int, State], to: Mapping[int, int], size: int) -> tuple[Kinds, Sent]:
    """Return clients' states as bytes for each process, and what is to be known of them.

    Args:
        states: The states, by stored index.
        to: The rank to which each goes.
        size: The number of processes.
    """
    outgoing = [[states[index] for index in sorted(states) if to[index] == rank] for rank in range(size)]
    sent = [[part for state in leaving for value in state.values() for part in _bytes(value)] for leaving in outgoing]
    return _kinds_of(states), sent


def unpack(
    everybodys: Sequence[Kinds], received: Sequence[Tensor], to: Mapping[int, int], rank: int
) -> dict[int, State]:
    """Return copies of the states that have arrived, by stored index.

    Args:
        everybodys: What is to be known of what each process has sent, to whomever.
        received: The bytes that came here from each.
        to: The rank to which each state goes.
        rank: This process.
    """
    states: dict[int, State] = {}
    for kinds, part in zip(everybodys, received, strict=True):
        start = 0
        for index in sorted(index for index in kinds if to[index] == rank):
            states[index] = {}
            for name, (shape, dtype) in kinds[index].items():
                size = prod(shape) * dtype.itemsize
                states[index][name] = lasting_copy(part[start : start + size].view(dtype).view(shape))
                start += padded(size)
    return states


def _kinds_of(states: Mapping[int, State]) -> Kinds:
    """Return what other processes need to know of states."""
    return {
        index: {name: (tuple(value.shape), value.dtype) for name, value in state.items()}
        for index, state in states.items()
    }


def _bytes(value: Tensor) -> list[Tensor]:
    """Return a tensor's bytes, and what fills up to where the next one starts."""
    own = value.detach().contiguous().view(-1).view(torch.uint8)
    return [own, own.new_zeros(padded(len(own)) - len(own))]
