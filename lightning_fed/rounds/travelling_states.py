"""Clients that are trained in another process than the one that keeps their state: it travels there and back."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import State
from lightning_fed.server.client_state import ClientStates, Stacked
from lightning_fed.server.client_store import lasting_copy
from lightning_fed.server.server import Server
from lightning_fed.server.state_rows import fit_rows
from lightning_fed.stopping import Failure
from lightning_fed.strategies.processes import Ranks, Sent, padded

__all__ = ["Kinds", "TravellingStates", "pack", "unpack"]

Kinds: TypeAlias = Mapping[int, Mapping[str, tuple[tuple[int, ...], torch.dtype]]]
"""Shapes and types of clients' states, by stored index and name."""


class TravellingStates(ClientStates):
    """What the clients of a round keep, also of those that are trained in another process than it is kept in.

    Args:
        server: The server's side, with this process's store.
        ranks: The processes.
        owners: Who trains each client of the round, in whichever process: ranks by stored index. None if clients are
            not known to keep anything.
    """

    def __init__(self, server: Server, ranks: Ranks, owners: Mapping[int, int] | None) -> None:
        super().__init__(server.new_client, server.clients, server.expected_state)
        self.ranks, self._is_announced = ranks, owners is not None
        self.moves: dict[int, int] = {}
        if owners is not None and ranks.size > 1:
            self.moves = {index: rank for index, rank in owners.items() if rank != ranks.home_of(index)}
        self._deliver: Callable[[], list[tuple[tuple[Kinds, Failure | None], Tensor]]] | None = None
        self._arrived: dict[int, State] = {}
        self._leaving: dict[int, State] = {}

    def last(self, chunks: Iterable[Sequence[int]]) -> list[Sequence[int]]:
        """Return chunks of clients with those last whose states travel: nobody waits for what is still to arrive."""
        if not self.moves:
            return list(chunks)
        return sorted(chunks, key=lambda indices: not self.moves.keys().isdisjoint(indices))

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
                if self.ranks.is_home_of(index) and (state := self.store.get(index)):
                    own[index] = state
        except BaseException as error:
            failure, own = error, {}
        kinds, sent = pack(own, self.moves, self.ranks.size)
        self._deliver = self.ranks.deliver((kinds, Failure.of(failure)), sent)
        if failure is not None:
            raise failure

    def _receive(self, indices: Sequence[int]) -> None:
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

    def of(self, index: int) -> State | None:
        """Return what one client keeps; see :meth:`ClientStates.of`."""
        self._receive([index])
        return self._arrived.get(index) or self.store.get(index)

    def of_all(self, indices: Sequence[int]) -> Stacked | None:
        """Return several clients' states at once; see :meth:`ClientStates.of_all`."""
        self._receive(indices)
        states = super().of_all(indices)
        if states is None:
            return None
        arrived = {row: self._arrived[index] for row, index in enumerate(indices) if self._arrived.get(index)}
        if not all(fit_rows(state, states.together) for state in arrived.values()):
            return None
        for row, state in arrived.items():
            for name, value in state.items():
                states.together[name][row] = value
        return states

    def keep(self, index: int, state: State) -> None:
        """Hold what a client keeps until the round is complete, to be sent home if its home is elsewhere."""
        self._check_announced(state)
        if index in self.moves:
            self._leaving[index] = state
        else:
            super().keep(index, state)

    def keep_all(self, indices: Sequence[int], states: State) -> None:
        """Do the same for several clients' states [S, ...], which are copied."""
        self._check_announced(states)
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
            super().keep_all(indices, states)

    def _check_announced(self, state: State) -> None:
        """Refuse what a client keeps where others do not know that it keeps anything.

        Raises:
            FederatedError: If there are several processes.
        """
        if not self._is_announced and self.ranks.size > 1:
            raise FederatedError(
                f"{self.expected.method}.finish keeps {sorted(state)} without an init_client that says what a new"
                " client has: several processes would not know where to look for it. Override init_client."
            )

    def leaving(self) -> tuple[Kinds, Sent]:
        """Return what goes home, and what others need to know of it before :meth:`take_home`."""
        if not self.moves:
            return {}, [()] * self.ranks.size
        return pack(self._leaving, self._homes, self.ranks.size)

    def take_home(self, kinds: Sequence[Kinds], received: Sequence[Tensor]) -> None:
        """Hold what clients keep that comes home.

        Args:
            kinds: What is to be known of what everybody has sent.
            received: The bytes that came here.
        """
        if not self.moves:
            return
        for index, state in unpack(kinds, received, self._homes, self.ranks.rank).items():
            self.store.stage(index, state)

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
