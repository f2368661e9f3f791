"""The server's half of a round: requests to clients, sums of their replies, and the server's step."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.rounds import ClientReport, Cohort, RoundReport
from lightning_fed.core.tracked_state import TrackedState
from lightning_fed.core.types import ClientId, State, Vector
from lightning_fed.rounds.cohort import DrawnCohort
from lightning_fed.rounds.failures import Faults
from lightning_fed.rounds.messages import GRADIENTS, LOSS, TRAIN, Reply, ReplyOrder, Task
from lightning_fed.rounds.totals import RoundTotals
from lightning_fed.server.aggregation.mean import Collectives, averaged_points
from lightning_fed.server.participation import Population
from lightning_fed.server.server import Server
from lightning_fed.settings.settings import Settings


class ServerRound:
    """Sends requests to clients, combines their replies, and takes the server's step.

    Clients that have failed in this round so far are left out. Only :meth:`close` changes the server's state.

    It does not depend on a module, data or an engine. A round is::

        for task in server_round.phases():
            for reply in replies_to(task):  # in any order
                server_round.receive(reply)
            if not server_round.close_phase():
                ...  # start again with a new ServerRound, which leaves out the failed clients
        report = server_round.close(metrics, seconds)
    """

    def __init__(
        self, server: Server, settings: Settings, population: Population, cohort: DrawnCohort, faults: Faults
    ) -> None:
        self.server, self.settings, self.population = server, settings, population
        self.algorithm, self.faults, self._dropped = server.algorithm, faults, tuple(cohort.dropped)
        algorithm, size = server.algorithm, len(population)
        averages = bool(cohort.members and algorithm.full_grad_at and averaged_points(algorithm, server.round))
        gradient_members = cohort.gradient_members if averages else ()
        faults.ask(cohort.members, gradient_members, cohort.dropped)
        self.members = {p.index: p for p in cohort.members if p.client_id not in faults.causes}
        self.gradient_members = {p.index: p for p in gradient_members if p.client_id not in faults.causes}
        self._steps = {i: p.steps for i, p in (*self.gradient_members.items(), *self.members.items())}
        self.state, self.cohort_grad = server.state, State()
        self._cohort = Cohort(len(self.members), size, server.round, advance_solver=server.advance_solver)
        self._totals = RoundTotals(server, settings, self.members, self.gradient_members, size)
        failed = map(population.index_of, faults.causes.keys() & faults.asked)
        self._totals.traffic.clients = {*self.members, *failed}
        self._measured = tuple(map(population.index_of, cohort.measured))
        self._reports: dict[ClientId, ClientReport] = {}  # in the cohort's order, after the last phase
        self._done: list[ClientId] = []  # the clients whose messages count
        self._task: Task | None = None
        self._order = ReplyOrder(())

    # ------------------------------------------------------------------ requests

    def phases(self) -> Iterator[Task]:
        """Yield the tasks for clients, phase by phase. Close each phase before the next."""
        if self.members or self.settings.is_private:  # noise is also added without participants
            if self.gradient_members:
                yield self._ask(GRADIENTS, self.gradient_members)
            if self.algorithm.population_loss:
                yield self._ask(LOSS, map(self.population.index_of, self.population))
            # copies: a hook may keep x or write to the dict, and the round may restart
            self.state = self.algorithm.begin_round(self.server.x.clone(), dict(self.server.state), self._cohort)
        yield self._ask(TRAIN, self.members)

    def _ask(self, phase: str, clients: Iterable[int]) -> Task:
        server, population = self.server, self.population
        knows = population.sizes_are_known or self.algorithm.uses_mean_examples
        self._task = Task(
            round=server.round,
            phase=phase,
            clients=tuple(clients),
            steps=self._steps,
            x=server.x,
            server=self.state,
            cohort_grad=self.cohort_grad,
            buffers=server.buffers,
            mean_examples=population.mean_size if knows else math.nan,
            first_step=self.settings.first_step(server.round, server.longest_steps),
        )
        self._totals.norms = {}
        self.expect(self._task.clients)
        return self._task

    def expect(self, clients: Iterable[int]) -> None:
        """Expect replies from these clients only, by stored index, in the order of the sum; the default is all."""
        self._order = ReplyOrder(clients)

    # ------------------------------------------------------------------ replies

    def receive(self, reply: Reply) -> list[ClientId]:
        """Add a reply of the current phase; return the clients whose replies have just been added.

        Replies may arrive in any order: early ones wait. Duplicates and late ones are ignored. This raises for clients
        that were not requested, for messages that are not the method's, and for a failed client that is not dropped.
        """
        task = self._task
        if task is None or (reply.round, reply.phase) != (task.round, task.phase):
            now = "the round is over" if task is None else f"it is at {task.phase!r} of round {task.round}"
            warnings.warn(
                f"A reply to {reply.phase!r} of round {reply.round} comes too late: {now}. It is ignored.", stacklevel=2
            )
            return []
        return self._add(self._order.arrive(reply))

    def _add(self, ready: Iterable[Reply]) -> list[ClientId]:
        """Add replies in the order of the sum; return the clients that count."""
        counted: list[ClientId] = []
        for reply in ready:
            for error in reply.failed.values():
                self.faults.add(error)
            counted += self._totals.update(reply, self._order.rows(reply), self.faults.add, self.state)
        return counted

    def missing(self) -> list[ClientId]:
        """Return the requested clients of this phase without a reply, in the cohort's order."""
        return list(map(self.server.ids.__getitem__, self._order.missing()))

    # ------------------------------------------------------------------ the end of a phase

    def _complete(self) -> Task:
        """Drop the clients without a reply, and add the replies that waited for them."""
        assert self._task is not None
        if missing := self._order.missing():
            what = f"to {self._task.phase!r} of round {self._task.round}"
            for client_id in map(self.server.ids.__getitem__, missing):
                self.faults.add(ClientError(f"Client {client_id!r} has sent no reply {what}.", client_id))
            self._add(self._order.rest())
            self._order = ReplyOrder(())
        return self._task

    def partial(self) -> dict[str, Any]:
        """Return this process's part of the phase for the other processes, without sums of vectors."""
        return {"totals": self._totals.partial(self._complete().phase), "failed": self.faults.causes}

    def close_phase(self, partials: Sequence[Mapping[str, Any]] = (), ranks: Collectives | None = None) -> bool:
        """Complete the phase, over all processes if given each one's :meth:`partial`.

        Return False if the round must restart because other clients depend on a failed one. Raise if too many clients
        failed, or if a failed or missing client is not dropped.
        """
        faults, totals, phase = self.faults, self._totals, self._complete().phase
        if ranks is not None and ranks.size > 1:
            faults.merge([partial["failed"] for partial in partials])
            totals.merge(phase, [partial["totals"] for partial in partials], ranks)
        self._task = None
        if phase == TRAIN:
            return self._close_training()
        if phase == LOSS:
            faults.check(self.population)
        for point in self.algorithm.full_grad_at if phase == GRADIENTS else ():
            faults.add_outliers(totals.norms_at(point), f"a full-batch gradient at {point}", self.server.x)
        faults.check_asked()
        if faults.causes and faults.affect([*self.members.values(), *self.gradient_members.values()]):
            return False
        if phase == LOSS:
            self._cohort.loss = totals.mean_loss()
        else:
            self.cohort_grad = totals.mean_gradients()
            if self._is_attacked:  # the norms checked above are from before the attack
                for point, value in self.cohort_grad.items():
                    self._check_finite(f"full-batch gradient at {point}", value)
            self._cohort.grad = TrackedState(self.cohort_grad, totals.traffic.gradients)
            totals.traffic.gradient_clients = set(self.gradient_members)
        return True

    def _close_training(self) -> bool:
        """Close the last phase; return False if a client to leave out is already in the sums."""
        faults, found, algorithm = self.faults, self._totals.reports, self.algorithm
        faults.check_asked()
        if self._totals.is_invalid or (faults.causes and faults.affect(self.gradient_members.values())):
            return False
        self._reports = reports = {p.client_id: found[index] for index, p in self.members.items() if index in found}
        self._done = [i for i, report in reports.items() if report.steps > 0 or not algorithm.local_work]
        if faults.max_ratio is None:
            return True
        updates = {i: report.update_norm for i, report in reports.items() if report.steps}
        if self.settings.local_schedule is not None:  # clients with few steps do not move at a rate of zero
            updates = {i: norm for i, norm in updates.items() if norm}
        outliers = faults.add_outliers(updates, "an update", self.server.x)
        for point in algorithm.full_grad_at:
            norms = self._totals.norms_at(point)
            norms = {i: norms[i] for i in reports if i in norms}
            outliers |= faults.add_outliers(norms, f"a full-batch gradient at {point}", self.server.x)
        faults.refused |= outliers
        faults.check_asked()
        return not outliers

    # ------------------------------------------------------------------ the server's step

    @property
    def _is_attacked(self) -> bool:
        return self.settings.attack is not None and self.settings.attack.changes_messages

    def _check_finite(self, what: str, mean: Vector) -> None:
        """Raise if the mean of the clients' ``what`` is not finite."""
        if bool(torch.isfinite(mean).all()):
            return
        remedy = f"Look at {type(self.algorithm).__name__}.finish, or lower the learning rate."
        if self._is_attacked:
            remedy = (
                f"attack={self.settings.attack!r} changes what bad clients send. Let it send finite numbers, or set"
                " aggregator=CoordinateMedian() and on_client_error='drop', say, which leave such clients out."
            )
        raise FederatedError(
            f"The mean of the clients' {what} is not finite in round {self._cohort.round}, though every update is."
            f" {remedy}"
        )

    def close(self, metrics: Mapping[str, float], seconds: float) -> RoundReport:
        """Average the messages, take the server's step, and report."""
        totals, server, done = self._totals, self.server, self._done
        self._cohort.size = len(done)
        messages, models, new_buffers, drift = totals.compute(done)
        for name, value in messages.items():
            if not math.isfinite(float(value.sum())):  # fast check first, as the sum may overflow
                self._check_finite(f"message {name!r}", value)
        buffers = server.buffers if self.settings.buffers == "average" else State()  # the exchanged buffers
        bytes_up, bytes_down = totals.traffic.compute(
            self.state,
            buffers_up=sum([buffers[name].nbytes for name in totals.moved_buffers & buffers.keys()]),
            buffers_down=sum([buffers[name].nbytes for name in server.moved_buffers & buffers.keys()]),
            completed=len(done),
            refused=len(self.faults.refused),
            everyone=len(self.population) if self.algorithm.population_loss and self.members else 0,
            measured=self._measured,
        )
        if server.lora is not None:
            bytes_down += server.lora.send(sorted(totals.traffic.involved), server.x)
        norm = server.close_round(messages, models, self.state, self._cohort, new_buffers, totals.products)
        if server.ledger is not None:
            for index in totals.reports:
                server.ledger.add(index, self.members[index].size, self.members[index].steps)
        reports, causes, failed = self._reports, self.faults.causes, dict[ClientId, str]()
        longest_steps = max([report.steps for report in reports.values()], default=0)
        server.count(list(totals.reports), bytes_up, bytes_down, longest_steps)
        if causes:
            failed = {i: causes[i] for i in sorted(causes, key=self.population.index_of)}
        examples = sum([reports[i].size for i in done])
        return RoundReport(
            round=self._cohort.round,
            cohort=tuple(reports),
            dropped=(*self._dropped, *[i for i in failed if i in self.faults.asked and i not in self._dropped]),
            sizes=MappingProxyType({i: r.size for i, r in reports.items()}),
            steps=MappingProxyType({i: r.steps for i, r in reports.items()}),
            weights=MappingProxyType({**dict.fromkeys(reports, 0.0), **totals.weights(done)}),
            metrics=MappingProxyType(dict(metrics)),
            clients=MappingProxyType(reports),
            loss=sum([reports[i].loss * reports[i].size for i in done]) / examples if examples else math.nan,
            update_norm=norm,
            drift=drift,
            bytes_up=bytes_up,
            bytes_down=bytes_down,
            seconds=seconds,
            failed=MappingProxyType(failed),
            gradients=totals.gradients_computed(),
        )
