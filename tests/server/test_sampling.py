"""Cohorts: functions of (seed, round) alone, of the promised sizes and frequencies, refused by name."""

import math
import re
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed.core.errors import FederatedError
from lightning_fed.server.participation import Population
from lightning_fed.server.sampling import (
    AvailabilitySampler,
    BernoulliSampler,
    RoundRobinSampler,
    UniformSampler,
    WeightedSampler,
    draw,
)

NAMES = ["a", "b", "c", "d"]
ALL: list[Any] = [
    UniformSampler(2),
    RoundRobinSampler(2),
    WeightedSampler(2, {"a": 1, "b": 2, "c": 3, "d": 4}),
    WeightedSampler(2, {"a": 1, "b": 2, "c": 3, "d": 4}, replacement=False),
    BernoulliSampler(0.5),
    AvailabilitySampler(2),
]


def counts(sampler: Any, population: Sequence[Any], rounds: int, seed: int = 0) -> Counter[Any]:
    """Return how often each client comes up over many rounds."""
    return Counter(i for r in range(rounds) for i in sampler(seed, r, population))


def assert_frequency(found: int, p: float, trials: int) -> None:
    """Allow five standard deviations of a binomial count."""
    assert abs(found - p * trials) <= 5 * math.sqrt(p * (1 - p) * trials), (found, p * trials)


# ------------------------------------------------------------------ what all samplers have in common


@pytest.mark.parametrize("sampler", ALL, ids=repr)
def test_a_cohort_is_a_function_of_seed_and_round(sampler: Any) -> None:
    first = [sampler(3, r, NAMES) for r in range(30)]
    torch.manual_seed(1)
    torch.rand(5)
    backwards = [sampler(3, r, list(NAMES)) for r in reversed(range(30))]
    assert backwards[::-1] == first


@pytest.mark.parametrize("sampler", [s for s in ALL if not isinstance(s, RoundRobinSampler)], ids=repr)
def test_seeds_and_rounds_make_a_difference(sampler: Any) -> None:
    first = [sampler(0, r, NAMES) for r in range(30)]
    assert [sampler(1, r, NAMES) for r in range(30)] != first
    assert any(cohort != first[0] for cohort in first)


@pytest.mark.parametrize("sampler", [s for s in ALL if not isinstance(s, RoundRobinSampler)], ids=repr)
@pytest.mark.parametrize("seed", range(5))
def test_cohorts_are_in_the_populations_order(sampler: Any, seed: int) -> None:
    population = ["d", "a", "c", "b"]
    for r in range(20):
        positions = [population.index(i) for i in sampler(seed, r, population)]
        assert positions == sorted(positions)


@pytest.mark.parametrize(
    "sampler", [s for s in ALL if not (isinstance(s, WeightedSampler) and s.replacement)], ids=repr
)
def test_nobody_comes_twice(sampler: Any) -> None:
    for r in range(50):
        cohort = sampler(0, r, NAMES)
        assert len(set(cohort)) == len(cohort)


@pytest.mark.parametrize(
    "make",
    [UniformSampler, RoundRobinSampler, AvailabilitySampler, partial(WeightedSampler, replacement=False)],
    ids=str,
)
def test_more_clients_than_there_are_are_refused(make: Callable[..., Any]) -> None:
    with pytest.raises(FederatedError, match=r"clients_per_round=5 asks for more clients than the 4 non-empty ones"):
        make(5).count(4)
    assert make(4).count(4) == 4


@pytest.mark.parametrize("make", [UniformSampler, RoundRobinSampler, AvailabilitySampler, WeightedSampler], ids=str)
@pytest.mark.parametrize(
    ("k", "message"),
    [
        (0, r"at least 1 client, and fewer than 2\*\*63, found 0"),
        (-2, r"at least 1 client, and fewer than 2\*\*63, found -2"),
        (0.0, r"must lie in \(0, 1\], found 0.0"),
        (1.5, r"must lie in \(0, 1\], found 1.5. For a count pass an int"),
        (-0.1, r"must lie in \(0, 1\]"),
        (math.nan, r"must lie in \(0, 1\], found nan"),
        (True, r"found True \(bool\)"),
        ("2", r"found '2' \(str\)"),
        (None, r"found None \(NoneType\)"),
    ],
)
def test_impossible_numbers_of_clients_are_refused(make: Callable[..., Any], k: Any, message: str) -> None:
    with pytest.raises(FederatedError, match=f"clients_per_round.*{message}"):
        make(k)


@pytest.mark.parametrize(
    ("k", "n", "want"),
    [(3, 10, 3), (1, 10, 1), (1.0, 10, 10), (0.25, 10, 2), (0.5, 5, 2), (0.01, 10, 1), (0.34, 100, 34), (1.0, 1, 1)],
)
def test_a_float_is_a_share_and_an_int_a_count(k: float, n: int, want: int) -> None:
    for sampler in (UniformSampler(k), RoundRobinSampler(k)):
        assert sampler.count(n) == want
        assert len(sampler(0, 0, range(n))) == want


@pytest.mark.parametrize("sampler", ALL, ids=repr)
def test_a_sampler_shows_itself_as_it_would_be_written(sampler: Any) -> None:
    names = {cls.__name__: cls for cls in (UniformSampler, RoundRobinSampler, WeightedSampler, BernoulliSampler)}
    again = eval(repr(sampler), names | {"AvailabilitySampler": AvailabilitySampler})  # our own text
    assert [again(0, r, NAMES) for r in range(10)] == [sampler(0, r, NAMES) for r in range(10)]


# ------------------------------------------------------------------ uniform


@given(n=st.integers(1, 40), k=st.integers(1, 40), seed=st.integers(0, 2**40), round=st.integers(0, 10**6))
def test_uniform_draws_k_distinct_clients(n: int, k: int, seed: int, round: int) -> None:
    population = [f"client {i}" for i in range(n)]
    if k > n:
        with pytest.raises(FederatedError):
            UniformSampler(k)(seed, round, population)
        return
    cohort = UniformSampler(k)(seed, round, population)
    assert len(cohort) == len(set(cohort)) == k
    assert set(cohort) <= set(population)


def test_full_participation_is_everybody_in_order() -> None:
    population = ["z", 5, "a"]
    assert UniformSampler()(4, 2, population) == population
    assert UniformSampler(3)(4, 2, population) == population


def test_uniform_draws_every_subset_equally_often() -> None:
    rounds = 4000
    found = Counter(tuple(UniformSampler(2)(0, r, range(5))) for r in range(rounds))
    assert set(found) == set(combinations(range(5), 2))
    for count in found.values():
        assert_frequency(count, 1 / 10, rounds)


def test_uniform_draws_do_not_visit_the_population() -> None:
    population, sampler = range(10**6), UniformSampler(100)
    sampler(0, 0, population)
    tracemalloc.start()
    cohort = sampler(0, 1, population)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(cohort)) == 100
    assert peak < 200_000  # a list of the ids alone would be eight million bytes
    assert max(cohort) > 500_000


def test_uniform_asks_a_sequence_for_what_it_draws_only() -> None:
    class Million(Sequence[int]):
        asked = 0

        def __len__(self) -> int:
            return 10**6

        def __getitem__(self, i: Any) -> int:
            Million.asked += 1
            return int(i)

    assert len(UniformSampler(7)(0, 0, Million())) == 7
    assert Million.asked == 7


# ------------------------------------------------------------------ round robin


def test_round_robin_takes_turns() -> None:
    sampler = RoundRobinSampler(2)
    assert [sampler(9, r, ["a", "b", "c"]) for r in range(4)] == [["a", "b"], ["c", "a"], ["b", "c"], ["a", "b"]]


@given(n=st.integers(1, 12), k=st.integers(1, 12))
def test_round_robin_visits_everybody_equally_often(n: int, k: int) -> None:
    if k <= n:
        assert counts(RoundRobinSampler(k), range(n), rounds=n) == dict.fromkeys(range(n), k)


# ------------------------------------------------------------------ weighted


def test_weights_with_replacement_are_the_probabilities_of_every_draw() -> None:
    rounds, k = 3000, 3
    sampler = WeightedSampler(k, {"a": 1, "b": 2, "c": 0, "d": 5})
    found = counts(sampler, NAMES, rounds)
    for name, p in {"a": 1 / 8, "b": 2 / 8, "d": 5 / 8}.items():
        assert_frequency(found[name], p, k * rounds)
    assert found["c"] == 0
    assert sum(found.values()) == k * rounds


def test_draws_with_replacement_are_independent() -> None:
    rounds, sampler = 3000, WeightedSampler(2, {"a": 1, "b": 3})
    found = Counter(tuple(sampler(0, r, ["a", "b"])) for r in range(rounds))
    for pair, p in {("a", "a"): 1 / 16, ("a", "b"): 6 / 16, ("b", "b"): 9 / 16}.items():
        assert_frequency(found[pair], p, rounds)


def test_more_draws_than_clients_with_replacement() -> None:
    sampler = WeightedSampler(7, {"a": 1, "b": 1})
    assert len(sampler(0, 0, ["a", "b"])) == 7
    assert sampler.count(2) == 7
    assert WeightedSampler(0.5, {"a": 1, "b": 1}).count(10) == 5


@pytest.mark.thorough
def test_weights_without_replacement_draw_one_after_the_other() -> None:
    rounds, p = 4000, {"a": 0.5, "b": 0.3, "c": 0.2}
    sampler = WeightedSampler(2, p, replacement=False)
    found = Counter(tuple(sampler(0, r, ["a", "b", "c"])) for r in range(rounds))
    # the first with p, the second with p among those left
    for i, j in combinations(p, 2):
        assert_frequency(found[i, j], p[i] * p[j] / (1 - p[i]) + p[j] * p[i] / (1 - p[j]), rounds)
    assert sum(found.values()) == rounds


@pytest.mark.thorough
def test_equal_weights_without_replacement_are_uniform() -> None:
    rounds, sampler = 3000, WeightedSampler(3, dict.fromkeys(range(6), 0.1), replacement=False)
    for count in counts(sampler, range(6), rounds).values():
        assert_frequency(count, 3 / 6, rounds)


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-300, 1e-9, 1.0, 7.0, 1e12]), min_size=1, max_size=6),
    k=st.integers(1, 6),
    replacement=st.booleans(),
    round=st.integers(0, 10**6),
)
def test_weight_zero_is_never_drawn(weights: list[float], k: int, replacement: bool, round: int) -> None:
    sampler = WeightedSampler(k, dict(enumerate(weights)), replacement)
    positive = sum(w > 0 for w in weights)
    if positive == 0 or (not replacement and k > positive):
        with pytest.raises(FederatedError):
            sampler(0, round, range(len(weights)))
        return
    cohort = sampler(0, round, range(len(weights)))
    assert len(cohort) == k
    assert all(weights[i] > 0 for i in cohort)
    assert replacement or len(set(cohort)) == k


@pytest.mark.parametrize("share", [0.0, 1.0 - 2.0**-53], ids=["lowest", "highest"])
def test_the_ends_of_the_unit_interval_reach_no_client_of_weight_zero(share: float, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch, "rand", lambda k, **_: torch.full((k,), share, dtype=torch.float64))
    sampler = WeightedSampler(2, {"a": 0.0, "b": 0.1, "c": 0.7, "d": 0.0})
    assert sampler(0, 0, NAMES) == (["b", "b"] if share == 0 else ["c", "c"])
    # the product of the share and the smallest number there is rounds up to the whole
    assert WeightedSampler(2, {"a": 0.0, "b": 5e-324, "c": 0.0})(0, 0, NAMES[:3]) == ["b", "b"]


def test_too_few_positive_weights_without_replacement() -> None:
    sampler = WeightedSampler(3, {"a": 1, "b": 0, "c": 2, "d": 0}, replacement=False)
    with pytest.raises(
        FederatedError, match=r"clients_per_round=3 without replacement.* than the 2 of positive weight"
    ):
        sampler(0, 0, NAMES)


def test_weights_by_examples_come_from_the_population() -> None:
    sizes = {"a": 10, "b": 0, "c": 30}
    population = Population(list(sizes), sizes.__getitem__, list(sizes.values()))
    rounds = 3000
    found = counts(WeightedSampler(2), population, rounds)
    assert_frequency(found["a"], 1 / 4, 2 * rounds)
    assert found["a"] + found["c"] == 2 * rounds
    with pytest.raises(FederatedError, match="needs a population with its clients' sizes"):
        WeightedSampler(2)(0, 0, ["a", "b"])


# ------------------------------------------------------------------ Bernoulli


@pytest.mark.thorough
def test_everybody_flips_a_coin_of_its_own() -> None:
    rounds, p = 3000, {"a": 0.0, "b": 0.2, "c": 0.7, "d": 1.0}
    cohorts = [BernoulliSampler(p)(0, r, NAMES) for r in range(rounds)]
    found = Counter(i for cohort in cohorts for i in cohort)
    assert found["a"] == 0
    assert found["d"] == rounds
    assert_frequency(found["b"], 0.2, rounds)
    assert_frequency(found["c"], 0.7, rounds)
    assert_frequency(sum({"b", "c"} <= set(cohort) for cohort in cohorts), 0.14, rounds)


def test_one_probability_for_all_gives_binomial_cohorts() -> None:
    rounds, n, p = 3000, 4, 0.25
    sizes = Counter(len(BernoulliSampler(p)(0, r, range(n))) for r in range(rounds))
    for size in range(n + 1):
        assert_frequency(sizes[size], math.comb(n, size) * p**size * (1 - p) ** (n - size), rounds)


def test_cohorts_may_be_empty_or_everybody() -> None:
    assert BernoulliSampler(1)(0, 0, NAMES) == NAMES
    assert [] in [BernoulliSampler(0.1)(0, r, NAMES) for r in range(10)]


@pytest.mark.parametrize("p", [0, 0.0, -0.1, 1.1, 2, math.nan, math.inf, True, False])
def test_impossible_probabilities_are_refused(p: Any) -> None:
    with pytest.raises(FederatedError, match=rf"BernoulliSampler\(probability={p!r}\): it must lie in \(0, 1\]"):
        BernoulliSampler(p)


def test_impossible_probabilities_of_one_client_are_refused_by_name() -> None:
    with pytest.raises(FederatedError, match=r"weight of client 'b' must be a number in \[0, 1\], found 1.5"):
        BernoulliSampler({"a": 1.0, "b": 1.5})
    with pytest.raises(FederatedError, match=r"1 clients have no weight.* such as 'd'"):
        BernoulliSampler({"a": 1.0, "b": 0.5, "c": 0.5})(0, 0, NAMES)


# ------------------------------------------------------------------ availability


def attendance(sampler: AvailabilitySampler, n: int, day: int, days: int, seed: int = 0) -> np.ndarray:
    """Return how often each client [n] came at each hour [day] over many days."""
    found = np.zeros((day, n))
    for r in range(day * days):
        found[r % day, sampler(seed, r, range(n))] += 1
    return found / days


@pytest.mark.thorough
def test_availability_swings_over_the_day_by_the_clients_longitude() -> None:
    n, day, days = 6, 8, 250
    found = attendance(AvailabilitySampler(n, rounds_per_day=day, low=0.1, high=0.9), n, day, days)
    # (low + high) / 2 + (high - low) / 2 * cos(2 pi (hour / day - phase)): the first harmonic has amplitude 0.4 / 2
    harmonic = np.exp(-2j * np.pi * np.arange(day) / day) @ found / day
    tolerance = 5 * 0.5 / math.sqrt(day * days)
    np.testing.assert_allclose(found.mean(axis=0), 0.5, atol=tolerance)
    np.testing.assert_allclose(np.abs(harmonic), 0.2, atol=tolerance)
    phases = np.sort(-np.angle(harmonic) / (2 * np.pi) % 1.0)
    assert np.diff(phases).max() > 0.01  # longitudes differ
    second = np.exp(-4j * np.pi * np.arange(day) / day) @ found / day
    np.testing.assert_allclose(np.abs(second), 0.0, atol=tolerance)


@pytest.mark.thorough
def test_longitudes_are_the_seeds_alone() -> None:
    n, day, days = 6, 4, 150
    sampler = AvailabilitySampler(n, rounds_per_day=day, low=0.0, high=1.0)
    first, later, other = (attendance(sampler, n, day, days, seed) for seed in (0, 0, 1))
    assert np.array_equal(first, later)
    assert np.abs(first - other).max() > 0.3


@pytest.mark.thorough
def test_a_second_cohort_is_of_clients_at_the_same_longitudes() -> None:
    n, day = 40, 8
    sampler = AvailabilitySampler(n, rounds_per_day=day, low=0.0, high=1.0)
    counts = np.zeros((2, day, n))
    for r in range(day * 60):
        for row, seed in enumerate((0, 12345)):
            counts[row, r % day, draw(sampler, seed, r, range(n), run_seed=0)] += 1
    work, gradient = counts / 60
    assert not np.array_equal(work, gradient)  # draws of their own
    assert np.abs(work - gradient).max() < 0.45  # five standard deviations of a difference
    elsewhere = attendance(sampler, n, day, 60, seed=12345)
    assert np.abs(work - elsewhere).max() > 0.8


def test_a_sampler_of_ones_own_is_asked_itself() -> None:
    class Own(AvailabilitySampler):
        def __call__(self, seed: int, round: int, population: Sequence[Any]) -> list[Any]:
            return [population[round]]

    assert draw(Own(2), 7, 1, NAMES, run_seed=0) == ["b"]


@pytest.mark.thorough
def test_availability_without_a_swing_is_a_coin_with_a_cap() -> None:
    assert AvailabilitySampler(3, low=1.0, high=1.0)(0, 0, ["a", "b", "c"]) == ["a", "b", "c"]
    assert AvailabilitySampler(3, low=0.0, high=0.0)(0, 0, NAMES) == []
    rounds, sampler = 3000, AvailabilitySampler(2, low=0.5, high=0.5)
    sizes = Counter(len(sampler(0, r, range(3))) for r in range(rounds))
    for size, p in {0: 1 / 8, 1: 3 / 8, 2: 4 / 8}.items():
        assert_frequency(sizes[size], p, rounds)


@pytest.mark.thorough
def test_all_who_are_available_are_equally_likely() -> None:
    rounds, sampler = 3000, AvailabilitySampler(1, low=1.0, high=1.0)
    for count in counts(sampler, range(4), rounds).values():
        assert_frequency(count, 1 / 4, rounds)


@pytest.mark.parametrize("span", [(0.9, 0.1), (-0.1, 0.5), (0.5, 1.1), (math.nan, 0.5)])
def test_impossible_availabilities_are_refused(span: tuple[float, float]) -> None:
    with pytest.raises(FederatedError, match=rf"0 <= low <= high <= 1, found low={span[0]}, high={span[1]}"):
        AvailabilitySampler(1, low=span[0], high=span[1])


@pytest.mark.parametrize("day", [0.0, -1, math.inf, math.nan])
def test_impossible_days_are_refused(day: float) -> None:
    with pytest.raises(
        FederatedError, match=rf"\(rounds_per_day={day}\): rounds_per_day must be a finite number in \(0, inf\)"
    ):
        AvailabilitySampler(1, rounds_per_day=day)


# ------------------------------------------------------------------ samplers of the user's own


class TwoArguments:
    def __call__(self, seed: int, round: int) -> list[int]:
        return [seed, round]


class ThreeArguments:
    def __call__(self, seed: int, round: int, population: Sequence[int]) -> list[int]:
        return [seed, round, len(population)]


@pytest.mark.parametrize(
    ("sampler", "want"),
    [
        (lambda seed, round: [seed, round], [5, 7]),
        (lambda s, r, clients: [s, r, len(clients)], [5, 7, 4]),
        (lambda *args: [*args[:2], len(args)], [5, 7, 3]),
        (lambda seed, round, *, extra=1: [seed, extra], [5, 1]),
        (TwoArguments(), [5, 7]),
        (ThreeArguments(), [5, 7, 4]),
        (partial(lambda k, seed, round: [k, seed, round], 3), [3, 5, 7]),
        (lambda seed, round: (i for i in (1, 2)), [1, 2]),
        (lambda seed, round: (1, 2), [1, 2]),
        (lambda seed, round: [], []),
        (lambda seed, round: torch.tensor([2, 0]), [2, 0]),
        (lambda seed, round: np.array([2, 0]), [2, 0]),
        (lambda seed, round: [np.int64(3), torch.tensor(1)], [3, 1]),
        (lambda seed, round: ["b", "b"], ["b", "b"]),
    ],
)
def test_samplers_take_two_or_three_arguments_and_return_any_iterable(sampler: Any, want: list[Any]) -> None:
    cohort = draw(sampler, 5, 7, NAMES, run_seed=0)
    assert cohort == want
    assert all(type(i) in (int, str) for i in cohort)


@pytest.mark.parametrize("found", [None, 3, "abc", {1, 2}, torch.tensor(3)])
def test_what_is_no_list_of_ids_is_refused(found: Any) -> None:
    with pytest.raises(
        FederatedError, match=re.escape(f"must return a list of client ids, found {found!r} in round 7")
    ):
        draw(lambda seed, round: found, 0, 7, NAMES, run_seed=0)


def test_weights_far_apart_are_all_positive() -> None:
    sampler = WeightedSampler(3, {"a": 1e308, "b": 0.0, "c": 5e-324, "d": 1e-323}, replacement=False)
    assert all(sampler(0, r, NAMES) == ["a", "c", "d"] for r in range(10))


@pytest.mark.parametrize("unit", [1e308, 5e-324])
@pytest.mark.parametrize("replacement", [True, False])
def test_the_unit_of_weights_does_not_matter(unit: float, replacement: bool) -> None:
    drawn = [WeightedSampler(2, dict.fromkeys(NAMES, u), replacement) for u in (unit, 1.0)]
    assert [drawn[0](0, r, NAMES) for r in range(20)] == [drawn[1](0, r, NAMES) for r in range(20)]


@pytest.mark.parametrize(
    "found",
    [[1, True], np.array([True, False]), [torch.tensor(1.0)], [1.0], [None], [[1]], [1, torch.tensor([1, 2])]],
    ids=repr,
)
def test_truths_and_fractions_are_no_ids(found: Any) -> None:
    with pytest.raises(FederatedError, match=r"must return client ids, ints or strs, found .* in round 7"):
        draw(lambda seed, round: found, 0, 7, range(3), run_seed=0)
