"""The mean cosine over pairs against the pairs themselves."""

import math

import pytest
import torch

from lightning_fed.metrics import PairwiseCosine


def mean_cosine(vectors: torch.Tensor) -> float:
    cosine = PairwiseCosine()
    for vector in vectors:
        cosine.add(vector)
    return cosine.value()


@pytest.mark.parametrize("count", [2, 3, 8])
def test_it_is_the_mean_over_all_pairs(count: int) -> None:
    vectors = (
        torch.randn(count, 5, generator=torch.Generator().manual_seed(count)) * torch.logspace(-3, 3, count)[:, None]
    )
    units = vectors.double() / vectors.double().norm(dim=1, keepdim=True)
    pairs = [float(units[i] @ units[j]) for i in range(count) for j in range(i)]
    assert mean_cosine(vectors) == pytest.approx(sum(pairs) / len(pairs), abs=1e-6)


def test_parallel_vectors_of_any_length_have_cosine_one() -> None:
    assert mean_cosine(torch.tensor([[1.0, 2.0], [1e-6, 2e-6], [500.0, 1000.0]])) == pytest.approx(1.0)


def test_parts_can_be_merged() -> None:
    vectors = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    parts = [PairwiseCosine() for _ in range(3)]
    for i, vector in enumerate(vectors):
        parts[i % 2].add(vector)
    merged = PairwiseCosine()
    for part in parts:
        merged.merge(part)
    assert merged.value() == pytest.approx(mean_cosine(vectors))


def test_vectors_without_a_direction_are_left_out() -> None:
    assert mean_cosine(torch.tensor([[1.0, 0.0], [0.0, 0.0], [-1.0, 0.0]])) == pytest.approx(-1.0)
    assert math.isnan(mean_cosine(torch.tensor([[1.0, 0.0], [0.0, 0.0]])))
    assert math.isnan(PairwiseCosine().value())
