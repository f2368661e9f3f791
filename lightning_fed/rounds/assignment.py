"""The assignment of clients to processes, and the transfer of their states."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import State
from lightning_fed.server.client_states.state import ClientStates, Stacked
from lightning_fed.server.client_states.store import clone_tensor, fit_rows
from lightning_fed.server.participation import Participant
from lightning_fed.server.server import Server
from lightning_fed.strategies.processes import Ranks, Sent, padded
from lightning_fed.strategies.stopping import Failure

Kinds: TypeAlias = Mapping[int, Mapping[str, tuple[tuple[int, ...], torch.dtype]]]
"""Shapes and dtypes of client states, by stored index and name."""

_MODELS = (2**13, 2**20)  # minimum parameter counts of medium and large models: their steps outlast a transfer
# Rough costs in local steps on a batch of 20, for a small, a medium and a large model:
_AROUND = (4, 4, 0)  # overhead of a client that keeps state
_MOVE = (2, 2, 1)  # transferring a one-vector state, there and back
_TRIP = (25, 2, 1)  # overhead of any transfer


def assign(
    cohort: Iterable[Participant], ranks: Ranks, keeps_state: bool, most_moves: int = 2**31, numel: int = _MODELS[0]
) -> Mapping[int, int]:
    """Return the rank that trains each client of a cohort, by stored index.

    A client that keeps state trains in the process that owns it, unless moving it shortens the round. At most
    ``most_moves`` clients move. Clients without state are assigned in descending order of planned steps, each to the
    process with the fewest local steps so far.
    """
    members = {member.index: member for member in cohort}
    if ranks.size == 1:
        return dict.fromkeys(members, 0)
    if keeps_state:
        owners = {index: ranks.owner_of(index) for index in members}
        kind = sum(numel >= least for least in _MODELS)
        work = {index: member.steps + _AROUND[kind] for index, member in members.items()}
        return _balanced(owners, work, ranks.size, most_moves, _MOVE[kind], _TRIP[kind])
    loads = [0] * ranks.size
    workers = {}
    for member in sorted(members.values(), key=lambda m: (-m.steps, -m.size, m.index)):
        rank = loads.index(min(loads))
        loads[rank] += max(1, member.steps)
        workers[member.index] = rank
    return workers


def _balanced(
    owners: Mapping[int, int], work: Mapping[int, int], size: int, most_moves: int, a_move: int, a_trip: int
) -> Mapping[int, int]:
    """Move clients from the process with the most work to the one with the least, while that shortens the round."""
    loads = [0] * size
    for index, rank in owners.items():
        loads[rank] += work[index]
    movable = [sorted((work[i], -i) for i, owner in owners.items() if owner == rank) for rank in range(size)]
    workers, without_moves, moves = dict(owners), max(loads), 0
    while True:
        most, fewest = loads.index(max(loads)), loads.index(min(loads))
        afterwards = [
            (max(loads[most] - amount, loads[fewest] + amount) + a_move, -negated)
            for amount, negated in _nearest(movable[most], (loads[most] - loads[fewest]) / 2)
        ]
        after, best = min(afterwards, default=(loads[most], -1))
        if moves == most_moves or after >= loads[most]:
            return workers if loads[most] + a_trip < without_moves else owners
        workers[best], moves = fewest, moves + 1
        movable[most].remove((work[best], -best))
        loads[most] += a_move - work[best]
        loads[fewest] += a_move + work[best]


def _nearest(movable: Sequence[tuple[int, int]], amount: float) -> list[tuple[int, int]]:
    """Return the clients whose work is closest below and above an amount; the lowest index breaks ties.

    ``movable`` has each client's work and negated index, sorted.
    """
    at = bisect_left(movable, (amount, -math.inf))
    above = [movable[bisect_left(movable, (movable[at][0], 1)) - 1]] if at < len(movable) else []
    return [*movable[max(0, at - 1) : at], *above]


class StateTransfer(ClientStates):
    """Client states of a round in several processes. Some clients train outside the process that owns their state.

    ``workers`` maps the stored index of each client to the rank that trains it, or is None if clients are not known to
    keep state. ``moves`` is the part of it for clients whose state is transferred.
    """

    def __init__(self, server: Server, ranks: Ranks, workers: Mapping[int, int] | None) -> None:
        super().__init__(server.new_client, server.clients, server.expected_state)
        self.ranks, self._workers_are_known = ranks, workers is not None
        self.moves = {index: rank for index, rank in (workers or {}).items() if rank != ranks.owner_of(index)}
        self._owners = {index: ranks.owner_of(index) for index in self.moves}
        self._deliver: Callable[[], list[tuple[tuple[Kinds, Failure | None], Tensor]]] | None = None
        self._arrived: dict[int, State] = {}
        self._returning: dict[int, State] = {}

    def last(self, chunks: Iterable[Sequence[int]]) -> list[Sequence[int]]:
        """Return the chunks with transferred states last, so that the others need not wait."""
        return sorted(chunks, key=lambda indices: not self.moves.keys().isdisjoint(indices))

    def send(self) -> None:
        """Send states to the processes that train their clients; all processes must call it."""
        own: dict[int, State] = {}
        failure = None
        try:
            for index in sorted(self.moves):
                if self.ranks.owns(index) and (state := self.store.get(index)):
                    own[index] = state
        except BaseException as error:
            failure, own = error, {}
        kinds, sent = pack(own, self.moves, self.ranks.size)
        self._deliver = self.ranks.deliver((kinds, Failure.of(failure)), sent)
        if failure is not None:
            raise failure

    def _await(self, indices: Sequence[int]) -> None:
        """Wait for the states of these clients, if another process owns any."""
        if self._deliver is None or self.moves.keys().isdisjoint(indices):
            return
        letters, received = zip(*self._deliver(), strict=True)
        self._deliver = None
        Failure.raise_first([failure for _, failure in letters])
        self._arrived = unpack([kinds for kinds, _ in letters], received, self.moves, self.ranks.rank)

    def wait(self) -> None:
        """Wait for transferred states, if the round ends before they are used."""
        self._await(list(self.moves))

    def of(self, index: int) -> State | None:
        """Return one client's state; see :meth:`ClientStates.of`."""
        if self.moves:
            self._await([index])
        return self._arrived.get(index) or self.store.get(index)

    def of_all(self, indices: Sequence[int]) -> Stacked | None:
        """Return several clients' states at once; see :meth:`ClientStates.of_all`."""
        if self.moves:
            self._await(indices)
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

    def stage(self, index: int, state: State) -> None:
        """Stage a client's state, or hold it until it returns to its owner."""
        self._check_workers_are_known(state)
        if index in self.moves:
            self._returning[index] = state
        else:
            super().stage(index, state)

    def stage_all(self, indices: Sequence[int], states: State) -> None:
        """Stage or hold copies of several clients' states [S, ...]."""
        self._check_workers_are_known(states)
        staying = []
        for row, index in enumerate(indices):
            if index in self.moves:
                self._returning[index] = {name: clone_tensor(value[row]) for name, value in states.items()}
            else:
                staying.append(row)
        if len(staying) < len(indices):
            indices = [indices[row] for row in staying]
            states = {name: value[staying] for name, value in states.items()}
        if indices:
            super().stage_all(indices, states)

    def _check_workers_are_known(self, state: State) -> None:
        """Raise for a state that other processes do not expect."""
        if not self._workers_are_known:
            raise FederatedError(
                f"{self.expected.method}.finish keeps {sorted(state)}, and its init_client returns no state. Several"
                " processes would not exchange it. Override init_client, so that it returns a new client's state."
            )

    def returning(self) -> tuple[Kinds, Sent]:
        """Return the metadata for :meth:`take_back` and the bytes of the states to send back to their owners."""
        return pack(self._returning, self._owners, self.ranks.size)

    def take_back(self, kinds: Sequence[Kinds], received: Sequence[Tensor]) -> None:
        """Stage the returned states, given every process's metadata from :meth:`returning` and the bytes."""
        for index, state in unpack(kinds, received, self._owners, self.ranks.rank).items():
            self.store.stage(index, state)


def pack(states: Mapping[int, State], to: Mapping[int, int], size: int) -> tuple[Kinds, Sent]:
    """Return the shapes and dtypes of client states, and their bytes for each of ``size`` processes.

    ``to`` maps each stored index to the destination rank.
    """
    outgoing = [[states[index] for index in sorted(states) if to[index] == rank] for rank in range(size)]
    sent = [[part for state in leaving for value in state.values() for part in _bytes(value)] for leaving in outgoing]
    return {i: {name: (tuple(v.shape), v.dtype) for name, v in state.items()} for i, state in states.items()}, sent


def unpack(
    everybodys: Sequence[Kinds], received: Sequence[Tensor], to: Mapping[int, int], rank: int
) -> dict[int, State]:
    """Return copies of the states received at ``rank``, given all metadata from :func:`pack` and the bytes."""
    states: dict[int, State] = {}
    for kinds, part in zip(everybodys, received, strict=True):
        start = 0
        for index in sorted(index for index in kinds if to[index] == rank):
            states[index] = {}
            for name, (shape, dtype) in kinds[index].items():
                size = math.prod(shape) * dtype.itemsize
                states[index][name] = clone_tensor(part[start : start + size].view(dtype).view(shape))
                start += padded(size)
    return states


def _bytes(value: Tensor) -> list[Tensor]:
    """Return a tensor's bytes in host memory, and the padding before the next tensor."""
    own = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return [own, own.new_zeros(padded(len(own)) - len(own))]
