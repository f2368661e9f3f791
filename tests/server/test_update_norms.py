"""Importance sampling by update norms: the paper's probabilities, and an estimate whose mean is exact."""

import math
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed import FederatedError
from lightning_fed.server import UpdateNormSampler
from lightning_fed.server.aggregation.mean import Aggregation
from lightning_fed.server.optimal_sampling import optimal_probabilities
from lightning_fed.server.participation import Participant, Population, unbiased

IDS, SIZES = ["a", "b", "c", "d", "e"], [4, 9, 1, 6, 12]
POPULATION = Population(IDS, dict(zip(IDS, SIZES, strict=True)).__getitem__, SIZES)


def reports(norms: dict[str, float], steps: int = 1) -> Any:
    return {i: SimpleNamespace(update_norm=norm, steps=steps) for i, norm in norms.items()}


def equation_7(norms: list[float], m: int) -> np.ndarray:
    """Return the reference: Equation 7 of Chen, Horvath and Richtarik, as it is written."""
    u, n = np.array(norms), len(norms)
    order = np.argsort(u, kind="stable")
    ordered = u[order]
    fits = [l for l in range(1, n + 1) if 0 < m + l - n <= ordered[:l].sum() / ordered[l - 1] * (1 + 1e-12)]  # noqa: E741
    p, most = np.ones(n), max(fits)
    p[order[:most]] = (m + most - n) * ordered[:most] / ordered[:most].sum()
    return p


def water_filling(norms: list[float], m: int) -> np.ndarray:
    """Return the p that minimizes sum u_i^2 / p_i with p_i <= 1 and sum p_i = m: min(1, s u_i), s by bisection."""
    u, low, high = np.array(norms), 0.0, m / min(norms)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(1, middle * u).sum() < m else (low, middle)
    return np.minimum(1, high * u)


@given(norms=st.lists(st.floats(0.01, 100), min_size=1, max_size=12), share=st.floats(0.01, 1))
def test_probabilities_match_the_paper_and_minimize_variance(norms: list[float], share: float) -> None:
    m = max(1, round(share * len(norms)))
    found = optimal_probabilities(torch.tensor(norms, dtype=torch.float64), m).numpy()
    np.testing.assert_allclose(found, water_filling(norms, m), rtol=1e-9)
    np.testing.assert_allclose(found, equation_7(norms, m) if m < len(norms) else 1.0, rtol=1e-9)


def test_probabilities_with_zero_norms() -> None:
    found = optimal_probabilities(torch.tensor([0.0, 3.0, 0.0, 0.0, 5.0], dtype=torch.float64), 3)
    assert found.tolist() == pytest.approx([1 / 3, 1, 1 / 3, 1 / 3, 1])
    assert float(found.sum()) == pytest.approx(3, rel=1e-15)
    assert optimal_probabilities(torch.zeros(4, dtype=torch.float64), 2).tolist() == [0.5] * 4
    zero = optimal_probabilities(torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64), 2)
    assert zero.tolist() == pytest.approx([0, 2 / 3, 2 / 3, 2 / 3])


def test_probabilities_follow_the_last_norms_and_stay_positive() -> None:
    sampler = UpdateNormSampler(2, uniform_share=0.2)
    w = np.array(SIZES) / sum(SIZES)
    np.testing.assert_allclose(sampler.probabilities(0, POPULATION), 0.8 * equation_7(list(w), 2) + 0.2 * 2 / 5)
    sampler.update(0, reports({"a": 2.0, "b": 9.0}))
    sampler.update(1, reports({"b": 0.0, "e": 1.0}) | reports({"c": math.nan}) | reports({"d": 7.0}, steps=0))
    norms = np.array([2.0, 0.0, 1.0, 1.0, 1.0])  # the mean of 2, 0, 1 is 1
    want = 0.8 * equation_7(list(w * norms), 2) + 0.2 * 2 / 5
    np.testing.assert_allclose(sampler.probabilities(2, POPULATION), want, rtol=1e-12)
    assert want.min() == pytest.approx(0.08)
    again = UpdateNormSampler(2, uniform_share=0.2)
    again.load_state_dict(sampler.state_dict())
    assert torch.equal(again.probabilities(2, POPULATION), sampler.probabilities(2, POPULATION))


def test_probabilities_are_invariant_to_the_scale_of_weights() -> None:
    large = UpdateNormSampler(2, weights={i: n * 1e307 for i, n in zip(IDS, SIZES, strict=True)})
    found, wanted = (sampler.probabilities(0, POPULATION) for sampler in (large, UpdateNormSampler(2)))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


def test_clients_are_drawn_independently_with_their_probabilities() -> None:
    sampler, rounds = UpdateNormSampler(2), 1000
    sampler.update(0, reports({"a": 2.0, "b": 9.0, "c": 1.0}))
    p = sampler.probabilities(0, POPULATION).tolist()
    cohorts = [sampler(0, r, POPULATION) for r in range(rounds)]
    for name, chance in zip(IDS, p, strict=True):
        found = sum(name in cohort for cohort in cohorts)
        assert abs(found - chance * rounds) <= 5 * math.sqrt(chance * (1 - chance) * rounds)
    both = sum("a" in cohort and "e" in cohort for cohort in cohorts)  # the draws are independent
    assert abs(both - p[0] * p[4] * rounds) <= 5 * math.sqrt(p[0] * p[4] * rounds)


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_expected_step_equals_full_participation(weighting: str) -> None:
    sampler = UpdateNormSampler(2, weights=weighting)  # type: ignore[arg-type]
    sampler.update(0, reports({"a": 2.0, "b": 9.0, "c": 1.0}))
    p = sampler.probabilities(1, POPULATION)
    x = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    updates = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    w = (
        torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES)
        if weighting == "examples"
        else torch.full((5,), 0.2, dtype=torch.float64)
    )
    mean, mean_of_models = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for size in range(1, 6):
        for who in combinations(range(5), size):
            chance = math.prod(float(p[i]) if i in who else 1 - float(p[i]) for i in range(5))
            members = unbiased([Participant(IDS[i], i, SIZES[i], 1, 3) for i in who], p, POPULATION, weighting)
            for sends_models in (False, True):
                aggregation = Aggregation({"delta": "weighting"}, weighting, members, 5)
                rows, steps = updates[list(who)], dict.fromkeys(who, 2)  # fewer steps than planned
                aggregation.update(steps, {"delta": rows}, x + rows if sends_models else None)
                means, models = aggregation.compute(x)
                if sends_models:
                    assert models is not None
                    mean_of_models += chance * (models - x)
                else:
                    mean += chance * means["delta"]
    torch.testing.assert_close(mean, w @ updates, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mean_of_models, w @ updates, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("share", [0, -0.1, 1.5, math.nan, None])
def test_invalid_uniform_share_is_rejected(share: Any) -> None:
    with pytest.raises(FederatedError, match=r"uniform_share must be a finite number in \(0, 1\]"):
        UpdateNormSampler(2, uniform_share=share)


def test_invalid_probabilities_are_rejected() -> None:
    member = Participant("a", 0, 4)
    with pytest.raises(FederatedError, match="a number for each of the 5 clients, in their order, found the shape"):
        unbiased([member], torch.ones(2), POPULATION, "examples")
    with pytest.raises(FederatedError, match="drew client 'a' 1 times, and gives its probability as 0.0"):
        unbiased([member], torch.zeros(5), POPULATION, "examples")
    with pytest.raises(FederatedError, match="drew client 'a' 2 times"):
        unbiased([Participant("a", 0, 4, 2)], torch.ones(5), POPULATION, "examples")
    for chances, found in (
        (dict.fromkeys(IDS, 0.5), "a dict"),
        (torch.ones(5, 1), r"the shape \[5, 1\]"),
        (None, "a NoneType"),
    ):
        with pytest.raises(FederatedError, match=f"must return a number for each of the 5 clients, .* found {found}"):
            unbiased([member], chances, POPULATION, "examples")
