"""One round: gradients if the method asks for them, the clients' work, their messages, and the account of it all."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.buffers import BufferMean
from lightning_fed.core.rounds import ClientReport, Cohort, RoundReport
from lightning_fed.core.types import ClientId, State, Weighting
from lightning_fed.core.watched import Watched
from lightning_fed.engines.plan import WorkPlan
from lightning_fed.engines.sequential import ClientResult, RoundInputs, SequentialEngine
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
        dropped: Ids drawn but left out, for the report.
    """

    def __init__(
        self,
        engine: SequentialEngine,
        server: Server,
        weighting: Weighting,
        population: Population,
        plans: Sequence[WorkPlan],
        dropped: Sequence[ClientId] = (),
    ) -> None:
        self.engine, self.server, self.weighting, self.population = engine, server, weighting, population
        self.algorithm: Algorithm = server.algorithm
        self.plans, self.dropped = plans, tuple(dropped)
        members = [plan.participant for plan in plans]
        self._aggregation = Aggregation(
            self.algorithm.reduces, weighting, members, len(population), self.algorithm.local_work
        )
        self._rule = self.algorithm.reduces.get("delta", "examples")
        self._cohort = Cohort(len(plans), len(population), server.round)
        self._cohort.advance_solver = engine.optimizer.advance_solver
        self._traffic = _Traffic(self.algorithm, server.x)
        self._inputs = self._make_inputs(server.state, {}, {})
        self._reports: dict[ClientId, ClientReport] = {}
        self._buffers = BufferMean()
        self._drift = _Drift(server.x)

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

    def take_gradients(self, gradient_plans: Sequence[WorkPlan]) -> None:
        """Take full-batch gradients at the points that the method names, and average those of the gradient cohort."""
        points = self.algorithm.full_grad_at
        by_index = {plan.participant.index: plan for plan in [*self.plans, *gradient_plans]}
        full = {index: self.engine.full_gradients(self._inputs, plan) for index, plan in by_index.items()}
        members = [plan.participant for plan in gradient_plans]
        weights = weights_of(self.weighting, members)
        x = self.server.x
        mean = {}
        for name in points:
            total = torch.zeros_like(x, dtype=accumulation_dtype(x.device))
            for member, weight in zip(members, weights, strict=True):
                total.add_(full[member.index][name], alpha=weight)
            mean[name] = total.to(x.dtype)
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

    def train(self, plan: WorkPlan) -> ClientReport:
        """Train one client, and take in what it sends."""
        who, buffers = plan.participant, self.engine.buffers
        kept = self.server.client_state(who.index)
        own = {k.removeprefix(_BUFFER): v for k, v in kept.items() if k.startswith(_BUFFER)}
        solver = {k: v for k, v in kept.items() if k.startswith(_SOLVER)}
        state = {k: v for k, v in kept.items() if not k.startswith((_BUFFER, _SOLVER))}
        buffers.write(own or self.server.buffers)
        result = self.engine.run(self._inputs, plan, state, solver)
        self._reports[who.client_id] = result.report
        self._traffic.clients.add(who.index)
        if result.report.steps or not self.algorithm.local_work:
            self._take_in(result, state)
        return result.report

    def _take_in(self, result: ClientResult, state: State) -> None:
        who, buffers = result.participant, self.engine.buffers
        self._aggregation.add(who.index, result.report.steps, result.update.send, result.delta, result.y)
        keep = {**(result.update.keep or state), **result.solver}
        if buffers.mode == "local":
            keep = {**keep, **{_BUFFER + name: value for name, value in result.buffers.items()}}
        self.server.clients.stage(who.index, keep)
        if buffers.mode != "server":
            self._buffers.add(result.buffers, who.size * who.count)
        self._traffic.take_in(result.update.send)
        self._drift.add(result.delta, result.report.update_norm, self._aggregation.weight(who.index, self._rule))

    def close(self, metrics: Mapping[str, float], seconds: float) -> RoundReport:
        """Average the messages, take the server's step, and report.

        Args:
            metrics: The cohort's training metrics.
            seconds: The wall time of the round.
        """
        done = [i for i, r in self._reports.items() if r.steps or not self.algorithm.local_work]
        self._cohort.size = len(done)
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
            drift=self._drift.value() if done else math.nan,
            bytes_up=up,
            bytes_down=down,
            seconds=seconds,
        )


class _Traffic:
    """What travels in a round: of the server's state what clients read, of gradients and messages what is used."""

    def __init__(self, algorithm: Algorithm, x: torch.Tensor) -> None:
        self._vector = _bytes([x])
        self._points = set(algorithm.full_grad_at) - {"x"}
        self._messages = 0
        self.server: set[str] = set()  # entries of the server state that clients read
        self.cohort_grad: set[str] = set()  # mean gradients that clients read
        self.gradients: set[str] = set()  # mean gradients that the server reads
        self.clients: set[int] = set()
        self.gradient_clients: set[int] = set()

    def take_in(self, send: State) -> None:
        """Add one client's messages; a tensor sent under two names travels once."""
        self._messages += _bytes(list({id(value): value for value in send.values()}.values()))

    def total(self, state: State, buffers: int, completed: int, everyone: int) -> tuple[int, int]:
        """Return the bytes up and down.

        Args:
            state: The server state of the round.
            buffers: The bytes of one transfer of the module's buffers.
            completed: The clients that sent something back.
            everyone: The clients that evaluate the population's loss; none if nobody asked for it.
        """
        involved = self.clients | self.gradient_clients
        once = self._vector + _bytes([state[name] for name in self._points if name in state])
        then = _bytes([state[name] for name in self.server - self._points]) + len(self.cohort_grad) * self._vector
        down = len(involved) * once + len(self.clients) * (then + buffers)
        down += max(0, everyone - len(involved)) * self._vector
        gradients = len(self.gradient_clients) * len(self.gradients | self.cohort_grad) * self._vector
        return self._messages + gradients + completed * buffers + everyone * 8, down


class _Drift:
    """The spread of client changes around their weighted mean, from their norms and one running sum."""

    def __init__(self, x: torch.Tensor) -> None:
        self._sum = torch.zeros_like(x)
        self._squares = 0.0
        self._weight = 0.0

    def add(self, delta: torch.Tensor, norm: float, weight: float) -> None:
        """Add one client's change."""
        self._sum.add_(delta, alpha=weight)
        self._squares += weight * norm**2
        self._weight += weight

    def value(self) -> float:
        """The square root of the weighted mean of the squared distances from the mean."""
        if self._weight == 0:
            return math.nan
        mean_norm = float(torch.linalg.vector_norm(self._sum)) / self._weight
        return math.sqrt(max(0.0, self._squares / self._weight - mean_norm**2))


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(value.numel() * value.element_size() for value in tensors)
