"""Cohorts depend only on (seed, round), have the promised sizes and frequencies, or are refused by name."""

import math
import re
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed import ClientError, FederatedDataModule, FederatedError, FederatedTrainer
from lightning_fed.algorithms import FedAvg, FedDane, FedExP, FedProx, Mime, Scaffold
from lightning_fed.server import (
    ClientClock,
    CoordinateMedian,
    FedBuff,
    OortSampler,
    PowerOfChoiceSampler,
    SystemsHeterogeneity,
    UpdateNormSampler,
)
from lightning_fed.server.participation import Population
from lightning_fed.server.sampling import (
    AvailabilitySampler,
    BernoulliSampler,
    RoundRobinSampler,
    UniformSampler,
    WeightedSampler,
    draw,
)
from tests.helpers.engines import SIZES, Ordinary, Record, assert_close, run, state_of
from tests.helpers.processes import in_processes
from tests.helpers.selection import few
from tests.helpers.training import QUIET, clients, data, parameters, same, trainer

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
    """Check a binomial count within five standard deviations."""
    assert abs(found - p * trials) <= 5 * math.sqrt(p * (1 - p) * trials), (found, p * trials)


# ------------------------------------------------------------------ all samplers


@pytest.mark.parametrize("sampler", ALL, ids=repr)
def test_cohort_depends_only_on_seed_and_round(sampler: Any) -> None:
    first = [sampler(3, r, NAMES) for r in range(30)]
    torch.manual_seed(1)
    torch.rand(5)
    backwards = [sampler(3, r, list(NAMES)) for r in reversed(range(30))]
    assert backwards[::-1] == first


@pytest.mark.parametrize("sampler", [s for s in ALL if not isinstance(s, RoundRobinSampler)], ids=repr)
def test_cohorts_differ_across_seeds_and_rounds(sampler: Any) -> None:
    first = [sampler(0, r, NAMES) for r in range(30)]
    assert [sampler(1, r, NAMES) for r in range(30)] != first
    assert any(cohort != first[0] for cohort in first)


@pytest.mark.parametrize("sampler", [s for s in ALL if not isinstance(s, RoundRobinSampler)], ids=repr)
@pytest.mark.parametrize("seed", range(5))
def test_cohorts_follow_the_population_order(sampler: Any, seed: int) -> None:
    population = ["d", "a", "c", "b"]
    for r in range(20):
        positions = [population.index(i) for i in sampler(seed, r, population)]
        assert positions == sorted(positions)


@pytest.mark.parametrize(
    "sampler", [s for s in ALL if not (isinstance(s, WeightedSampler) and s.replacement)], ids=repr
)
def test_cohort_has_no_duplicate_clients(sampler: Any) -> None:
    for r in range(50):
        cohort = sampler(0, r, NAMES)
        assert len(set(cohort)) == len(cohort)


@pytest.mark.parametrize(
    "make",
    [UniformSampler, RoundRobinSampler, AvailabilitySampler, partial(WeightedSampler, replacement=False)],
    ids=str,
)
def test_more_clients_than_the_population_are_rejected(make: Callable[..., Any]) -> None:
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
def test_invalid_numbers_of_clients_are_rejected(make: Callable[..., Any], k: Any, message: str) -> None:
    with pytest.raises(FederatedError, match=f"clients_per_round.*{message}"):
        make(k)


@pytest.mark.parametrize(
    ("k", "n", "want"),
    [(3, 10, 3), (1, 10, 1), (1.0, 10, 10), (0.25, 10, 2), (0.5, 5, 2), (0.01, 10, 1), (0.34, 100, 34), (1.0, 1, 1)],
)
def test_float_is_a_share_and_int_is_a_count(k: float, n: int, want: int) -> None:
    for sampler in (UniformSampler(k), RoundRobinSampler(k)):
        assert sampler.count(n) == want
        assert len(sampler(0, 0, range(n))) == want


@pytest.mark.parametrize("sampler", ALL, ids=repr)
def test_sampler_repr_round_trips(sampler: Any) -> None:
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


def test_full_participation_returns_all_clients_in_order() -> None:
    population = ["z", 5, "a"]
    assert UniformSampler()(4, 2, population) == population
    assert UniformSampler(3)(4, 2, population) == population


def test_uniform_draws_every_subset_equally_often() -> None:
    rounds = 4000
    found = Counter(tuple(UniformSampler(2)(0, r, range(5))) for r in range(rounds))
    assert set(found) == set(combinations(range(5), 2))
    for count in found.values():
        assert_frequency(count, 1 / 10, rounds)


def test_uniform_draws_do_not_materialize_the_population() -> None:
    population, sampler = range(10**6), UniformSampler(100)
    sampler(0, 0, population)
    tracemalloc.start()
    cohort = sampler(0, 1, population)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(cohort)) == 100
    assert peak < 200_000  # a list of the ids alone would be eight million bytes
    assert max(cohort) > 500_000


def test_uniform_reads_only_the_drawn_items_of_a_sequence() -> None:
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
def test_round_robin_visits_clients_equally_often(n: int, k: int) -> None:
    if k <= n:
        assert counts(RoundRobinSampler(k), range(n), rounds=n) == dict.fromkeys(range(n), k)


# ------------------------------------------------------------------ weighted


def test_weights_with_replacement_are_draw_probabilities() -> None:
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


def test_replacement_supports_more_draws_than_clients() -> None:
    sampler = WeightedSampler(7, {"a": 1, "b": 1})
    assert len(sampler(0, 0, ["a", "b"])) == 7
    assert sampler.count(2) == 7
    assert WeightedSampler(0.5, {"a": 1, "b": 1}).count(10) == 5


@pytest.mark.thorough
def test_weights_without_replacement_draw_sequentially() -> None:
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
def test_clients_with_zero_weight_are_never_drawn(weights: list[float], k: int, replacement: bool, round: int) -> None:
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
def test_extreme_random_values_never_draw_zero_weight_clients(share: float, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch, "rand", lambda k, **_: torch.full((k,), share, dtype=torch.float64))
    sampler = WeightedSampler(2, {"a": 0.0, "b": 0.1, "c": 0.7, "d": 0.0})
    assert sampler(0, 0, NAMES) == (["b", "b"] if share == 0 else ["c", "c"])
    # the product of the share and the smallest positive float rounds up to that float
    assert WeightedSampler(2, {"a": 0.0, "b": 5e-324, "c": 0.0})(0, 0, NAMES[:3]) == ["b", "b"]


def test_too_few_positive_weights_without_replacement_are_rejected() -> None:
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
def test_bernoulli_draws_each_client_independently() -> None:
    rounds, p = 3000, {"a": 0.0, "b": 0.2, "c": 0.7, "d": 1.0}
    cohorts = [BernoulliSampler(p)(0, r, NAMES) for r in range(rounds)]
    found = Counter(i for cohort in cohorts for i in cohort)
    assert found["a"] == 0
    assert found["d"] == rounds
    assert_frequency(found["b"], 0.2, rounds)
    assert_frequency(found["c"], 0.7, rounds)
    assert_frequency(sum({"b", "c"} <= set(cohort) for cohort in cohorts), 0.14, rounds)


def test_single_probability_yields_binomial_cohort_sizes() -> None:
    rounds, n, p = 3000, 4, 0.25
    sizes = Counter(len(BernoulliSampler(p)(0, r, range(n))) for r in range(rounds))
    for size in range(n + 1):
        assert_frequency(sizes[size], math.comb(n, size) * p**size * (1 - p) ** (n - size), rounds)


def test_bernoulli_cohorts_may_be_empty_or_complete() -> None:
    assert BernoulliSampler(1)(0, 0, NAMES) == NAMES
    assert [] in [BernoulliSampler(0.1)(0, r, NAMES) for r in range(10)]


@pytest.mark.parametrize("p", [0, 0.0, -0.1, 1.1, 2, math.nan, math.inf, True, False])
def test_invalid_probabilities_are_rejected(p: Any) -> None:
    with pytest.raises(FederatedError, match=rf"BernoulliSampler\(probability={p!r}\): it must lie in \(0, 1\]"):
        BernoulliSampler(p)


def test_invalid_probability_of_one_client_is_rejected() -> None:
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
def test_availability_varies_over_the_day_with_client_longitude() -> None:
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
def test_longitudes_depend_only_on_the_seed() -> None:
    n, day, days = 6, 4, 150
    sampler = AvailabilitySampler(n, rounds_per_day=day, low=0.0, high=1.0)
    first, later, other = (attendance(sampler, n, day, days, seed) for seed in (0, 0, 1))
    assert np.array_equal(first, later)
    assert np.abs(first - other).max() > 0.3


@pytest.mark.thorough
def test_second_cohort_uses_the_same_longitudes() -> None:
    n, day = 40, 8
    sampler = AvailabilitySampler(n, rounds_per_day=day, low=0.0, high=1.0)
    counts = np.zeros((2, day, n))
    for r in range(day * 60):
        for row, seed in enumerate((0, 12345)):
            counts[row, r % day, draw(sampler, seed, r, range(n), run_seed=0)] += 1
    work, gradient = counts / 60
    assert not np.array_equal(work, gradient)  # each has its own draws
    assert np.abs(work - gradient).max() < 0.45  # five standard deviations of a difference
    elsewhere = attendance(sampler, n, day, 60, seed=12345)
    assert np.abs(work - elsewhere).max() > 0.8


def test_overridden_availability_sampler_call_is_used() -> None:
    class Own(AvailabilitySampler):
        def __call__(self, seed: int, round: int, population: Sequence[Any]) -> list[Any]:
            return [population[round]]

    assert draw(Own(2), 7, 1, NAMES, run_seed=0) == ["b"]


@pytest.mark.thorough
def test_constant_availability_is_capped_bernoulli_sampling() -> None:
    assert AvailabilitySampler(3, low=1.0, high=1.0)(0, 0, ["a", "b", "c"]) == ["a", "b", "c"]
    assert AvailabilitySampler(3, low=0.0, high=0.0)(0, 0, NAMES) == []
    rounds, sampler = 3000, AvailabilitySampler(2, low=0.5, high=0.5)
    sizes = Counter(len(sampler(0, r, range(3))) for r in range(rounds))
    for size, p in {0: 1 / 8, 1: 3 / 8, 2: 4 / 8}.items():
        assert_frequency(sizes[size], p, rounds)


@pytest.mark.thorough
def test_available_clients_are_drawn_equally_often() -> None:
    rounds, sampler = 3000, AvailabilitySampler(1, low=1.0, high=1.0)
    for count in counts(sampler, range(4), rounds).values():
        assert_frequency(count, 1 / 4, rounds)


@pytest.mark.parametrize("span", [(0.9, 0.1), (-0.1, 0.5), (0.5, 1.1), (math.nan, 0.5)])
def test_invalid_availabilities_are_rejected(span: tuple[float, float]) -> None:
    with pytest.raises(FederatedError, match=rf"0 <= low <= high <= 1, found low={span[0]}, high={span[1]}"):
        AvailabilitySampler(1, low=span[0], high=span[1])


@pytest.mark.parametrize("day", [0.0, -1, math.inf, math.nan])
def test_invalid_rounds_per_day_are_rejected(day: float) -> None:
    with pytest.raises(
        FederatedError, match=rf"\(rounds_per_day={day}\): rounds_per_day must be a finite number in \(0, inf\)"
    ):
        AvailabilitySampler(1, rounds_per_day=day)


# ------------------------------------------------------------------ user-defined samplers


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
def test_samplers_support_two_or_three_arguments_and_any_iterable(sampler: Any, want: list[Any]) -> None:
    cohort = draw(sampler, 5, 7, NAMES, run_seed=0)
    assert cohort == want
    assert all(type(i) in (int, str) for i in cohort)


@pytest.mark.parametrize("found", [None, 3, "abc", {1, 2}, torch.tensor(3)])
def test_sampler_result_that_is_not_a_list_is_rejected(found: Any) -> None:
    with pytest.raises(
        FederatedError, match=re.escape(f"must return a list of client ids, found {found!r} in round 7")
    ):
        draw(lambda seed, round: found, 0, 7, NAMES, run_seed=0)


def test_weights_of_extreme_magnitudes_stay_positive() -> None:
    sampler = WeightedSampler(3, {"a": 1e308, "b": 0.0, "c": 5e-324, "d": 1e-323}, replacement=False)
    assert all(sampler(0, r, NAMES) == ["a", "c", "d"] for r in range(10))


@pytest.mark.parametrize("unit", [1e308, 5e-324])
@pytest.mark.parametrize("replacement", [True, False])
def test_cohorts_are_invariant_to_the_scale_of_weights(unit: float, replacement: bool) -> None:
    drawn = [WeightedSampler(2, dict.fromkeys(NAMES, u), replacement) for u in (unit, 1.0)]
    assert [drawn[0](0, r, NAMES) for r in range(20)] == [drawn[1](0, r, NAMES) for r in range(20)]


@pytest.mark.parametrize(
    "found",
    [[1, True], np.array([True, False]), [torch.tensor(1.0)], [1.0], [None], [[1]], [1, torch.tensor([1, 2])]],
    ids=repr,
)
def test_booleans_and_floats_are_rejected_as_ids(found: Any) -> None:
    with pytest.raises(FederatedError, match=r"must return client ids, ints or strs, found .* in round 7"):
        draw(lambda seed, round: found, 0, 7, range(3), run_seed=0)


class Turns:
    """A user's sampler: the two clients that have taken the fewest steps, by their reports."""

    def __init__(self, state: Any = None) -> None:
        self.times: dict[Any, Any] = {} if state is None else state

    def __call__(self, seed: int, round: int, population: Sequence[Any]) -> list[Any]:
        return sorted(population, key=lambda i: (float(self.times.get(i, 0)), i))[:2]

    def update(self, round: int, reports: Mapping[Any, Any]) -> None:
        for client_id, report in reports.items():
            self.times[client_id] = self.times.get(client_id, 0) + report.steps

    def state_dict(self) -> dict[str, Any]:
        return {"times": self.times}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.times = state_dict["times"]


CLOCK = ClientClock(3.0, slow_share=0.4, spread=0.3)
SAMPLERS: dict[str, Callable[[], Any]] = {
    "fresh losses": partial(PowerOfChoiceSampler, 2, 4),
    "last losses": partial(PowerOfChoiceSampler, 2, 4, losses="last"),
    "Oort": partial(OortSampler, 3, exploration=0.4, clock=CLOCK, pacer_step=2.0, window=1),
    "update norms": partial(UpdateNormSampler, 2),
    "a user's": Turns,
}
FOUR: dict[str, Any] = {"clients_per_round": None, "max_rounds": 4}


def cohorts(record: Record) -> list[Any]:
    return [report.cohort for report in record.rounds]


def ran(name: str, engine: str = "sequential", **options: Any) -> tuple[FederatedTrainer, Record]:
    record = Record()
    options = {"sampler": SAMPLERS[name](), **options} if name else options
    return run(engine, callbacks=[record], **{**FOUR, **options}), record


def learned(t: FederatedTrainer) -> dict[str, Any]:
    sampler: Any = t.fit_loop.settings.sampler
    return sampler.state_dict()


class Fails(Ordinary):
    """Fails on the data of one client."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if bool((batch[0] > 90).any()):
            raise RuntimeError("these examples are bad")
        loss: torch.Tensor = super().training_step(batch, batch_idx)
        return loss


def spoiled() -> Any:
    parts = clients(SIZES)
    parts[3].tensors[0][0] = 99.0
    return FederatedDataModule(parts, batch_size=4)


# ------------------------------------------------------------------ the contract


@pytest.mark.thorough
@pytest.mark.parametrize("name", SAMPLERS)
def test_engines_draw_equal_cohorts_and_resume_with_identical_bits(name: str, tmp_path: Path) -> None:
    whole, record = ran(name)
    at_once, other = ran(name, "vectorized")
    assert cohorts(other) == cohorts(record)
    assert_close(state_of(whole), state_of(at_once))
    for engine, wanted in (("sequential", whole), ("vectorized", at_once)):
        half, _ = ran(name, engine, max_rounds=2)
        path = tmp_path / f"{engine}.ckpt"
        half.save_checkpoint(path)
        torch.load(path, weights_only=True)
        resumed, rest = ran(name, engine, ckpt_path=path)
        assert cohorts(rest) == cohorts(record)[2:]
        assert same(state_of(resumed), state_of(wanted))
        assert same(learned(resumed), learned(wanted))


def of_all(names: Sequence[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        t, record = ran(name, strategy="clients", devices=2)
        found[name] = {"cohorts": cohorts(record), "learned": learned(t), "state": state_of(t)}
    return found


@pytest.mark.thorough
def test_two_processes_draw_the_cohorts_of_one(tmp_path: Path) -> None:
    outcomes = in_processes(partial(of_all, list(SAMPLERS)), tmp_path)
    for outcome in outcomes:
        assert not outcome.error, outcome.trace
    first, second = (outcome.value for outcome in outcomes)
    for name in SAMPLERS:
        alone, record = ran(name)
        for part in (first[name], second[name]):
            assert part["cohorts"] == cohorts(record), name
            assert_close(state_of(alone), part["state"])
        assert same(first[name]["learned"], second[name]["learned"])


def of_split_batches() -> dict[str, Any]:
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2}
    t, record = ran("Oort", sampler=OortSampler(2, clock="reports", pacer_step=1e-4), **options)
    _, fresh = ran("fresh losses", **options)
    with pytest.raises(ClientError) as caught:
        ran("", make=Fails, datamodule=spoiled, sampler=PowerOfChoiceSampler(2, 6), **options)
    return {
        "by time": (cohorts(record), learned(t)),
        "fresh losses": cohorts(fresh),
        "failed": "client 3" in str(caught.value).lower(),
    }


@pytest.mark.thorough
def test_split_batch_processes_draw_equal_cohorts_and_end_together(tmp_path: Path) -> None:
    first, second = in_processes(of_split_batches, tmp_path)
    assert not first.error, first.trace
    assert first.value == second.value
    assert first.value["fresh losses"] == cohorts(ran("fresh losses")[1])
    assert first.value["failed"]


@pytest.mark.parametrize("method", few([Scaffold(), FedDane(0.1), Mime(), FedProx(0.1, adaptive=True)], []), ids=repr)
def test_fresh_losses_support_every_kind_of_method(method: Any) -> None:
    whole, record = ran("fresh losses", algorithm=method)
    at_once, other = ran("fresh losses", "vectorized", algorithm=method)
    assert cohorts(other) == cohorts(record)
    assert_close(state_of(whole), state_of(at_once))


# ------------------------------------------------------------------ the cohort of a round


def test_highest_fresh_losses_are_selected_and_counted_in_bytes() -> None:
    losses, asked = list[dict[Any, float]](), list[list[Any]]()
    sampler = PowerOfChoiceSampler(2, 4)

    class Looks(Record):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            loop = trainer.fit_loop
            asked.append(sampler.needs_losses_of(0, loop.round, loop.population))
            losses.append(loop.training_losses(asked[-1]))

    record = Looks()
    fitted = run("sequential", sampler=sampler, callbacks=[record], **FOUR)
    x = fitted.fit_loop.state.x.nbytes
    for report, of_round in zip(record.rounds, losses, strict=True):
        assert set(report.cohort) == set(sorted(of_round, key=lambda i: -of_round[i])[:2])
        assert (report.bytes_up, report.bytes_down) == (2 * x + 4 * 8, 4 * x)
    plain = Record()
    run("sequential", sampler=lambda seed, round: record.rounds[round].cohort, callbacks=[plain], **FOUR)
    assert all(torch.equal(a, b) for a, b in zip(plain.x, record.x, strict=True))  # measuring does not change the run


def test_candidate_with_a_failing_loss_stops_the_run_or_is_dropped() -> None:
    options = {"make": Fails, "datamodule": spoiled, "sampler": PowerOfChoiceSampler(2, 6), "max_rounds": 2}
    with pytest.raises(ClientError, match="[Cc]lient 3.*its training loss.*these examples are bad"):
        ran("fresh losses", **options)
    _, record = ran("fresh losses", on_client_error="drop", **options)
    for report in record.rounds:
        assert len(report.cohort) == 2
        assert "these examples are bad" in report.failed[3]


def with_nan(*places: int) -> FederatedDataModule:
    parts = clients(SIZES)
    for place in places:
        parts[place].tensors[0][0] = float("nan")
    return FederatedDataModule(parts, batch_size=4)


@pytest.mark.parametrize("engine", few(["sequential", "vectorized"], ["sequential"]))
def test_candidate_with_a_non_finite_loss_counts_as_failed(engine: str) -> None:
    options: dict[str, Any] = {"datamodule": partial(with_nan, 3), "sampler": PowerOfChoiceSampler(2, 6)}
    with pytest.raises(ClientError, match="Client 3 has the loss nan at the server model of round 0.*look at its data"):
        ran("fresh losses", engine, **options)
    _, record = ran("fresh losses", engine, on_client_error="drop", **options)
    assert all(len(report.cohort) == 2 and 3 in report.failed for report in record.rounds)
    options["datamodule"] = partial(with_nan, 0, 1, 2, 3)
    with pytest.raises(ClientError, match="4 of 6 clients failed in round 0, more than max_failed_share=0.5 allows"):
        ran("fresh losses", engine, on_client_error="drop", **options)


class OnDemand(FederatedDataModule):
    """Builds clients on demand. One of them cannot be built."""

    client_ids = range(len(SIZES))

    def client_dataset(self, client_id: Any) -> Any:
        if client_id == 3:
            raise OSError("the disk is gone")
        return clients(SIZES)[client_id]


def test_candidate_that_cannot_be_built_counts_as_failed() -> None:
    sampler = PowerOfChoiceSampler(2, 6, weights=dict.fromkeys(range(len(SIZES)), 1.0))
    options: dict[str, Any] = {"datamodule": partial(OnDemand, batch_size=4), "sampler": sampler, "max_rounds": 1}
    with pytest.raises(ClientError, match="Client 3 failed when .*: OSError: the disk is gone"):
        ran("fresh losses", **options)
    _, record = ran("fresh losses", on_client_error="drop", **options)
    assert len(record.rounds[0].cohort) == 2
    assert "the disk is gone" in record.rounds[0].failed[3]


def test_step_weights_updates_by_share_over_probability() -> None:
    _, record = ran("update norms", max_rounds=3)
    torch.manual_seed(3)
    x, sampler = parameters(Ordinary()).double(), UpdateNormSampler(2)
    population = Population(range(len(SIZES)), SIZES.__getitem__, SIZES)
    ends = iter(zip(record.reports, record.models, strict=True))
    for number, report in enumerate(record.rounds):
        p = sampler.probabilities(number, population)
        share = {i: SIZES[int(i)] / sum(SIZES) / float(p[int(i)]) for i in report.cohort}
        assert dict(report.weights) == pytest.approx(share, rel=1e-12)
        step = torch.zeros_like(x)
        for own, y in (next(ends) for _ in report.cohort):
            step += share[own.client_id] * (y - x)
        torch.testing.assert_close(record.x[number], x + step, rtol=1e-12, atol=1e-12)
        x = record.x[number]
        sampler.update(number, report.clients)


# ------------------------------------------------------------------ one state for each run


@pytest.mark.thorough
def test_runs_learn_separately_and_a_second_fit_continues() -> None:
    sampler = OortSampler(2)
    whole, record = ran("Oort", sampler=sampler)
    assert sampler.state_dict() == OortSampler(2).state_dict()
    _, again = ran("Oort", sampler=sampler)
    assert cohorts(again) == cohorts(record)
    torch.manual_seed(3)
    twice = trainer(sampler=sampler, callbacks=[rest := Record()], **{"max_rounds": 2, "precision": "64-true"})
    module, own = whole.lightning_module.__class__(), data(SIZES)
    twice.fit(module, own)
    twice.max_rounds = 4
    twice.fit(module, own)
    assert cohorts(rest) == cohorts(record)
    assert same(state_of(twice), state_of(whole))


def test_initial_sampler_state_is_used_by_every_run(tmp_path: Path) -> None:
    fitted, record = ran("a user's", sampler=Turns({0: 99, 1: 99}), max_rounds=1)
    ran("", sampler=UniformSampler(2), max_rounds=1)[0].save_checkpoint(tmp_path / "other.ckpt")
    fitted.max_rounds = 2
    with pytest.warns(UserWarning, match="nothing that a sampler has learned: Turns begins as in a new run"):
        fitted.fit(Ordinary(), data(SIZES), ckpt_path=tmp_path / "other.ckpt")
    assert cohorts(record) == [(2, 3)] * 2
    noted = fitted.fit_loop.run_state.state_dict()["sampler"]["state"]
    fitted.fit_loop.settings.sampler.times.clear()  # type: ignore[attr-defined]
    assert noted["times"].keys() == {0, 1, 2, 3}, "what a checkpoint holds is a copy"


def test_checkpoint_of_another_sampler_warns(tmp_path: Path) -> None:
    for name, told in (("last losses", "what PowerOfChoiceSampler has learned"), ("uniform", "nothing that a sampler")):
        half, _ = ran("Oort", max_rounds=1, sampler=SAMPLERS.get(name, partial(UniformSampler, 2))())
        half.save_checkpoint(tmp_path / "half.ckpt")
        with pytest.warns(UserWarning, match=f"The checkpoint holds {told}.*: OortSampler begins as in a new run"):
            ran("Oort", ckpt_path=tmp_path / "half.ckpt", max_rounds=2)


def test_invalid_sampler_state_in_a_checkpoint_is_rejected(tmp_path: Path) -> None:
    half, _ = ran("last losses", max_rounds=1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    saved["loops"]["fit_loop"]["state_dict"]["sampler"]["state"] = {"losses": {0: "high"}}
    torch.save(saved, tmp_path / "bad.ckpt")
    with pytest.raises(FederatedError, match=r"bad.ckpt does not fit this run: restoring what the sampler has learned"):
        ran("last losses", ckpt_path=tmp_path / "bad.ckpt")


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": type("Half", (), {"update": print, "__call__": print})()}, "has no method state_dict"),
        (
            {"sampler": UniformSampler(2), "gradient_sampler": OortSampler(2), "algorithm": FedDane(0.1)},
            r"gradient_sampler=OortSampler\(2, .* learns from reports, which only clients that train send",
        ),
        (
            {"sampler": OortSampler(2), "asynchronous": FedBuff(2, 3)},
            r"sampler=OortSampler\(2, .* cannot be combined with asynchronous=FedBuff",
        ),
        *(
            (
                {"sampler": UpdateNormSampler(2), **options},
                rf"sampler=UpdateNormSampler\(2, .*cannot be combined with {message}",
            )
            for options, message in (
                ({"algorithm": Scaffold()}, "Scaffold.*Use a method such as FedAvg"),
                ({"algorithm": FedExP()}, "FedExP"),
                ({"algorithm": Mime()}, "Mime"),
                ({"weighting": "steps"}, "weighting='steps', which is unknown for clients outside"),
                ({"aggregator": CoordinateMedian()}, "aggregator=CoordinateMedian.*Leave it unset"),
                ({"heterogeneity": SystemsHeterogeneity(0.5)}, "heterogeneity=.*Leave it unset"),
                ({"on_client_error": "drop"}, "on_client_error='drop'.*Leave it at 'raise'"),
            )
        ),
    ],
)
def test_incompatible_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        FederatedTrainer(**{**QUIET, "local_epochs": 1, **options})


class Asks(Turns):
    """Asks for losses in the given form."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.form = form

    def needs_losses_of(self, seed: int, round: int, population: Sequence[Any]) -> Any:
        return self.form

    def __call__(self, seed: int, round: int, population: Sequence[Any], losses: Any = ()) -> list[Any]:
        return list(losses)


def test_ids_to_measure_may_be_any_sequence() -> None:
    for form in (np.array([1, 4]), torch.tensor([1, 4]), (1, 4)):
        assert cohorts(ran("a user's", sampler=Asks(form), max_rounds=1)[1]) == [(1, 4)]
    with pytest.raises(FederatedError, match="sampler's needs_losses_of must return a list of client ids, found None"):
        ran("a user's", sampler=Asks(None), max_rounds=1)


def test_uncopyable_sampler_is_rejected() -> None:
    with pytest.raises(FederatedError, match="learns from reports, .* ended in TypeError: .*define __deepcopy__"):
        FederatedTrainer(**QUIET, local_epochs=1, sampler=Turns({"open": (i for i in ())}))


def test_unsafe_sampler_state_is_rejected_in_the_first_round() -> None:
    with pytest.raises(FederatedError, match=r"Turns.state_dict\(\) holds .*Path, which does not load without running"):
        ran("a user's", sampler=Turns({"x": Path("a")}), max_rounds=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        FederatedTrainer(**QUIET, algorithm=FedAvg(), local_epochs=1, sampler=SAMPLERS["Oort"]())
