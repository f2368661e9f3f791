"""Power-of-Choice: candidates drawn by p_k, then the ones with the highest loss, fresh or last known."""

import math
from collections import Counter
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightning_fed import FederatedError
from lightning_fed.server import PowerOfChoiceSampler
from lightning_fed.server.participation import Population

NAMES = ["a", "b", "c", "d", "e", "f"]
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0, "e": 5.0, "f": 6.0}


def reports(losses: dict[str, float], steps: int = 1) -> Any:
    return {i: SimpleNamespace(loss=loss, steps=steps) for i, loss in losses.items()}


def highest(losses: dict[str, float], m: int) -> set[str]:
    """Return the reference: the names of the m highest losses, which must all differ."""
    names, values = np.array(list(losses)), np.array(list(losses.values()))
    return set(names[np.argsort(-values)[:m]])


@pytest.mark.parametrize("m", [1, 2, 3])
def test_candidates_with_the_highest_fresh_losses_are_selected(m: int) -> None:
    sampler, random = PowerOfChoiceSampler(m, 4, weights=WEIGHTS), np.random.default_rng(m)
    for number in range(50):
        candidates = sampler.needs_losses_of(3, number, NAMES)
        assert len(set(candidates)) == 4
        losses = dict(zip(candidates, random.normal(size=4).tolist(), strict=True))
        cohort = sampler(3, number, NAMES, losses)
        assert set(cohort) == highest(losses, m)
        assert cohort == sorted(cohort)


def test_candidates_are_drawn_by_weight_without_replacement() -> None:
    sampler, rounds = PowerOfChoiceSampler(1, 2, weights={"a": 1, "b": 2, "c": 5}), 1200
    p = {"a": 1 / 8, "b": 2 / 8, "c": 5 / 8}
    found = Counter(tuple(sampler.needs_losses_of(0, r, NAMES[:3])) for r in range(rounds))
    for i, j in combinations(p, 2):
        chance = p[i] * p[j] / (1 - p[i]) + p[j] * p[i] / (1 - p[j])
        assert abs(found[i, j] - chance * rounds) < 5 * math.sqrt(chance * (1 - chance) * rounds)


@pytest.mark.thorough
def test_ties_are_broken_at_random() -> None:
    sampler, rounds = PowerOfChoiceSampler(1, 3, weights=dict.fromkeys(NAMES[:3], 1)), 1200
    found = Counter(sampler(0, r, NAMES[:3], dict.fromkeys(NAMES[:3], 0.5))[0] for r in range(rounds))
    for name in NAMES[:3]:
        assert abs(found[name] - rounds / 3) < 5 * math.sqrt(2 / 9 * rounds)


def test_last_losses_rank_candidates_with_unseen_clients_first() -> None:
    sampler, random = PowerOfChoiceSampler(2, 4, losses="last", weights=WEIGHTS), np.random.default_rng(0)
    among = PowerOfChoiceSampler(2, 4, weights=WEIGHTS)  # draws the same candidates
    known = dict.fromkeys(NAMES, np.inf)
    for number in range(40):
        assert sampler.needs_losses_of(3, number, NAMES) == []
        cohort = sampler(3, number, NAMES, {})
        losses = {i: known[i] for i in among.needs_losses_of(3, number, NAMES)}
        unseen = {i for i, loss in losses.items() if loss == np.inf}
        if len(unseen) >= 2:
            assert set(cohort) <= unseen
        else:
            assert set(cohort) == highest(losses, 2)
        found = dict(zip(cohort, random.normal(size=2).tolist(), strict=True))
        sampler.update(number, reports(found))
        known |= found
        again = PowerOfChoiceSampler(2, 4, losses="last", weights=WEIGHTS)
        again.load_state_dict(sampler.state_dict())
        assert again(3, number + 1, NAMES, {}) == sampler(3, number + 1, NAMES, {})


def test_client_without_a_loss_is_not_selected() -> None:
    sampler = PowerOfChoiceSampler(2, 3, weights=WEIGHTS)
    assert sampler(0, 0, NAMES[:3], {"a": math.nan, "c": 0.1}) == ["c"]
    assert sampler(0, 0, NAMES[:3], {}) == []
    last = PowerOfChoiceSampler(1, 3, losses="last", weights=WEIGHTS)
    last.update(0, reports({"a": math.nan}) | reports({"b": 1.0}, steps=0) | reports({"c": 2.0}))
    assert last.state_dict() == {"losses": {"c": 2.0}}


def test_empty_clients_are_not_selected_by_last_losses() -> None:
    population = Population(range(4), [0, 4, 0, 6].__getitem__)  # unknown until clients are built
    sampler = PowerOfChoiceSampler(2, 4, losses="last", weights=dict.fromkeys(range(4), 1))
    assert sampler(0, 0, population, {}) == [1, 3]


def test_shares_are_supported_and_invalid_counts_are_rejected() -> None:
    sampler = PowerOfChoiceSampler(0.1, 0.3, weights=dict.fromkeys(range(20), 1))
    assert (sampler.count(20), len(sampler.needs_losses_of(0, 0, range(20)))) == (2, 6)
    with pytest.raises(FederatedError, match=r"candidates=2\): clients are chosen among the candidates"):
        PowerOfChoiceSampler(3, candidates=2)
    with pytest.raises(FederatedError, match="draws 7 candidates and takes 3 of them, and there are 6 clients"):
        PowerOfChoiceSampler(3, candidates=7).count(6)
    with pytest.raises(FederatedError, match="draws 2 candidates and takes 3 of them"):
        PowerOfChoiceSampler(3, candidates=0.3).count(6)
    with pytest.raises(FederatedError, match=r"PowerOfChoiceSampler\(candidates=0, .*at least 1 client"):
        PowerOfChoiceSampler(3, candidates=0)
    with pytest.raises(FederatedError, match=r"losses='old'\): losses must be 'fresh' or 'last'"):
        PowerOfChoiceSampler(3, 4, losses="old")  # type: ignore[arg-type]
