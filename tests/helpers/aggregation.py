"""Messages of single clients, and their combination by an aggregator."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_fed.core.types import State
from lightning_fed.server import Aggregator
from lightning_fed.server.aggregation.mean import Aggregation
from lightning_fed.server.participation import Participant

__all__ = ["X", "add_one", "cohort", "combined", "matrix"]

X = torch.zeros(3, dtype=torch.float64)


def add_one(aggregation: Aggregation, index: int, steps: int, send: State, model: Tensor | None = None) -> None:
    """Add one client's messages."""
    stacked = {name: value[None] for name, value in send.items()}
    aggregation.update({index: steps}, stacked, None if model is None else model[None])


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
    """Return an aggregator's result for messages [S, P] in a population of ten."""
    members = cohort(sizes or [1] * len(messages), counts)
    aggregation = rule.of_round({"delta": reduces}, weighting, members, 10)
    for i in range(len(messages)) if order is None else order:
        add_one(aggregation, i, 1, {"delta": messages[i]})
    found, models = aggregation.compute(X)
    assert models is None
    return found["delta"]


def matrix(*rows: Sequence[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)
