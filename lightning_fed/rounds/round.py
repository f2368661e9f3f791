"""One round: gradients if the method asks for them, the clients' work, their messages, and the account of it all."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.rounds import ClientReport, Cohort, RoundReport
from lightning_fed.core.types import ClientId, State, Weighting
from lightning_fed.core.watched import Watched
from lightning_fed.engines.base import ChunkResult, Engine, RoundInputs, WorkPlan
from lightning_fed.optim import overrides
from lightning_fed.rounds.assignment import deal
from lightning_fed.rounds.attempts import run_sound
from lightning_fed.rounds.collect import Intake
from lightning_fed.rounds.faults import Faults
from lightning_fed.rounds.report import Traffic, gradients_computed
from lightning_fed.rounds.travelling_states import Guests
from lightning_fed.server.aggregation import Aggregation
from lightning_fed.server.aggregator import FULL_GRAD, Aggregator
from lightning_fed.server.compression import Compressor
from lightning_fed.server.population import Population
from lightning_fed.server.server import Server
from lightning_fed.strategies.processes import Ranks, Sent

__all__ = ["Round"]

_KEPT_BYTES = 2**30  # of full-batch gradients that are kept from their average to the clients' work
_MOVED_BYTES = 2**27  # of client states of one vector that may be elsewhere than they are kept, all held for the round


class Round:
    """The work of one round, from the cohort to the server's step.

    Args:
        engine: Runs the clients.
        server: The server's side; changed by :meth:`close` alone.
        weighting: The run's weighting.
        population: The clients there are.
        plans: The cohort's work.
        gradient_plans: The work of those whose full-batch gradients are averaged, if the method asks for them.
        dropped: Ids drawn but left out, for the report.
        ranks: The processes that share the work.
        aggregator: What puts messages together; None for their weighted means.
        faults: The clients that have failed in this round, which are left out.
        compressor: What makes messages small, if anything does.
    """

    def __init__(
        self,
        engine: Engine,
        server: Server,
        weighting: Weighting,
        population: Population,
        plans: Sequence[WorkPlan],
        gradient_plans: Sequence[WorkPlan] = (),
        dropped: Sequence[ClientId] = (),
        ranks: Ranks | None = None,
        aggregator: Aggregator | None = None,
        faults: Faults | None = None,
        compressor: Compressor | None = None,
    ) -> None:
        self.engine, self.server, self.weighting, self.population = engine, server, weighting, population
        self.algorithm: Algorithm = server.algorithm
        self.faults = faults or Faults()
        self._cohort_asked = {plan.participant.client_id for plan in plans}
        self._gradients_asked = {plan.participant.client_id for plan in gradient_plans}
        if self.faults.causes:
            plans, gradient_plans = self._without_failed(plans), self._without_failed(gradient_plans)
            self._cohort_asked |= self.faults.causes.keys() & set(dropped)
            self._gradients_asked |= self.faults.causes.keys() - self._cohort_asked if gradient_plans else set()
        self.plans, self.gradient_plans, self.dropped = plans, gradient_plans, tuple(dropped)
        self.ranks = ranks or Ranks()
        keeps_state = (
            overrides(self.algorithm, "init_client")
            or engine.keeps_solver
            or engine.buffers.mode == "local"
            or (compressor is not None and compressor.error_feedback)
        )
        numel = server.x.numel()
        most_moves = max(1, _MOVED_BYTES // (numel * server.x.element_size()))
        self._owners = deal([*plans, *gradient_plans], self.ranks, keeps_state, most_moves, numel)
        members = [plan.participant for plan in plans]
        moves = {p.index: self._owners[p.index] for p in members if keeps_state}
        moves = {index: rank for index, rank in moves.items() if rank != self.ranks.home_of(index)}
        self._guests = Guests(server, self.ranks, moves)
        self.mine = [plan for plan in plans if self._is_mine(plan)]
        self._aggregation_of = Aggregation if aggregator is None else aggregator.of_round
        aggregation = self._aggregation_of(
            self.algorithm.reduces, weighting, members, len(population), self.algorithm.local_work
        )
        self._cohort = Cohort(len(plans), len(population), server.round)
        self._cohort.advance_solver = engine.optimizer.advance_solver
        self._traffic = Traffic(self.algorithm, server.x)
        self._traffic.clients = {population.index_of(i) for i in self.faults.causes.keys() & self._cohort_asked}
        self._intake = Intake(
            server, self.ranks, aggregation, self._guests, self._traffic, engine.buffers, compressor, keeps_state
        )
        self._inputs = self._make_inputs(server.state, {}, {})
        self._at_work: tuple[Sequence[int], Sequence[State]] = ([], [])  # stored indices, and states before the work
        self._reports: dict[ClientId, ClientReport] = {}
        self._is_spoiled = False
        self._gradient_norms: dict[str, dict[ClientId, float]] = {}  # by point, of gradients that are not averaged

    def _without_failed(self, plans: Sequence[WorkPlan]) -> Sequence[WorkPlan]:
        return [plan for plan in plans if plan.participant.client_id not in self.faults.causes]

    def _is_mine(self, plan: WorkPlan) -> bool:
        return self._owners[plan.participant.index] == self.ranks.rank

    def _make_inputs(self, state: State, full_grad: dict[int, State], cohort_grad: State) -> RoundInputs:
        """Collect what clients may read; what they do read is noted."""
        known = self.population.sizes_are_known or self.algorithm.uses_mean_examples
        return RoundInputs(
            round=self.server.round,
            x=self.server.x,
            server=Watched(state, self._traffic.server),
            full_grad=full_grad,
            cohort_grad=Watched(cohort_grad, self._traffic.cohort_grad),
            mean_examples=self.population.mean_size if known else math.nan,
        )

    def take_gradients(self) -> bool:
        """Take full-batch gradients at the points that the method names, and average those of the gradient cohort.

        Returns:
            Whether all clients came back; if not, there is no average, and the round is to be run without them.
        """
        members = {plan.participant.index: plan.participant for plan in self.gradient_plans}
        keeps = self._keeps_gradients
        plans = [*self.gradient_plans, *(self.plans if keeps else ())]
        mine = {p.participant.index: p for p in plans if self._is_mine(p)}
        x, full, points = self.server.x, {}, self.algorithm.full_grad_at
        norms: dict[str, dict[ClientId, float]] = {point: {} for point in points}
        reduces = {FULL_GRAD + point: "weighting" for point in points}
        means = self._aggregation_of(reduces, self.weighting, list(members.values()), len(self.population), False)

        def take() -> dict[str, Any]:
            for plan, found in self.engine.each_full_gradients(self._inputs, list(mine.values())):
                index = plan.participant.index
                try:
                    if isinstance(found, ClientError):
                        raise found
                    for point, norm in norms.items():
                        norm[plan.participant.client_id] = self._norm_of(found[point], plan, point)
                    if index in members:
                        send = {FULL_GRAD + point: gradient for point, gradient in found.items()}
                        means.add(index, members[index].steps, send)
                except ClientError as error:
                    self.faults.add(error)
                else:
                    full.update({index: found} if keeps else {})
            return {**means.outline(), "failed": self.faults.causes, "norms": norms}

        outlines = self.ranks.exchange(take)
        for point in points:
            everybodys = {i: norm for outline in outlines for i, norm in outline["norms"][point].items()}
            self.faults.add_outliers(everybodys, f"a full-batch gradient at {point}", x)
        if self.has_lost_any([outline["failed"] for outline in outlines]):
            return False
        if self.ranks.size > 1:
            means.reduce(outlines, self.ranks, x)
        found, _ = means.mean(x)
        mean = {point: found[FULL_GRAD + point] for point in points}
        self._inputs = self._make_inputs(self.server.state, full, mean)
        self._cohort.grad = Watched(mean, self._traffic.gradients)
        self._traffic.gradient_clients = set(members)
        return True

    @property
    def _keeps_gradients(self) -> bool:
        """Whether every client's own full-batch gradients are kept from their average to its local work.

        Beyond a gigabyte they are taken anew then, which takes as long again but keeps memory within bounds.
        """
        points, x = len(self.algorithm.full_grad_at), self.server.x
        size = len(self.plans) * points * x.numel() * x.element_size()
        return self.algorithm.full_grad_for == "both" and size <= _KEPT_BYTES

    def _own_gradients(self, plans: Sequence[WorkPlan]) -> dict[int, State]:
        """Return the full-batch gradients of clients about to work, where these are theirs to read.

        Raises:
            ClientError: If a client has none.
        """
        kept = self._inputs.full_grad
        if self.algorithm.full_grad_for == "cohort":
            return {}
        missing = [plan for plan in plans if plan.participant.index not in kept]
        found = {}
        for plan, gradients in self.engine.each_full_gradients(self._inputs, missing):
            if isinstance(gradients, ClientError):
                raise gradients
            found[plan.participant.index] = gradients
            for point, gradient in gradients.items():
                norms = self._gradient_norms.setdefault(point, {})
                norms[plan.participant.client_id] = self._norm_of(gradient, plan, point)
        return {**{i: kept[i] for i in (p.participant.index for p in plans) if i in kept}, **found}

    def _norm_of(self, gradient: torch.Tensor, plan: WorkPlan, point: str) -> float:
        norm = float(torch.linalg.vector_norm(gradient))
        if not math.isfinite(norm):
            raise ClientError(
                f"Client {plan.participant.client_id!r} came back from round {self.server.round} with a full-batch"
                f" gradient at {point} that is not finite. Lower the learning rate, or look at its data.",
                plan.participant.client_id,
            )
        return norm

    def has_lost_any(self, failed: Sequence[Mapping[ClientId, str]]) -> bool:
        """Return whether a client failed that was to work in this round, in whichever process.

        Args:
            failed: The causes by client id, of every process.

        Raises:
            ClientError: If too many did.
        """
        self.faults.merge(failed)
        if not self.faults.causes:
            return False
        for asked in (self._cohort_asked, self._gradients_asked):
            self.faults.check(self.faults.causes.keys() & asked, len(asked))
        return any(plan.participant.client_id in self.faults.causes for plan in [*self.plans, *self.gradient_plans])

    def is_spoiled(self) -> bool:
        """Return whether other clients' work, or the sum of messages, rests on a client that failed; after a merge.

        Raises:
            ClientError: If too many clients failed, or one whose update is out of all proportion is not to be dropped.
        """
        if self._is_spoiled or any(plan.participant.client_id in self.faults.causes for plan in self.gradient_plans):
            return True
        norms = {"an update": {i: report.update_norm for i, report in self._reports.items() if report.steps}}
        for point, of_clients in self._gradient_norms.items():
            known = {i: of_clients[i] for i in self._reports if i in of_clients}
            norms[f"a full-batch gradient at {point}"] = known
        outliers = {i for what, known in norms.items() for i in self.faults.add_outliers(known, what, self.server.x)}
        self.faults.refused |= outliers
        self.has_lost_any([])
        return bool(outliers)

    @property
    def server_state(self) -> State:
        """The server state in use in this round."""
        return self._inputs.server.unwatched()

    def begin(self, loss: torch.Tensor | None) -> None:
        """Let the method prepare the server state that clients will read, given the cohort's gradients and loss."""
        self._cohort.loss = loss
        state = self.algorithm.begin_round(self.server.x, self.server.state, self._cohort)
        self._inputs = self._make_inputs(state, self._inputs.full_grad, self._inputs.cohort_grad.unwatched())

    def send_guests(self) -> None:
        """Send what clients keep to the processes that train them, where these are others than keep it."""
        self._guests.send()

    def guests_last(self, chunks: Iterable[Sequence[WorkPlan]]) -> list[Sequence[WorkPlan]]:
        """Return chunks of clients in the order in which they are trained: nobody waits for what is still to arrive."""
        return sorted(chunks, key=lambda plans: any(p.participant.index in self._guests.moves for p in plans))

    def train(self, plans: Sequence[WorkPlan]) -> ChunkResult | None:
        """Train the clients of a chunk, and take in what they send; return None if all of them failed.

        Raises:
            ClientError: If a client fails and is not to be dropped, or something fails that is no client's own fault.
        """
        indices = [plan.participant.index for plan in plans]
        self._traffic.clients.update(indices)
        self._guests.receive(indices)
        result = run_sound(self._run, plans, self.engine, self.faults)
        if result is None:
            return None
        for error in result.faults.values():
            self.faults.add(error)
        sound = [row for row in result.asked if row not in result.faults]
        sending = [row for row in sound if result.reports[row].steps or not self.algorithm.local_work]
        several = len(sending) > 1 and self._intake.takes_several
        keep = [] if several and result.keeps_states_only else self._kept_by(result)
        if several:
            self._intake.take_several(result, sorted(sending), keep)
            sending = []
        to_take_in = set(sending)
        for row in sound:
            try:
                if row in to_take_in:
                    self._intake.take(result, row, keep[row])
            except ClientError as error:
                self.faults.add(error)
                self._is_spoiled = True  # what it logged is among what others did
            else:
                self._reports[result.reports[row].client_id] = result.reports[row]
        return result

    def _kept_by(self, result: ChunkResult) -> list[State]:
        """Return what each client keeps: copies of what it had, which new ones share, where that is nothing new."""
        if result.keep:
            return result.kept()
        had = dict(zip(*self._at_work, strict=True))
        return [{name: value.clone() for name, value in had[who.index].items()} for who in result.participants]

    def _run(self, plans: Sequence[WorkPlan]) -> ChunkResult:
        """Hand out what the clients of a chunk keep, and train them."""
        buffers, indices = self.engine.buffers, [plan.participant.index for plan in plans]
        has_more = buffers.mode == "local" or self.engine.keeps_solver
        together = None if has_more else self._guests.stacked(indices)
        kept = self._guests.parts_of(indices) if together is None else []
        own = kept[0].buffers if buffers.mode == "local" else {}  # engines that run several at once refuse the mode
        buffers.write(own or self.server.buffers)
        solvers = [parts.solver for parts in kept] if self.engine.keeps_solver else [{}] * len(plans)
        states = [parts.own for parts in kept] if together is None else together
        self._at_work = indices, states
        inputs = self._inputs
        if self.algorithm.full_grad_at:
            inputs = replace(inputs, full_grad=self._own_gradients(plans))
        return self.engine.run(inputs, plans, states, solvers)

    def outline(self) -> tuple[dict[str, Any], Sent]:
        """Return what other processes need of this one's part, apart from the sums of messages.

        Returns:
            What all of them need, and as bytes what the clients keep whose state is kept by each.
        """
        outline, sent = self._intake.outline()
        own = {
            "reports": self._reports,
            "failed": self.faults.causes,
            "is_spoiled": self._is_spoiled,
            "gradient_norms": self._gradient_norms,
        }
        return {**outline, **own}, sent

    def merge(self, outlines: Sequence[Mapping[str, Any]], received: Sequence[torch.Tensor]) -> None:
        """Put the parts of all processes together.

        Args:
            outlines: What everybody's :meth:`outline` says.
            received: The bytes that came with it.
        """
        self._intake.settle()
        if self.ranks.size == 1:
            self._reports = self._in_cohort_order(self._reports)
            self.has_lost_any([])
            return
        self._intake.merge(outlines, received, self.server.x)
        others = [outline for i, outline in enumerate(outlines) if i != self.ranks.rank]
        self._reports = self._in_cohort_order({i: r for outline in outlines for i, r in outline["reports"].items()})
        self._is_spoiled = any(outline["is_spoiled"] for outline in outlines)
        for outline in others:
            for point, norms in outline["gradient_norms"].items():
                self._gradient_norms.setdefault(point, {}).update(norms)
        self.has_lost_any([outline["failed"] for outline in others])

    def _in_cohort_order(self, reports: Mapping[ClientId, ClientReport]) -> dict[ClientId, ClientReport]:
        """Return reports in the order in which clients were drawn; engines may train them in another one."""
        cohort = (plan.participant.client_id for plan in self.plans)
        return {client_id: reports[client_id] for client_id in cohort if client_id in reports}

    def close(self, metrics: Mapping[str, float], seconds: float) -> RoundReport:
        """Average the messages, take the server's step, and report.

        Args:
            metrics: The cohort's training metrics.
            seconds: The wall time of the round.
        """
        intake, aggregation = self._intake, self._intake.aggregation
        done = [i for i, r in self._reports.items() if r.steps or not self.algorithm.local_work]
        self._cohort.size = len(done)
        is_step = bool(done) or not aggregation.needs_clients
        mean, models = aggregation.mean(self.server.x) if is_step else ({}, None)
        number, inputs = self.server.round, self._inputs
        for name, value in mean.items():
            if not (math.isfinite(float(value.sum())) or bool(torch.isfinite(value).all())):  # the sum is soon had
                raise FederatedError(
                    f"The mean of the clients' message {name!r} is not finite in round {number}, though every update"
                    f" is. Look at {type(self.algorithm).__name__}.finish, or lower the learning rate."
                )
        everyone = len(self.population) if self.algorithm.population_loss and self.plans else 0
        up, down = self._traffic.total(
            inputs.server.unwatched(),
            self.engine.buffers.bytes,
            completed=len(done),
            refused=len(self.faults.refused),
            everyone=everyone,
        )
        norm = self.server.close_round(
            mean, models, inputs.server.unwatched(), self._cohort, intake.mean_buffers.result(self.server.buffers)
        )
        self.server.count([self.population.index_of(i) for i in self._reports], up, down)
        reports = self._reports
        failed = {i: self.faults.causes[i] for i in sorted(self.faults.causes, key=self.population.index_of)}
        weights = {p.participant.client_id: aggregation.weight(p.participant.index, intake.rule) for p in self.plans}
        total = sum(weights[i] for i in done)
        examples = sum(reports[i].size for i in done)
        return RoundReport(
            round=number,
            cohort=tuple(reports),
            dropped=(*self.dropped, *(i for i in failed if i in self._cohort_asked and i not in self.dropped)),
            sizes=MappingProxyType({i: r.size for i, r in reports.items()}),
            steps=MappingProxyType({i: r.steps for i, r in reports.items()}),
            weights=MappingProxyType({i: weights[i] / total if i in done else 0.0 for i in reports}),
            metrics=MappingProxyType(dict(metrics)),
            clients=MappingProxyType(reports),
            loss=sum(reports[i].loss * reports[i].size for i in done) / examples if examples else math.nan,
            update_norm=norm,
            drift=intake.drift.value() if done else math.nan,
            bytes_up=up,
            bytes_down=down,
            seconds=seconds,
            failed=MappingProxyType(failed),
            gradients=gradients_computed(
                self.algorithm, [p for p in self.plans if p.participant.client_id in reports], self.gradient_plans
            ),
        )
