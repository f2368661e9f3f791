"""Paired differences are decided by Student's t, and claims at several places by Holm's correction."""

import math
from itertools import permutations
from typing import Any

import pytest
from scipy import stats

from lightning_fed.lab.paired import Comparison, holm

LEFT, RIGHT = (1.0, 2.5, 3.0, 4.75), (1.5, 3.5, 3.25, 6.0)


def compare(left: Any = LEFT, sign: str = "<", right: Any = RIGHT, within: float = 0.1, **more: Any) -> Comparison:
    return Comparison(tuple(left), sign, tuple(right), within, **{"is_random": True, **more})


@pytest.mark.parametrize("sign", ["<", "<=", ">", ">="])
def test_p_and_interval_match_the_paired_t_test(sign: str) -> None:
    found, known = compare(sign=sign), stats.ttest_rel(LEFT, RIGHT)
    assert found.p == pytest.approx(known.pvalue, rel=1e-12)
    assert found.interval == pytest.approx(tuple(known.confidence_interval(0.95)), rel=1e-12)
    assert found.error == pytest.approx(stats.sem([a - b for a, b in zip(LEFT, RIGHT, strict=True)]), rel=1e-12)


@pytest.mark.parametrize(
    ("seeds", "critical"), [(2, 12.706204736), (3, 4.30265273), (5, 2.776445105), (10, 2.262157163)]
)
def test_difference_is_significant_beyond_the_tabulated_t(seeds: int, critical: float) -> None:
    shape = [(-1.0) ** i * (1 + i // 2) for i in range(seeds)]
    shape = [x - sum(shape) / seeds for x in shape]
    error = compare(shape, right=[0.0] * seeds).error
    assert error is not None
    for factor, expected in ((0.999, "undecided"), (1.001, "holds")):
        found = compare([x - factor * critical * error for x in shape], right=[0.0] * seeds)
        assert found.verdict(found.p) == expected


def test_two_standard_errors_of_three_seeds_are_undecided() -> None:
    found = compare([-1.0, -0.4, -1.6], right=[0.0] * 3)  # 2.9 standard errors, and p = 0.1
    assert found.error is not None
    assert abs(found.mean) > 2 * found.error
    assert found.verdict(found.p) == "undecided"


@pytest.mark.parametrize(
    ("mean", "expected"), [(0.2, "holds"), (0.99, "undecided"), (1.01, "undecided"), (3.0, "does not hold")]
)
def test_similarity_requires_the_interval_on_one_side_of_the_limit(mean: float, expected: str) -> None:
    right = [10.0 - mean, 10.02 - mean, 9.98 - mean, 10.0 - mean]
    found = compare([10.0, 10.0, 10.0, 10.0], "~", right)
    assert found.verdict(found.p) == expected
    assert found.interval is not None
    low, high = found.interval
    limit = 0.1 * max(10.0, sum(right) / 4)
    inside, outside = -limit < low and high < limit, low > limit or high < -limit
    assert (inside, outside) == (expected == "holds", expected == "does not hold")


def test_constant_difference_across_seeds_is_certain() -> None:
    assert compare([1.0, 2.0], right=[2.0, 3.0]).p == 0
    assert compare([2.0, 3.0], right=[2.0, 3.0]).p == 1


def test_p_is_missing_without_randomness_seeds_or_finite_numbers() -> None:
    assert compare([1.0], right=[2.0]).p is None
    assert compare(is_random=False).interval is None
    lost = compare([1.0, 2.0], right=[math.inf, math.inf])
    assert (lost.p, lost.error) == (None, None)
    assert lost.verdict(None) == "holds"


def test_holm_correction_matches_its_step_down_procedure() -> None:
    values = [0.001, 0.012, 0.02, 0.6]
    for order in permutations(range(4)):
        corrected = holm([values[i] for i in order])
        for level in (0.005, 0.04, 0.05, 0.5):
            rejected = 0
            while rejected < 4 and values[rejected] <= level / (4 - rejected):
                rejected += 1
            assert sum(p is not None and p <= level for p in corrected) == rejected
            assert all((p or 0) <= level for p, i in zip(corrected, order, strict=True) if i < rejected)
    assert holm([None, 0.03]) == [None, 0.03]
    assert holm([0.9, 0.8]) == [1.0, 1.0]
