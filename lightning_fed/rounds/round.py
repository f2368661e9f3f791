"""A round as a sequence of phases: tasks from the server and replies from clients, up to the server's step."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

from lightning_fed.callbacks.base import call_round_hook
from lightning_fed.compat.private import rank_zero_info
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.engines.base import Restart
from lightning_fed.rounds.assignment import StateTransfer, assign
from lightning_fed.rounds.client_half import ClientHalf
from lightning_fed.rounds.cohort import CohortSampling, DrawnCohort
from lightning_fed.rounds.failures import Faults
from lightning_fed.rounds.messages import LOSS, TRAIN, Task
from lightning_fed.rounds.server_round import ServerRound
from lightning_fed.server.client_states.state import ClientStates
from lightning_fed.server.sampling import LossesOf
from lightning_fed.server.server import Server
from lightning_fed.strategies.processes import Ranks, Sent, metrics_alone

Status: TypeAlias = dict[str, Any]
"""A process's report to the others when its clients are done."""

_MOVED_BYTES = 2**27  # limit on transferred client states, in bytes, assuming one vector per state
_ALONE = "trains its own clients"


class Rounds:
    """Runs the rounds of a fit, up to the server's step.

    Every process has both halves, which pass objects by reference. Several processes draw the same cohort, and each
    answers for its part. They exchange the sums of replies, but no tasks.
    """

    def __init__(self, server: Server, sampling: CohortSampling, work: ClientHalf, ranks: Ranks) -> None:
        self.server, self.sampling, self.work, self.ranks = server, sampling, work, ranks
        self.settings, self.trainer = sampling.settings, work.trainer
        self.current_round: ServerRound | None = None  # None between rounds
        self._faults, self._cohort = Faults(), DrawnCohort()
        self._restart: Restart | None = None  # set if an engine could not run the current round

    def draw(self, losses_of: LossesOf | None = None) -> None:
        """Draw the next round's cohort; ``losses_of`` measures clients for samplers that need losses."""
        s, number = self.settings, self.server.round
        most = None if s.is_private else s.max_update_ratio  # stopping would reveal a client, and clipping bounds it
        self._faults = faults = Faults(s.drops_failed, s.max_failed_share, most, number)
        ask = partial(self.work.participants, round=number, failed=faults.add)
        self._cohort = self.sampling.draw(number, ask, losses_of and partial(self._losses, losses_of))
        if not self._cohort.members and not faults.causes and not s.is_private:
            rank_zero_info(f"Nobody takes part in round {number}: it changes nothing.")

    def _losses(self, losses_of: LossesOf, clients: Sequence[ClientId]) -> dict[ClientId, float]:
        """Return losses of clients that have examples and do not fail; each process measures a part of them."""
        ranks, faults = self.ranks, self._faults
        measure = losses_of  # one request for all sites
        if self.work.measure_on_sites is None:
            measure = partial(self._local_losses, losses_of)
        with self.work.split.in_step(), metrics_alone(self.trainer, _ALONE if ranks.size > 1 else ""):
            if ranks.size > 1 or self.work.split.size > 1:
                self._check_drawn(list(clients))
            mine = clients[ranks.rank :: ranks.size]
            parts = ranks.exchange(lambda: (measure(list(filter(self._has_examples, mine))), [()] * ranks.size))
        found = {client_id: loss for part, _ in parts for client_id, loss in part.items()}
        for client_id, loss in sorted(found.items(), key=lambda item: str(item[0])):
            if not math.isfinite(loss):  # if the client trained, its parameters would not be finite either
                where = f"Client {client_id!r} has the loss {loss:g} at the server model of round {self.server.round}"
                remedy = "which the sampler asked for. Lower the learning rate, or look at its data."
                faults.add(ClientError(f"{where}, {remedy}", client_id))
        if faults.drops and ranks.size > 1:
            faults.merge(ranks.gather(faults.causes))
        faults.check(clients)
        return {i: found[i] for i in clients if i in found and i not in faults.causes}

    def _has_examples(self, client_id: ClientId) -> bool:
        """Return whether a client has examples; record a failure if its data cannot be built."""
        try:
            return self.sampling.population.size(client_id) > 0
        except ClientError as error:
            self._faults.add(error)
            return False

    def _local_losses(self, losses_of: LossesOf, clients: Sequence[ClientId]) -> Mapping[ClientId, float]:
        """Return losses of clients, measured one by one, so that an error names its client."""
        found = dict[ClientId, float]()
        for client_id in clients:
            try:
                found.update(losses_of([client_id]))
            except ClientError as error:
                self._faults.add(error)
        return found

    def check_batches(self) -> None:
        """Raise for clients with a batch of one example that the module cannot train on, before any trains.

        It checks all clients if their sizes are known and the sampler is not user-defined, else the current cohort.
        """
        population, cohort = self.sampling.population, self._cohort
        is_users = not type(self.settings.sampler).__module__.startswith("lightning_fed.")
        if population.sizes_are_known and not is_users:
            sizes: Iterable[tuple[ClientId, int]] = zip(population, population.sizes, strict=True)
        else:
            drawn = {who.client_id: who.size for who in (*cohort.members, *cohort.gradient_members)}
            sizes = drawn.items()
        self.work.check_batches(sizes)

    def run(self, status: Callable[[], Status]) -> tuple[ServerRound, list[Status]]:
        """Run the clients of the cohort; failed ones are left out if ``on_client_error`` is "drop".

        Return the server's half, ready to be closed, and the :class:`Status` of each process when its clients are done.
        """
        work, faults = self.work, self._faults
        undo = work.savepoint() if self.settings.drops_failed or work.may_restart else None
        failed_before = dict(faults.causes)
        while (statuses := self._try(status)) is None:
            assert undo is not None
            undo()
            self.server.clients.discard()
            if self._restart is not None:
                faults.causes, faults.refused = dict(failed_before), set()
                work.restart(self.server.round, self._restart)
                undo = work.savepoint()  # the old savepoint would keep an unused engine alive
            call_round_hook(self.trainer, "on_round_restart", self.server.round)
        assert self.current_round is not None
        return self.current_round, statuses

    def _check_drawn(self, drawn: object) -> None:
        """Raise if processes have drawn or planned different clients for the round; all must call it."""
        gather = self.work.split.gather if self.ranks.size == 1 else self.ranks.gather
        first, *others = gather(drawn)
        for rank, other in enumerate(others, start=1):
            if other != first:
                raise FederatedError(
                    f"Process {rank} has other clients in round {self.server.round} than process 0, or other sizes or"
                    " local steps of them. Let a sampler and heterogeneity draw from (seed, round), and clients' data"
                    " from their ids: a global generator, the time and the rank differ between processes. Hooks must"
                    " change settings alike in all processes."
                )

    def leave(self) -> None:
        """Release the current round."""
        self.current_round, self._cohort = None, DrawnCohort()
        self.work.end()

    def _try(self, status: Callable[[], Status]) -> list[Status] | None:
        """Run the clients; return None if the round must restart.

        It must if other clients depend on failed ones, or if another chunk size or engine may run the clients.
        """
        ranks, server, split, statuses = self.ranks, self.server, self.work.split, [Status()]
        if self.settings.drops_failed and ranks.size > 1:  # data may fail to load in only some processes
            self._faults.merge(ranks.gather(self._faults.causes))
        half = self.current_round = ServerRound(
            server, self.settings, self.sampling.population, self._cohort, self._faults
        )
        mine, workers, transfer = list(half.members.values()), dict[int, int](), None
        states = ClientStates(server.new_client, server.clients, server.expected_state)
        if ranks.size > 1:
            keeps_state, most_moves = self.settings.clients_keep_state, max(1, _MOVED_BYTES // server.x.nbytes)
            asked = [*mine, *half.gradient_members.values()]
            workers = dict(assign(asked, ranks, keeps_state, most_moves, server.x.numel()))
            mine = [member for member in mine if workers[member.index] == ranks.rank]
            states = shared = StateTransfer(
                server, ranks, {i: workers[i] for i in half.members} if keeps_state else None
            )
            transfer = shared if shared.moves else None
        with split.in_step(), metrics_alone(self.trainer, _ALONE if ranks.size > 1 else ""):
            if ranks.size > 1 or split.size > 1:  # before other processes wait for client states
                self._check_drawn(_drawn(half))
            self.work.begin(server.round, mine, reads_later=ranks.size == 1)
            for task in half.phases():
                answer = partial(self._answer, task, half, workers, states, transfer, status)
                parts, received = zip(*ranks.exchange(answer), strict=True)
                restarts = [part["restart"] for part in parts if "restart" in part]
                # all processes restart alike: in the sequential engine if one must, else with the smallest chunk size
                self._restart = min(restarts, key=lambda restart: restart.chunk_size or 0, default=None)
                if restarts:
                    return None
                if task.phase == TRAIN:
                    if transfer is not None:
                        transfer.take_back([part["returning"] for part in parts], received)
                    statuses = [part["status"] for part in parts]
                    statuses = split.gather(statuses[0]) if split.size > 1 else statuses
                if not half.close_phase(parts, ranks):
                    return None
        return statuses

    def _answer(
        self,
        task: Task,
        half: ServerRound,
        workers: Mapping[int, int],
        states: ClientStates,
        transfer: StateTransfer | None,
        status: Callable[[], Status],
    ) -> tuple[dict[str, Any], Sent]:
        """Answer a task for this process's clients; return the data for other processes."""
        ranks, work, trains, clients = self.ranks, self.work, task.phase == TRAIN, task.clients
        if ranks.size > 1:
            worker = ranks.owner_of if task.phase == LOSS else workers.__getitem__
            clients = [index for index in clients if worker(index) == ranks.rank]
        if trains and transfer is not None:
            transfer.send()
        chunks = work.chunks(task, clients)
        if trains and transfer is not None:
            chunks = transfer.last(chunks)
        half.expect(chain.from_iterable(chunks))
        try:
            for some in chunks:
                for reply in work.answer(task, some, states):
                    work.call_end_hooks(half.receive(reply))
        except (FederatedError, RuntimeError) as error:
            if (restart := work.restart_after(error)) is None:
                raise
            if transfer is not None:
                transfer.wait()
            return {"restart": restart}, [()] * ranks.size
        part: dict[str, Any] = half.partial() if ranks.size > 1 else {}
        if not trains:
            return part, [()] * ranks.size
        work.end_training()
        returning, sent = transfer.returning() if transfer is not None else ({}, [()] * ranks.size)
        return {**part, "returning": returning, "status": status()}, sent


def _drawn(half: ServerRound) -> int:
    """Return a checksum of the clients of a round, with their sizes and steps."""
    asked = (*half.members.values(), *half.gradient_members.values())
    return hash(tuple([(member.index, member.size, member.steps) for member in asked]))  # identical in all processes
