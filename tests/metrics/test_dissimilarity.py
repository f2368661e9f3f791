"""Gradient dissimilarity against its definition, and the mean cosine over pairs against the pairs themselves."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed import FederatedError
from lightning_fed.metrics import PairwiseCosine, gradient_dissimilarity


def draw(count: int, seed: int, dim: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    stream = torch.Generator().manual_seed(seed)
    return torch.randn(count, dim, generator=stream, dtype=torch.float64), 0.1 + torch.rand(count, generator=stream)


@given(st.integers(1, 9), st.integers(0, 10**6))
def test_measures_match_their_definitions(count: int, seed: int) -> None:
    g, weights = draw(count, seed)
    shares = (weights / weights.sum()).double()
    mean = shares @ g
    found = gradient_dissimilarity(zip(g, weights.tolist(), strict=True))
    assert pytest.approx(float(shares @ (g - mean).square().sum(1)), rel=1e-6, abs=1e-15) == found.G2
    assert found.mean_square == pytest.approx(float(shares @ g.square().sum(1)), rel=1e-6)
    assert found.norm == pytest.approx(float(mean.norm()), rel=1e-6)
    assert pytest.approx(math.sqrt(found.mean_square / found.norm**2)) == found.B
    assert found.B >= 1 - 1e-9


def test_scale_of_the_weights_is_ignored() -> None:
    g, weights = draw(5, seed=3)
    one, other = (gradient_dissimilarity(zip(g, (c * weights).tolist(), strict=True)) for c in (1, 1000))
    assert pytest.approx((other.G2, other.B)) == (one.G2, one.B)


def test_nearly_equal_gradients_do_not_cancel() -> None:
    # the textbook's mean_square - norm^2 would lose all digits
    small = torch.tensor([3.0, -3.0], dtype=torch.float64)
    found = gradient_dissimilarity((torch.full((2,), 1e9, dtype=torch.float64) + s, 1.0) for s in small)
    assert pytest.approx(18.0, rel=1e-9) == found.G2


def test_single_precision_gradients_are_summed_in_double_precision() -> None:
    g = torch.full((1, 10), 0.1)
    found = gradient_dissimilarity((g[0], 1.0) for _ in range(1000))
    assert found.norm == pytest.approx(float(g[0].double().norm()), rel=1e-12)


def test_b_is_one_at_agreement_and_infinite_at_zero_mean_gradient() -> None:
    g = torch.tensor([1.0, 2.0])
    assert pytest.approx(1.0) == gradient_dissimilarity([(g, 1.0), (g, 2.0)]).B
    assert gradient_dissimilarity([(0 * g, 1.0), (0 * g, 1.0)]).B == 1.0
    assert math.isinf(gradient_dissimilarity([(g, 1.0), (-g, 1.0)]).B)


def test_clients_with_zero_weight_are_ignored() -> None:
    g = torch.tensor([1.0, 2.0])
    assert gradient_dissimilarity([(5 * g, 0.0), (g, 1.0)]).G2 == 0
    with pytest.raises(FederatedError, match="no gradient of positive weight"):
        gradient_dissimilarity([(g, 0.0)])


def mean_cosine(vectors: torch.Tensor) -> float:
    cosine = PairwiseCosine()
    for vector in vectors:
        cosine.add(vector)
    return cosine.value()


@pytest.mark.parametrize("count", [2, 3, 8])
def test_mean_cosine_matches_the_mean_over_all_pairs(count: int) -> None:
    vectors = (
        torch.randn(count, 5, generator=torch.Generator().manual_seed(count)) * torch.logspace(-3, 3, count)[:, None]
    )
    units = vectors.double() / vectors.double().norm(dim=1, keepdim=True)
    pairs = [float(units[i] @ units[j]) for i in range(count) for j in range(i)]
    assert mean_cosine(vectors) == pytest.approx(sum(pairs) / len(pairs), abs=1e-6)


def test_parallel_vectors_of_any_length_have_cosine_one() -> None:
    assert mean_cosine(torch.tensor([[1.0, 2.0], [1e-6, 2e-6], [500.0, 1000.0]])) == pytest.approx(1.0)


def test_partial_cosines_can_be_merged() -> None:
    vectors = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    parts = [PairwiseCosine() for _ in range(3)]
    for i, vector in enumerate(vectors):
        parts[i % 2].add(vector)
    merged = PairwiseCosine()
    for part in parts:
        merged.merge(part)
    assert merged.value() == pytest.approx(mean_cosine(vectors))


def test_zero_vectors_are_ignored() -> None:
    assert mean_cosine(torch.tensor([[1.0, 0.0], [0.0, 0.0], [-1.0, 0.0]])) == pytest.approx(-1.0)
    assert math.isnan(mean_cosine(torch.tensor([[1.0, 0.0], [0.0, 0.0]])))
    assert math.isnan(PairwiseCosine().value())
