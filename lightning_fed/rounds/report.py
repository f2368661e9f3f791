"""What is told of a round when it is over."""

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.rounds import RoundReport
from lightning_fed.core.types import ClientId
from lightning_fed.rounds.collect import CollectedMessages
from lightning_fed.server.aggregation import Participant

__all__ = ["gradients_computed", "round_report"]


def round_report(
    messages: CollectedMessages,
    gradient_members: Collection[Participant],
    dropped: Sequence[ClientId],
    facts: Mapping[str, Any],
) -> RoundReport:
    """Return the report of a round.

    Args:
        messages: What clients have sent.
        gradient_members: Those whose full-batch gradients were averaged.
        dropped: Those that were drawn and left out.
        facts: The fields of the report that are known by name.
    """
    reports, members, done = messages.reports, messages.members.values(), messages.done()
    weights = {p.client_id: messages.aggregation.weight(p.index, messages.rule) for p in members}
    total, examples = sum(weights[i] for i in done), sum(reports[i].size for i in done)
    completed = [p for p in members if p.client_id in reports]
    return RoundReport(
        cohort=tuple(reports),
        dropped=tuple(dropped),
        sizes=MappingProxyType({i: r.size for i, r in reports.items()}),
        steps=MappingProxyType({i: r.steps for i, r in reports.items()}),
        weights=MappingProxyType({i: weights[i] / total if i in done else 0.0 for i in reports}),
        clients=MappingProxyType(dict(reports)),
        loss=sum(reports[i].loss * reports[i].size for i in done) / examples if examples else math.nan,
        drift=messages.drift.value() if done else math.nan,
        gradients=gradients_computed(messages.algorithm, messages.examples, completed, gradient_members),
        **facts,
    )


def gradients_computed(
    algorithm: Algorithm, examples: int, members: Collection[Participant], gradient_members: Collection[Participant]
) -> int:
    """Return how many gradients of single examples a round takes.

    Args:
        algorithm: The method, which may take a second gradient on every batch, and full-batch gradients.
        examples: The examples that clients went through in their local epochs.
        members: The clients that completed their work.
        gradient_members: Those whose full-batch gradients are averaged.
    """
    own = members if algorithm.full_grad_for != "cohort" else ()
    sizes = {member.index: member.size for member in (*gradient_members, *own)}
    per_batch = 1 if algorithm.anchor_at is None else 2
    return per_batch * examples + len(algorithm.full_grad_at) * sum(sizes.values())
