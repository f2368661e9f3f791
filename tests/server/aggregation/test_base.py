"""Rules in place of the weighted mean: who may count unequally, what a rule of one's own needs, and how it is shown."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fed import FederatedError
from lightning_fed.algorithms import (
    FedAvg,
)
from lightning_fed.server import (
    Aggregator,
    CoordinateMedian,
    GeometricMedian,
    NormClipping,
    RobustAggregator,
    TrimmedMean,
    WeightedSampler,
)
from lightning_fed.server.participation import Participant
from tests.helpers.aggregation import add_one
from tests.helpers.engines import run
from tests.helpers.training import trainer

X = torch.zeros(3, dtype=torch.float64)


def cohort(sizes: Sequence[int], counts: Sequence[int] | None = None) -> list[Participant]:
    return [Participant(f"c{i}", i, n, 1 if counts is None else counts[i], 1) for i, n in enumerate(sizes)]


def combined(
    rule: Aggregator,
    messages: Tensor,
    sizes: Sequence[int] | None = None,
    counts: Sequence[int] | None = None,
    reduces: str = "weighting",
    weighting: str = "examples",
    order: Sequence[int] | None = None,
) -> Tensor:
    """Return what a rule makes of messages [S, P] in a population of ten."""
    members = cohort(sizes or [1] * len(messages), counts)
    aggregation = rule.of_round({"delta": reduces}, weighting, members, 10)
    for i in range(len(messages)) if order is None else order:
        add_one(aggregation, i, 1, {"delta": messages[i]})
    found, models = aggregation.compute(X)
    assert models is None
    return found["delta"]


def matrix(*rows: Sequence[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_messages_by_examples_are_refused_where_clients_count_alike() -> None:
    class ByExamples(FedAvg):
        reduces = {"delta": "examples"}

    with pytest.raises(FederatedError, match="averages messages by examples"):
        trainer(algorithm=ByExamples(), aggregator=CoordinateMedian())
    trainer(algorithm=ByExamples(), aggregator=GeometricMedian())


class Widest(RobustAggregator):
    """A rule of one's own: the largest value."""

    def combine(self, messages: Tensor, weights: Tensor, sum_: Any) -> Tensor:
        return messages.max(dim=0).values


def test_a_rule_of_ones_own_is_a_few_lines() -> None:
    assert torch.equal(combined(Widest(), matrix([1, 5, 0], [2, 3, -1])), matrix([2, 5, 0])[0])
    assert repr(Widest()) == "Widest()"
    run("sequential", aggregator=Widest(), sampler=WeightedSampler(3), clients_per_round=None, max_rounds=1)


def test_a_rule_shows_itself_as_it_would_be_written() -> None:
    shown = [repr(rule) for rule in (TrimmedMean(0.1), GeometricMedian(), NormClipping(2))]
    assert shown == ["TrimmedMean(beta=0.1)", "GeometricMedian(iterations=3, nu=1e-06)", "NormClipping(max_norm=2.0)"]
