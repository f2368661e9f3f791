"""What the server sums up of replies: full-batch gradients, and what clients send from their local work."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.buffers import BufferMean
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.rounds import ClientReport
from lightning_fed.core.types import ClientId, State, Vector
from lightning_fed.rounds.messages import Reply
from lightning_fed.rounds.report import Drift, Traffic
from lightning_fed.server.aggregation.base import FULL_GRAD
from lightning_fed.server.aggregation.mean import Aggregation, Exchange
from lightning_fed.server.participation import Participant

__all__ = ["CollectedGradients", "CollectedMessages"]

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
        averaged = [row for row in rows if reply.clients[row] in self.members]
        taken = _added(self.means, partial(self._add, reply), averaged, failed)
        return [self.members[reply.clients[row]].client_id for row in taken]

    def _add(self, reply: Reply, rows: Sequence[int]) -> None:
        steps = {reply.clients[row]: self.members[reply.clients[row]].steps for row in rows}
        self.means.add_all(steps, {FULL_GRAD + point: _of(rows, value) for point, value in reply.send.items()})

    def outline(self) -> dict[str, Any]:
        """Return what other processes need of this one's part, apart from the sums of vectors."""
        return {"means": self.means.outline()}

    def mean(self, outlines: Sequence[Mapping[str, Any]], ranks: Exchange, x: Vector) -> State:
        """Return the means [P] over all processes, by point; the arguments are those of :class:`CollectedMessages`."""
        if ranks.size > 1:
            self.means.reduce([outline["means"] for outline in outlines], ranks, x)
        means, _ = self.means.mean(x)
        return {name.removeprefix(FULL_GRAD): value for name, value in means.items()}


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
        done: From then on, the clients whose messages count.
        is_spoiled: Whether one was refused whose local work has left other traces.
        drift: The spread of the clients' changes.
        mean_buffers: The mean of the buffers that clients ended with.
        examples: The examples that clients went through in their local epochs, and in their own solves.
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
        self.examples = (0, 0)
        self.reports: dict[ClientId, ClientReport] = {}
        self.done: list[ClientId] = []
        self.is_spoiled = False

    def add_reply(self, reply: Reply, rows: Sequence[int], failed: Failed, server: State) -> list[ClientId]:
        """Add what clients send; return those whose messages, or whose rest, count.

        Args:
            reply: Their reply.
            rows: Those of its rows that are added, in the order of the sum.
            failed: Is told of clients that the aggregation refuses.
            server: The server state that clients read in the round.
        """
        add = partial(self._add, reply, self._averaged(reply, server))
        sending = [row for row in rows if self._is_done(reply.reports[row])]
        refused = set(sending).difference(_added(self.aggregation, add, sending, failed))
        self.is_spoiled |= bool(refused)  # what these logged is among what others did
        counted = []
        for row in rows:
            if row not in refused:
                report = reply.reports[row]
                self.reports[report.client_id] = report
                work, own_solve = self.examples
                self.examples = work + reply.examples[row], own_solve + sum(reply.own_examples[row : row + 1])
                counted.append(report.client_id)
        return counted

    def _is_done(self, report: ClientReport) -> bool:
        """Whether a client has done what counts: a client without a step has no weight."""
        return report.steps > 0 or not self.algorithm.local_work

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

    def _add(self, reply: Reply, messages: State, rows: Sequence[int]) -> None:
        """Add the messages of some rows, and take note of what else came with them."""
        steps = {reply.clients[row]: reply.reports[row].steps for row in rows}
        send = {name: _of(rows, value) for name, value in messages.items()}
        models = reply.models if self.aggregation.sums_models else None
        self.aggregation.add_all(steps, send, None if models is None else _of(rows, models))
        self.traffic.add_messages(reply, rows)
        for row in rows if self.buffers and reply.buffers else ():
            own, member = reply.buffers[row], self.members[reply.clients[row]]
            if own:
                self.mean_buffers.add(own, member.size, member.index, member.count)
            for name in own.keys() - self.moved_buffers:
                if not torch.equal(own[name].to(self.buffers[name].device), self.buffers[name]):
                    self.moved_buffers.add(name)
        if reply.changes is not None:
            is_summed = models is not None and self.rule != "population"
            self.drift.add(_of(rows, reply.changes), self.aggregation.weights(steps, self.rule), is_summed)

    def merged_buffers(self) -> State:
        """Return the server's buffers after the round: what no client has changed keeps its bits."""
        means = self.mean_buffers.result(self.buffers)
        return {name: means[name] if name in self.moved_buffers else old for name, old in self.buffers.items()}

    def outline(self) -> dict[str, Any]:
        """Return what other processes need of this one's part, apart from the sums of vectors."""
        return {
            "aggregation": self.aggregation.outline(),
            "buffers": self.mean_buffers,
            "moved_buffers": self.moved_buffers,
            "drift": self.drift.weight,
            "traffic": self.traffic,
            "examples": self.examples,
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
        cohort = [member.client_id for member in self.members.values()]
        self.reports = {client_id: reports[client_id] for client_id in cohort if client_id in reports}
        self.done = [client_id for client_id, report in self.reports.items() if self._is_done(report)]
        self.is_spoiled = any(outline["is_spoiled"] for outline in outlines)
        self.drift.settle(x, *self.aggregation.models)  # what this process's clients alone decide
        if ranks.size == 1:
            return
        self.aggregation.reduce([outline["aggregation"] for outline in outlines], ranks, x)
        self.drift.merge([outline["drift"] for outline in outlines], ranks, x)
        self.mean_buffers = BufferMean.merged(outline["buffers"] for outline in outlines)
        self.moved_buffers = {name for outline in outlines for name in outline["moved_buffers"]}
        self.traffic.merge(outline["traffic"] for i, outline in enumerate(outlines) if i != ranks.rank)
        work, own_solve = zip(*(outline["examples"] for outline in outlines), strict=True)
        self.examples = sum(work), sum(own_solve)

    def gradients_computed(self, gradient_members: Mapping[int, Participant]) -> int:
        """Return how many gradients of single examples the round took, full-batch gradients and second ones too.

        Args:
            gradient_members: The clients whose full-batch gradients were averaged, by stored index.
        """
        takers = dict(gradient_members)
        if self.algorithm.full_grad_for != "cohort":
            takers |= {index: who for index, who in self.members.items() if who.client_id in self.reports}
        per_batch = 1 if self.algorithm.anchor_at is None and not self.algorithm.looks_ahead else 2
        work, own_solve = self.examples
        full: int = len(self.algorithm.full_grad_at) * sum(who.size for who in takers.values())
        return per_batch * work + own_solve + full


def _added(
    aggregation: Aggregation, add: Callable[[Sequence[int]], None], rows: Sequence[int], failed: Failed
) -> list[int]:
    """Add rows of a reply, at once where they are only summed; return those that the aggregation does not refuse.

    Args:
        aggregation: What they are added to.
        add: Adds some of them.
        rows: The rows, in the order of the sum.
        failed: Is told of clients that are refused.
    """
    taken: list[int] = []
    is_sum = type(aggregation).add is Aggregation.add
    for some in [sorted(rows)] if rows and is_sum else [[row] for row in rows]:
        try:
            add(some)
            taken += some
        except ClientError as error:
            failed(error)
    return taken


def _of(rows: Sequence[int], stacked: Tensor) -> Tensor:
    """Return some rows, in ascending order, of what is stacked; nothing is copied if they are next to each other."""
    if len(rows) == len(stacked):
        return stacked
    return stacked[rows[0] : rows[-1] + 1] if rows[-1] - rows[0] < len(rows) else stacked[rows]
