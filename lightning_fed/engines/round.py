"""One round: gradients if the method asks for them, the clients' work, their messages, and the account of it all."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.buffers import BufferMean
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import ClientReport, Cohort, RoundReport
from lightning_fed.core.types import ClientId, State, Weighting
from lightning_fed.core.watched import Watched
from lightning_fed.engines.account import Drift, Traffic
from lightning_fed.engines.base import ChunkResult, Engine, RoundInputs
from lightning_fed.engines.plan import WorkPlan
from lightning_fed.engines.ranks import Ranks, deal
from lightning_fed.optim import overrides
from lightning_fed.server.aggregation import Aggregation, accumulation_dtype, weights_of
from lightning_fed.server.population import Population
from lightning_fed.server.server import Server

__all__ = ["Round"]

_BUFFER, _SOLVER = "buffer.", "solver."  # what a client keeps beside the method's own state


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
    ) -> None:
        self.engine, self.server, self.weighting, self.population = engine, server, weighting, population
        self.algorithm: Algorithm = server.algorithm
        self.plans, self.gradient_plans, self.dropped = plans, gradient_plans, tuple(dropped)
        self.ranks = ranks or Ranks()
        self._keeps_state = (
            overrides(self.algorithm, "init_client") or engine.keeps_solver or engine.buffers.mode == "local"
        )
        self._owners = deal([*plans, *gradient_plans], self.ranks.size, self._keeps_state)
        self.mine = [plan for plan in plans if self._is_mine(plan)]
        members = [plan.participant for plan in plans]
        self._aggregation = Aggregation(
            self.algorithm.reduces, weighting, members, len(population), self.algorithm.local_work
        )
        self._rule = self.algorithm.reduces.get("delta", "examples")
        self._cohort = Cohort(len(plans), len(population), server.round)
        self._cohort.advance_solver = engine.optimizer.advance_solver
        self._traffic = Traffic(self.algorithm, server.x)
        self._inputs = self._make_inputs(server.state, {}, {})
        self._reports: dict[ClientId, ClientReport] = {}
        self._buffers = BufferMean()
        self._drift = Drift()

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

    def take_gradients(self) -> None:
        """Take full-batch gradients at the points that the method names, and average those of the gradient cohort."""
        members = [plan.participant for plan in self.gradient_plans]
        weights = {m.index: w for m, w in zip(members, weights_of(self.weighting, members), strict=True)}
        mine = {p.participant.index: p for p in [*self.plans, *self.gradient_plans] if self._is_mine(p)}
        x, full = self.server.x, {}
        total = {name: torch.zeros_like(x, dtype=accumulation_dtype(x.device)) for name in self.algorithm.full_grad_at}

        def take() -> None:
            for index, plan in mine.items():
                full[index] = self.engine.full_gradients(self._inputs, plan)
            for index, weight in weights.items():
                for name in total if index in mine else ():
                    total[name].add_(full[index][name], alpha=weight)

        self.ranks.exchange(take)
        self.ranks.sum(list(total.values()))
        mean = {name: value.to(x.dtype) for name, value in total.items()}
        self._inputs = self._make_inputs(self.server.state, full, mean)
        self._cohort.grad = Watched(mean, self._traffic.gradients)
        self._traffic.gradient_clients = {member.index for member in members}

    @property
    def server_state(self) -> State:
        """The server state in use in this round."""
        return self._inputs.server.unwatched()

    def begin(self, loss: torch.Tensor | None) -> None:
        """Let the method prepare the server state that clients will read, given the cohort's gradients and loss."""
        self._cohort.loss = loss
        state = self.algorithm.begin_round(self.server.x, self.server.state, self._cohort)
        self._inputs = self._make_inputs(state, self._inputs.full_grad, self._inputs.cohort_grad.unwatched())

    def train(self, plans: Sequence[WorkPlan]) -> ChunkResult:
        """Train the clients of a chunk, and take in what they send."""
        buffers = self.engine.buffers
        kept = [self.server.client_state(plan.participant.index) for plan in plans]
        if buffers.mode == "local" and buffers.server:
            (own,) = kept  # the engines that run several clients at once refuse buffers that clients keep
            buffers.write(
                {k.removeprefix(_BUFFER): v for k, v in own.items() if k.startswith(_BUFFER)} or self.server.buffers
            )
        else:
            buffers.write(self.server.buffers)
        solvers = [{k: v for k, v in own.items() if k.startswith(_SOLVER)} for own in kept]
        states = [{k: v for k, v in own.items() if not k.startswith((_BUFFER, _SOLVER))} for own in kept]
        result = self.engine.run(self._inputs, plans, states, solvers)
        for row, (plan, report) in enumerate(zip(plans, result.reports, strict=True)):
            self._reports[report.client_id] = report
            self._traffic.clients.add(plan.participant.index)
            if report.steps or not self.algorithm.local_work:
                self._take_in(result, row, states[row])
        return result

    def _take_in(self, result: ChunkResult, row: int, state: State) -> None:
        who, buffers, report = result.participants[row], self.engine.buffers, result.reports[row]
        send = {name: value[row] for name, value in result.send.items()}
        self._aggregation.add(who.index, report.steps, send, result.y[row] if result.sends_delta else None)
        keep = result.kept_by(row) or state
        if keep and not self._keeps_state and self.ranks.size > 1:
            raise FederatedError(
                f"{type(self.algorithm).__name__}.finish keeps {sorted(keep)} without an init_client that says what a"
                " new client has: several processes would not know where to look for it. Override init_client."
            )
        if result.solver:
            keep = {**keep, **result.solver[row]}
        if buffers.mode == "local" and result.buffers:
            keep = {**keep, **{_BUFFER + name: value for name, value in result.buffers[row].items()}}
        self.server.clients.stage(who.index, keep)
        if buffers.mode != "server" and result.buffers:
            self._buffers.add(result.buffers[row], who.size * who.count)
        self._traffic.take_in(send)
        weight = self._aggregation.weight(who.index, self._rule)
        summed = result.sends_delta and self._rule != "population"  # the aggregation has the sum of the changes
        self._drift.add(report.update_norm, weight, None if summed else result.delta[row])

    def outline(self) -> dict[str, Any]:
        """Return what other processes need of this one's part, apart from the sums of messages."""
        return {
            "reports": self._reports,
            "aggregation": self._aggregation.outline(),
            "buffers": self._buffers,
            "drift": self._drift.outline(),
            "traffic": self._traffic,
        }

    def merge(self, outlines: Sequence[Mapping[str, Any]]) -> None:
        """Put the parts of all processes together.

        Args:
            outlines: Everybody's :meth:`outline`.
        """
        rank, ranks, x = self.ranks.rank, self.ranks, self.server.x
        if ranks.size == 1:
            return
        others = [outline for i, outline in enumerate(outlines) if i != rank]
        reports = {i: report for outline in outlines for i, report in outline["reports"].items()}
        cohort = [plan.participant.client_id for plan in self.plans]
        self._reports = {client_id: reports[client_id] for client_id in cohort if client_id in reports}
        self._aggregation.reduce([outline["aggregation"] for outline in outlines], ranks.sum, x)
        ranks.sum(self._drift.merge([outline["drift"] for outline in outlines], x))
        self._buffers.merge(outline["buffers"] for outline in others)
        self._traffic.merge(outline["traffic"] for outline in others)

    def close(self, metrics: Mapping[str, float], seconds: float) -> RoundReport:
        """Average the messages, take the server's step, and report.

        Args:
            metrics: The cohort's training metrics.
            seconds: The wall time of the round.
        """
        done = [i for i, r in self._reports.items() if r.steps or not self.algorithm.local_work]
        self._cohort.size = len(done)
        drift = self._drift.value(self._aggregation.change(self.server.x)) if done else math.nan
        mean, models = self._aggregation.mean(self.server.x) if done else ({}, None)
        number, inputs = self.server.round, self._inputs
        everyone = len(self.population) if self.algorithm.population_loss and self.plans else 0
        up, down = self._traffic.total(
            inputs.server.unwatched(), self.engine.buffers.bytes, completed=len(done), everyone=everyone
        )
        norm = self.server.close_round(
            mean, models, inputs.server.unwatched(), self._cohort, self._buffers.result(self.server.buffers)
        )
        self.server.count([self.population.index_of(i) for i in self._reports], up, down)
        reports = self._reports
        weights = {
            p.participant.client_id: self._aggregation.weight(p.participant.index, self._rule) for p in self.plans
        }
        total = sum(weights[i] for i in done)
        examples = sum(reports[i].size for i in done)
        return RoundReport(
            round=number,
            cohort=tuple(reports),
            dropped=self.dropped,
            sizes=MappingProxyType({i: r.size for i, r in reports.items()}),
            steps=MappingProxyType({i: r.steps for i, r in reports.items()}),
            weights=MappingProxyType({i: weights[i] / total if i in done else 0.0 for i in reports}),
            metrics=MappingProxyType(dict(metrics)),
            clients=MappingProxyType(reports),
            loss=sum(reports[i].loss * reports[i].size for i in done) / examples if examples else math.nan,
            update_norm=norm,
            drift=drift,
            bytes_up=up,
            bytes_down=down,
            seconds=seconds,
        )
