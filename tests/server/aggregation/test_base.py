"""Rules in place of the weighted mean: who may count unequally, what a rule of one's own needs, and how it is shown."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fed import FederatedError
from lightning_fed.algorithms import (
    FedAvg,
)
from lightning_fed.server import (
    CoordinateMedian,
    GeometricMedian,
    NormClipping,
    RobustAggregator,
    TrimmedMean,
    WeightedSampler,
)
from tests.helpers.aggregation import combined, matrix
from tests.helpers.engines import run
from tests.helpers.training import trainer


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
