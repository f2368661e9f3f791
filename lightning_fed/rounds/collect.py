"""What the server sums up of replies, phase by phase: full-batch gradients, losses, and what local work sends."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.buffers import BufferMean
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.rounds import ClientReport, RoundReport
from lightning_fed.core.types import ClientId, State, Vector
from lightning_fed.optim import looks_ahead
from lightning_fed.rounds.messages import Reply
from lightning_fed.rounds.report import Drift, Traffic
from lightning_fed.server.aggregation import Aggregation, Exchange, Participant
from lightning_fed.server.aggregator import FULL_GRAD

__all__ = ["CollectedGradients", "CollectedLoss", "CollectedMessages"]

Failed: TypeAlias = Callable[[ClientError], None]
"""Takes note of a client that failed, or raises its error."""


class CollectedGradients:
    """The mean of full-batch gradients.

    Args:
        means: Puts gradients together.
        members: Those whose gradients are averaged, by stored index; others tell their norms alone.
    """

    def __init__(self, means: Aggregation, members: Mapping[int, Participant]) -> None:
        self.means, self.members = means, members

    def add_reply(self, reply: Reply, rows: Sequence[int], failed: Failed) -> list[ClientId]:
        """Add clients' gradients; see :meth:`CollectedMessages.add_reply`."""
        members = {row: self.members[reply.clients[row]] for row in rows if reply.clients[row] in self.members}
        if len(members) > 1 and type(self.means).add is Aggregation.add:
            order = list(members)
            send = {FULL_GRAD + point: gradients[order] for point, gradients in reply.send.items()}
            self.means.add_all({member.index: member.steps for member in members.values()}, send)
            return [member.client_id for member in members.values()]
        counted = []
        for row, member in members.items():
            gradients = {FULL_GRAD + point: gradient[row] for point, gradient in reply.send.items()}
            try:
                self.means.add(member.index, member.steps, gradients)
            except ClientError as error:
                failed(error)
            else:
                counted.append(member.client_id)
        return counted

    def outline(self) -> dict[str, Any]:
        """Return what other processes need of this one's part, apart from the sums of vectors."""
        return {"means": self.means.outline()}

    def mean(self, outlines: Sequence[Mapping[str, Any]], ranks: Exchange, x: Vector) -> State:
        """Return the means [P] over all processes, by message; the arguments as for :class:`CollectedMessages`."""
        if ranks.size > 1:
            self.means.reduce([outline["means"] for outline in outlines], ranks, x)
        means, _ = self.means.mean(x)
        return means


class CollectedLoss:
    """The mean loss over the examples of all clients."""

    def __init__(self) -> None:
        self.total, self.examples = 0.0, 0

    def add(self, reply: Reply) -> None:
        """Add what clients answer together."""
        self.total, self.examples = self.total + reply.loss, self.examples + reply.loss_examples

    def outline(self) -> dict[str, Any]:
        """Return this process's sum, and its number of examples."""
        return {"loss": (self.total, self.examples)}

    def mean(self, outlines: Sequence[Mapping[str, Any]], x: Vector) -> Tensor:
        """Return the mean over all processes (0-dim), given everybody's :meth:`outline`."""
        totals, examples = zip(*(outline["loss"] for outline in outlines), strict=True)
        return torch.tensor(sum(totals) / sum(examples), device=x.device, dtype=x.dtype)


class CollectedMessages:
    """Sums of what clients send back from their local work.

    Args:
        algorithm: The method.
        aggregation: Puts messages together.
        traffic: Counts what travels.
        members: The cohort, by stored index.
        buffers: The server's buffers, where it takes the mean of the clients'; else none.

    Attributes:
        moved_buffers: The names of the buffers that any client has changed: no other one is sent.
        reports: What each client did; from :meth:`merge` on in the cohort's order.
        is_spoiled: Whether one was refused whose local work has left other traces.
        drift: The spread of the clients' changes.
        mean_buffers: The mean of the buffers that clients ended with.
        examples: The examples that clients went through in their local epochs.
        own_examples: Those of their own solves.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        aggregation: Aggregation,
        traffic: Traffic,
        members: Mapping[int, Participant],
        buffers: State,
    ) -> None:
        self.algorithm, self.aggregation, self.traffic = algorithm, aggregation, traffic
        self.members, self.buffers = members, buffers
        self.moved_buffers: set[str] = set()
        self.rule = algorithm.reduces.get("delta", "examples")
        self.drift, self.mean_buffers = Drift(), BufferMean()
        self.examples: int = 0
        self.own_examples: int = 0
        self.reports: dict[ClientId, ClientReport] = {}
        self.is_spoiled = False

    def add_reply(self, reply: Reply, rows: Sequence[int], failed: Failed, server: State) -> list[ClientId]:
        """Add what clients send; return those whose messages, or whose rest, count.

        Args:
            reply: Their reply.
            rows: Those of its rows that are added, in the order of the sum.
            failed: Is told of clients that the aggregation refuses.
            server: The server state that clients read in the round.
        """
        send = self._averaged(reply, server)
        sending = {row for row in rows if self._is_done(reply.reports[row])}
        if len(sending) > 1 and type(self.aggregation).add is Aggregation.add:  # messages are summed, and nothing else
            self._add_several(reply, sorted(sending), send)
            sending = set()
        counted = []
        for row in rows:
            report = reply.reports[row]
            try:
                if row in sending:
                    self._add(reply, row, send)
            except ClientError as error:
                failed(error)
                self.is_spoiled = True  # what it logged is among what others did
                continue
            self.reports[report.client_id] = report
            self.examples += reply.examples[row]
            self.own_examples += sum(reply.own_examples[row : row + 1])
            counted.append(report.client_id)
        return counted

    def _is_done(self, report: ClientReport) -> bool:
        """Whether a client has done what counts: a client without a step has no weight."""
        return report.steps > 0 or not self.algorithm.local_work

    def done(self) -> list[ClientId]:
        """Return the clients whose messages count."""
        return [client_id for client_id, report in self.reports.items() if self._is_done(report)]

    def _averaged(self, reply: Reply, server: State) -> State:
        """Return the messages that are averaged, with those that need not travel worked out where they did not."""
        send = reply.send
        if not (reply.implied or self.algorithm.aside):
            return send
        if not send.keys() >= set(reply.implied):
            try:
                send = {**send, **self.algorithm.implied(send, server)}
            except KeyError as error:
                raise FederatedError(
                    f"A reply leaves out {sorted(reply.implied)}, and {error} as well, from which"
                    f" {type(self.algorithm).__name__} would work it out. Send one of them."
                ) from error
        return {name: value for name, value in send.items() if name not in self.algorithm.aside}

    def _add_several(self, reply: Reply, rows: Sequence[int], messages: State) -> None:
        some = len(rows) < len(reply.clients)
        send = {name: value[rows] if some else value for name, value in messages.items()}
        models = self._models_of(reply)
        steps = {reply.clients[row]: reply.reports[row].steps for row in rows}
        self.aggregation.add_all(steps, send, models[rows] if some and models is not None else models)
        self.traffic.add_messages(_travelled(reply, rows[0]), len(rows))
        self._add_buffers(reply, rows)
        self._note_drift(reply, rows)

    def _add(self, reply: Reply, row: int, messages: State) -> None:
        send, models = {name: value[row] for name, value in messages.items()}, self._models_of(reply)
        if reply.message_bytes is None:
            self.traffic.add_messages(_travelled(reply, row))
        else:
            self.traffic.add_bytes(reply.message_bytes)
        model = None if models is None else models[row]
        self.aggregation.add(reply.clients[row], reply.reports[row].steps, send, model)
        self._add_buffers(reply, [row])
        self._note_drift(reply, [row])

    def _add_buffers(self, reply: Reply, rows: Sequence[int]) -> None:
        for row in rows if self.buffers and reply.buffers else ():
            own, member = reply.buffers[row], self.members[reply.clients[row]]
            if own:
                self.mean_buffers.add(own, member.size, member.index, member.count)
            for name in own.keys() - self.moved_buffers:
                if not torch.equal(own[name].to(self.buffers[name].device), self.buffers[name]):
                    self.moved_buffers.add(name)

    def merged_buffers(self) -> State:
        """Return the server's buffers after the round: what no client has changed keeps its bits."""
        means = self.mean_buffers.result(self.buffers)
        return {**self.buffers, **{name: means[name] for name in self.moved_buffers}}

    def _models_of(self, reply: Reply) -> Tensor | None:
        """Return the clients' models where these are summed instead of their changes."""
        return reply.models if self.aggregation.sums_models else None

    def _note_drift(self, reply: Reply, rows: Sequence[int]) -> None:
        changes = reply.changes
        if changes is None:
            return
        weights = self.aggregation.weights([reply.clients[row] for row in rows], self.rule)
        is_summed = self._models_of(reply) is not None and self.rule != "population"
        self.drift.add(changes if len(rows) == len(reply.clients) else changes[rows], weights, is_summed)

    def outline(self) -> dict[str, Any]:
        """Return what other processes need of this one's part, apart from the sums of vectors."""
        return {
            "aggregation": self.aggregation.outline(),
            "buffers": self.mean_buffers,
            "moved_buffers": self.moved_buffers,
            "drift": self.drift.weight,
            "traffic": self.traffic,
            "examples": (self.examples, self.own_examples),
            "reports": self.reports,
            "is_spoiled": self.is_spoiled,
        }

    def merge(self, outlines: Sequence[Mapping[str, Any]], ranks: Exchange, x: Vector) -> None:
        """Put the parts of all processes together.

        Args:
            outlines: Everybody's :meth:`outline`.
            ranks: The processes.
            x: The server parameters [P].
        """
        reports = {client_id: report for outline in outlines for client_id, report in outline["reports"].items()}
        cohort = (member.client_id for member in self.members.values())
        self.reports = {client_id: reports[client_id] for client_id in cohort if client_id in reports}
        self.is_spoiled = any(outline["is_spoiled"] for outline in outlines)
        self.drift.settle(x, *self.aggregation.models)  # what this process's clients alone decide
        if ranks.size == 1:
            return
        self.aggregation.reduce([outline["aggregation"] for outline in outlines], ranks, x)
        self.drift.merge([outline["drift"] for outline in outlines], ranks, x)
        self.mean_buffers = BufferMean.merged(outline["buffers"] for outline in outlines)
        self.moved_buffers = {name for outline in outlines for name in outline["moved_buffers"]}
        self.traffic.merge(outline["traffic"] for i, outline in enumerate(outlines) if i != ranks.rank)
        self.examples, self.own_examples = (sum(outline["examples"][i] for outline in outlines) for i in range(2))

    def report(
        self, gradient_members: Collection[Participant], dropped: Sequence[ClientId], facts: Mapping[str, Any]
    ) -> RoundReport:
        """Return the report of the round.

        Args:
            gradient_members: The clients whose full-batch gradients were averaged.
            dropped: Those that were drawn and left out.
            facts: The fields of the report that are known by name.
        """
        reports, done = self.reports, self.done()
        weights = {p.client_id: self.aggregation.weight(p.index, self.rule) for p in self.members.values()}
        total, examples = sum(weights[i] for i in done), sum(reports[i].size for i in done)
        return RoundReport(
            cohort=tuple(reports),
            dropped=tuple(dropped),
            sizes=MappingProxyType({i: r.size for i, r in reports.items()}),
            steps=MappingProxyType({i: r.steps for i, r in reports.items()}),
            weights=MappingProxyType({i: weights[i] / total if i in done else 0.0 for i in reports}),
            clients=MappingProxyType(reports),
            loss=sum(reports[i].loss * reports[i].size for i in done) / examples if examples else math.nan,
            drift=self.drift.value() if done else math.nan,
            gradients=self._gradients_computed(gradient_members),
            **facts,
        )

    def _gradients_computed(self, gradient_members: Collection[Participant]) -> int:
        """Return how many gradients of single examples the round took, full-batch gradients and second ones too."""
        own = (p for p in self.members.values() if p.client_id in self.reports)
        takers = (*gradient_members, *(own if self.algorithm.full_grad_for != "cohort" else ()))
        sizes = {member.index: member.size for member in takers}
        per_batch = 1 if self.algorithm.anchor_at is None and not looks_ahead(self.algorithm) else 2
        full: int = len(self.algorithm.full_grad_at) * sum(sizes.values())
        return per_batch * self.examples + self.own_examples + full


def _travelled(reply: Reply, row: int) -> State:
    """Return the messages of one client that need to travel."""
    return {name: value[row] for name, value in reply.send.items() if name not in reply.implied}
