"""The server's half of a round: what is asked of whom, what is made of the replies, and the server's step."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.rounds import Cohort, RoundReport
from lightning_fed.core.types import ClientId, State
from lightning_fed.core.watched import Watched
from lightning_fed.rounds.cohort import DrawnCohort, Faults
from lightning_fed.rounds.collect import CollectedGradients, CollectedMessages
from lightning_fed.rounds.messages import GRADIENTS, LOSS, TRAIN, Reply, ReplyOrder, Task
from lightning_fed.rounds.report import Traffic
from lightning_fed.server.aggregation.base import FULL_GRAD
from lightning_fed.server.aggregation.mean import Aggregation, Alone, Exchange
from lightning_fed.server.participation import Population
from lightning_fed.server.server import Server
from lightning_fed.settings.settings import Settings

__all__ = ["ServerRound"]


class ServerRound:
    """Asks clients for what a round needs, puts their replies together, and takes the server's step.

    It knows no module, no data and no engine. A round is::

        for task in server_round.phases():
            for reply in whoever_answers(task):  # in any order
                server_round.receive(reply)
            if not server_round.close_phase():
                ...  # begin again with another ServerRound: it leaves out the clients that have failed
        report = server_round.close(metrics, seconds)

    Args:
        server: The server's side of the run; changed by :meth:`close` alone.
        settings: How rounds are run.
        population: The clients there are.
        cohort: Who takes part.
        faults: The clients that have failed in this round so far, which are left out.

    Raises:
        ClientError: If too many have failed.
    """

    def __init__(
        self, server: Server, settings: Settings, population: Population, cohort: DrawnCohort, faults: Faults
    ) -> None:
        self.server, self.settings, self.population = server, settings, population
        self.algorithm, self.faults, self._dropped = server.algorithm, faults, tuple(cohort.dropped)
        algorithm, weighting, size = server.algorithm, settings.weighting, len(population)
        averages = bool(cohort.members and algorithm.full_grad_at and algorithm.full_grad_for != "client")
        gradient_members = cohort.gradient_members if averages else ()
        faults.ask(cohort.members, gradient_members, cohort.dropped)
        self.members = {p.index: p for p in cohort.members if p.client_id not in faults.causes}
        self.gradient_members = {p.index: p for p in gradient_members if p.client_id not in faults.causes}
        self.state, self.cohort_grad = server.state, State()
        self._cohort = Cohort(len(self.members), size, server.round, advance_solver=server.advance_solver)
        self._traffic = Traffic(algorithm, server.x)
        self._traffic.clients = set(map(population.index_of, faults.causes.keys() & faults.asked))
        make = Aggregation if settings.aggregator is None else settings.aggregator.of_round
        sums = make(algorithm.reduces, weighting, list(self.members.values()), size, algorithm.local_work)
        buffers = State() if settings.buffers == "server" else server.buffers
        self._messages = CollectedMessages(algorithm, sums, self._traffic, self.members, buffers)
        self._gradients: CollectedGradients | None = None
        if averages:
            reduces = {FULL_GRAD + point: "weighting" for point in algorithm.full_grad_at}
            means = make(reduces, weighting, list(self.gradient_members.values()), size, False)
            self._gradients = CollectedGradients(means, self.gradient_members)
        self._loss: tuple[float, int] = (0.0, 0)  # the population's, and of how many examples
        self._norms: dict[str, dict[ClientId, float]] = {}  # of full-batch gradients in this phase, by point
        self._task: Task | None = None
        self._order = ReplyOrder(())

    # ------------------------------------------------------------------ what is asked

    def phases(self) -> Iterator[Task]:
        """Yield what is asked of clients, one phase after the other; each is to be closed before the next."""
        if self.members or self.settings.is_private:  # noise is added also where nobody takes part
            if self._gradients is not None:
                yield self._ask(GRADIENTS, self.gradient_members)
            if self.algorithm.population_loss:
                yield self._ask(LOSS, map(self.population.index_of, self.population))
            self.state = self.algorithm.begin_round(self.server.x, self.server.state, self._cohort)
        self._traffic.clients.update(self.members)
        yield self._ask(TRAIN, self.members)

    def _ask(self, phase: str, clients: Iterable[int]) -> Task:
        server, population = self.server, self.population
        knows = population.sizes_are_known or self.algorithm.uses_mean_examples
        self._task = Task(
            round=server.round,
            phase=phase,
            clients=tuple(clients),
            steps={i: p.steps for i, p in (*self.gradient_members.items(), *self.members.items())},
            x=server.x,
            server=self.state,
            cohort_grad=self.cohort_grad,
            buffers=server.buffers,
            mean_examples=population.mean_size if knows else math.nan,
        )
        self._norms = {}
        self.expect(self._task.clients)
        return self._task

    def expect(self, clients: Iterable[int]) -> None:
        """Say who answers here, by stored index, in the order in which replies are summed; by default those asked."""
        self._order = ReplyOrder(clients)

    # ------------------------------------------------------------------ what comes back

    def receive(self, reply: Reply) -> list[ClientId]:
        """Take in a reply of the phase at hand, in whatever order replies come.

        What comes early waits. A second copy of a reply, and one that comes too late, are ignored.

        Returns:
            The clients whose answers count by now and did not before.

        Raises:
            FederatedError: If it is of clients that were not asked, or its messages are not those of the method.
            ClientError: If a client failed and is not to be dropped.
        """
        task = self._task
        if task is None or (reply.round, reply.phase) != (task.round, task.phase):
            now = "the round is over" if task is None else f"it is at {task.phase!r} of round {task.round}"
            warnings.warn(
                f"A reply to {reply.phase!r} of round {reply.round} comes too late: {now}. It is ignored.", stacklevel=2
            )
            return []
        return [client_id for ready in self._order.arrive(reply) for client_id in self._take_in(ready)]

    def _take_in(self, reply: Reply) -> list[ClientId]:
        """Add a reply whose turn it is; return the clients whose answers count."""
        self._traffic.server |= reply.server_read
        self._traffic.cohort_grad |= reply.cohort_grad_read
        for error in reply.failed.values():
            self.faults.add(error)
        rows = self._order.rows(reply)
        for point, norms in reply.norms.items():
            sound = {self.server.ids[index]: norm for index, norm in norms.items() if index not in reply.failed}
            self._norms.setdefault(point, {}).update(sound)
        if reply.phase == TRAIN:
            return self._messages.add_reply(reply, rows, self.faults.add, self.state)
        if reply.phase == LOSS:
            total, examples = self._loss
            self._loss = total + reply.loss, examples + reply.loss_examples
            return [self.server.ids[reply.clients[row]] for row in rows]
        assert self._gradients is not None
        return self._gradients.add_reply(reply, rows, self.faults.add)

    def missing(self) -> list[ClientId]:
        """Return the clients that are asked in this phase and have not answered, in the cohort's order."""
        return list(map(self.server.ids.__getitem__, self._order.missing()))

    # ------------------------------------------------------------------ the end of a phase

    def outline(self) -> dict[str, Any]:
        """Return what other processes need of this one's part in the phase, apart from sums of vectors.

        Clients that do not answer leave the round, and the replies that waited for theirs are taken in.

        Raises:
            ClientError: If a client has not answered and is not to be dropped.
        """
        assert self._task is not None
        for client_id in self.missing():
            what = f"to {self._task.phase!r} of round {self._task.round}"
            self.faults.add(ClientError(f"Client {client_id!r} has sent no reply {what}.", client_id))
        for reply in self._order.rest():
            self._take_in(reply)
        collected = {GRADIENTS: self._gradients, TRAIN: self._messages}.get(self._task.phase)
        own = {"loss": self._loss} if collected is None else collected.outline()
        return {**own, "failed": self.faults.causes, "norms": self._norms}

    def close_phase(self, outlines: Sequence[Mapping[str, Any]] = (), ranks: Exchange | None = None) -> bool:
        """Put together what has come, of all processes.

        Args:
            outlines: Everybody's :meth:`outline`; none of a server alone.
            ranks: The processes.

        Returns:
            Whether all is well. If not, others rest on a client that failed, and the round is to begin again.

        Raises:
            ClientError: If too many clients failed, or if one did or has not answered, and is not to be dropped.
        """
        outlines, ranks = outlines or [self.outline()], ranks or Alone()
        self.faults.merge(outline["failed"] for outline in outlines)
        self._norms = {
            point: {i: n for outline in outlines for i, n in outline["norms"].get(point, {}).items()}
            for point in self.algorithm.full_grad_at
        }
        assert self._task is not None
        phase, self._task = self._task.phase, None
        if phase == TRAIN:
            return self._close_training(outlines, ranks)
        if phase == LOSS:
            self.faults.check(self.population)
        else:
            for point, norms in self._norms.items():
                self.faults.add_outliers(norms, f"a full-batch gradient at {point}", self.server.x)
        self.faults.check_asked()
        if self.faults.have_hit([*self.members.values(), *self.gradient_members.values()]):
            return False
        if phase == LOSS:
            totals, examples = zip(*(outline["loss"] for outline in outlines), strict=True)
            x = self.server.x
            self._cohort.loss = torch.tensor(sum(totals) / sum(examples), device=x.device, dtype=x.dtype)
        elif self._gradients is not None:
            self.cohort_grad = self._gradients.mean(outlines, ranks, self.server.x)
            self._cohort.grad = Watched(self.cohort_grad, self._traffic.gradients)
            self._traffic.gradient_clients = set(self.gradient_members)
        return True

    def _close_training(self, outlines: Sequence[Mapping[str, Any]], ranks: Exchange) -> bool:
        """Close the last phase; an update, or a gradient, that is out of all proportion has been added by then."""
        faults, messages, x = self.faults, self._messages, self.server.x
        messages.merge(outlines, ranks, x)
        faults.check_asked()
        if messages.is_spoiled or faults.have_hit(self.gradient_members.values()):
            return False
        reports = messages.reports
        outliers = faults.add_outliers({i: r.update_norm for i, r in reports.items() if r.steps}, "an update", x)
        for point, norms in self._norms.items():
            measured = {i: norms[i] for i in reports if i in norms}
            outliers |= faults.add_outliers(measured, f"a full-batch gradient at {point}", x)
        faults.refused |= outliers
        faults.check_asked()
        return not outliers

    # ------------------------------------------------------------------ the server's step

    def close(self, metrics: Mapping[str, float], seconds: float) -> RoundReport:
        """Average the messages, take the server's step, and report.

        Args:
            metrics: The cohort's training metrics.
            seconds: The wall time of the round.
        """
        messages = self._messages
        self._cohort.size = len(messages.done)
        is_step = bool(messages.done) or not messages.aggregation.needs_clients
        mean, models = messages.aggregation.mean(self.server.x) if is_step else ({}, None)
        for name, value in mean.items():
            if not (math.isfinite(float(value.sum())) or bool(torch.isfinite(value).all())):  # the sum is soon had
                raise FederatedError(
                    f"The mean of the clients' message {name!r} is not finite in round {self._cohort.round}, though"
                    f" every update is. Look at {type(self.algorithm).__name__}.finish, or lower the learning rate."
                )
        buffers = self.server.buffers if self.settings.buffers == "average" else State()  # those that travel
        travelled = self._traffic.total(
            self.state,
            buffers_up=sum(buffers[name].nbytes for name in messages.moved_buffers & buffers.keys()),
            buffers_down=sum(buffers[name].nbytes for name in self.server.moved_buffers & buffers.keys()),
            completed=len(messages.done),
            refused=len(self.faults.refused),
            everyone=len(self.population) if self.algorithm.population_loss and self.members else 0,
        )
        buffers = messages.merged_buffers() or self.server.buffers
        norm = self.server.close_round(mean, models, self.state, self._cohort, buffers)
        self.server.count(list(map(self.population.index_of, messages.reports)), *travelled)
        return self._report(metrics, norm, travelled, seconds)

    def _report(
        self, metrics: Mapping[str, float], norm: float, travelled: tuple[int, int], seconds: float
    ) -> RoundReport:
        messages, causes, (up, down) = self._messages, self.faults.causes, travelled
        reports, done = messages.reports, messages.done
        weights = {p.client_id: messages.aggregation.weight(p.index, messages.rule) for p in self.members.values()}
        total, examples = sum(weights[i] for i in done), sum(reports[i].size for i in done)
        failed = {i: causes[i] for i in sorted(causes, key=self.population.index_of)}
        return RoundReport(
            round=self._cohort.round,
            cohort=tuple(reports),
            dropped=(*self._dropped, *(i for i in failed if i in self.faults.asked and i not in self._dropped)),
            sizes=MappingProxyType({i: r.size for i, r in reports.items()}),
            steps=MappingProxyType({i: r.steps for i, r in reports.items()}),
            weights=MappingProxyType({i: weights[i] / total if i in done else 0.0 for i in reports}),
            metrics=MappingProxyType(dict(metrics)),
            clients=MappingProxyType(reports),
            loss=sum(reports[i].loss * reports[i].size for i in done) / examples if examples else math.nan,
            update_norm=norm,
            drift=messages.drift.value() if done else math.nan,
            bytes_up=up,
            bytes_down=down,
            seconds=seconds,
            failed=MappingProxyType(failed),
            gradients=messages.gradients_computed(self.gradient_members),
        )
