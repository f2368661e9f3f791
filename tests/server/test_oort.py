"""Oort: utilities, draws, exploration and pacer against Algorithm 1 in NumPy."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from lightning_fed import FederatedError
from lightning_fed.core.rounds import ClientReport
from lightning_fed.server import ClientClock, OortSampler
from lightning_fed.server.participation import Population

NAMES = [f"c{i}" for i in range(12)]
SECONDS = {name: 1.0 + i for i, name in enumerate(NAMES)}


def report(name: str, loss: float, size: int = 10, seconds: float = 1.0, steps: int = 1, **metrics: float) -> Any:
    return ClientReport(name, size, steps, loss, metrics, 1.0, seconds)


@dataclass
class Reference:
    """Algorithm 1, without its draws."""

    step: float
    window: int
    clock: ClientClock
    epsilon: float = 0.9
    rounds: int = 0
    utility: dict[str, float] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    duration: dict[str, float] = field(default_factory=dict)
    history: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.preferred = self.step

    def begin(self) -> None:
        self.rounds += 1
        r, w = self.rounds - 1, self.window  # rounds that have ended
        if r >= 2 * w and sum(self.history[r - 2 * w : r - w]) > sum(self.history[r - w : r]):
            self.preferred += self.step

    def utilities(self) -> dict[str, float]:
        names = list(self.utility)
        most = np.quantile([self.utility[i] for i in names], 0.95)
        found = {}
        for i in names:
            util = min(self.utility[i], most) + np.sqrt(0.1 * np.log(self.rounds) / self.last[i])
            if self.preferred < self.duration[i]:
                util *= (self.preferred / self.duration[i]) ** 2
            found[i] = float(util)
        return found

    def end(self, reports: dict[str, Any]) -> None:
        for i, r in reports.items():
            self.utility[i] = r.size * math.sqrt(r.metrics["square"])
            self.last[i] = self.rounds
            self.duration[i] = self.clock.seconds_of(5, NAMES, NAMES.index(i), self.rounds - 1)
        self.history.append(sum(self.utility[i] for i in reports))
        if self.epsilon > 0.2:
            self.epsilon *= 0.98


def test_rounds_match_the_reference_algorithm() -> None:
    random, seed, k = np.random.default_rng(0), 5, 6
    clock = ClientClock(SECONDS, jitter=0.2)  # every round has its own times
    sampler = OortSampler(k, clock=clock, pacer_step=1.5, window=3, squared_loss="square")
    reference, raised, restarts = Reference(1.5, 3, clock), set(), 0
    for number in range(60):
        reference.begin()
        cohort = sampler(seed, number, NAMES)
        assert len(set(cohort)) == k
        assert cohort == sorted(cohort, key=NAMES.index)
        assert sampler.exploration_in(number) == pytest.approx(reference.epsilon)
        unexplored = [i for i in NAMES if i not in reference.utility]
        new = [i for i in cohort if i in unexplored]
        wanted = min(len(unexplored), round_half_up(reference.epsilon * k))
        assert len(new) == (wanted if len(reference.utility) >= k - wanted else k - len(reference.utility))
        if exploited := [i for i in cohort if i in reference.utility]:
            utilities = reference.utilities()
            cut = 0.95 * sorted(utilities.values(), reverse=True)[len(exploited) - 1]
            assert all(utilities[i] >= cut * (1 - 1e-12) for i in exploited)
            places = [NAMES.index(i) for i in utilities]
            found = sampler._utilities(seed, number, NAMES, places)
            assert found.tolist() == pytest.approx(list(utilities.values()), rel=1e-12)
        assert sampler._preferred == reference.preferred
        raised.add(reference.preferred)
        level = 1.0 if number < 20 else 0.97**number  # losses fall: the pacer has to act
        reports = {i: report(i, 0.0, size=3 + NAMES.index(i), square=level * random.uniform(0.1, 2)) for i in cohort}
        sampler.update(number, reports)
        reference.end(reports)
        if number % 7 == 0:  # continue with a new sampler that loads the state
            again = OortSampler(k, clock=clock, pacer_step=1.5, window=3, squared_loss="square")
            again.load_state_dict(sampler.state_dict())
            sampler, restarts = again, restarts + 1
    assert len(raised) > 3
    assert restarts > 5


SLOW: Any = {"clock": ClientClock(2.0, per_example=True), "pacer_step": 1.0}


def round_half_up(value: float) -> int:
    return math.floor(value + 0.5)


@pytest.mark.thorough
def test_admitted_clients_are_drawn_in_proportion_to_utility() -> None:
    sampler, rounds = OortSampler(1, exploration=0.0, cutoff=0.5, clip=1.0), 1500
    sampler.update(0, {i: report(i, loss) for i, loss in zip("abcd", (4.0, 3.0, 2.0, 1.0), strict=True)})
    found = Counter(sampler(seed, 0, list("abcd"))[0] for seed in range(rounds))  # log 1 = 0: no bonus
    for name, chance in {"a": 4 / 9, "b": 3 / 9, "c": 2 / 9}.items():
        assert abs(found[name] - chance * rounds) < 5 * math.sqrt(chance * (1 - chance) * rounds)
    assert "d" not in found


def test_shares_are_rounded_and_draws_are_independent() -> None:
    sampler = OortSampler(4, exploration=0.4)  # 1.6 of 4
    sampler.update(0, {i: report(i, 1.0) for i in "abcd"})
    assert len(set(sampler(0, 0, list("abcdefgh"))) & set("efgh")) == 2
    pair = OortSampler(2, exploration=0.5)
    pair.update(0, {i: report(i, 1.0) for i in "ab"})
    assert {tuple(pair(seed, 0, list("abcd"))) for seed in range(60)} == {(i, j) for i in "ab" for j in "cd"}


def test_unexplored_clients_are_drawn_by_speed() -> None:
    rounds, seconds = 1500, {"a": 1.0, "b": 2.0, "c": 4.0}
    sampler = OortSampler(1, clock=ClientClock(seconds), pacer_step=1.0)
    found = Counter(sampler(0, r, list("abc"))[0] for r in range(rounds))
    for name, chance in {"a": 4 / 7, "b": 2 / 7, "c": 1 / 7}.items():
        assert abs(found[name] - chance * rounds) < 5 * math.sqrt(chance * (1 - chance) * rounds)


def test_empty_clients_are_not_preferred_as_the_fastest() -> None:
    sizes = [0, 4, 0, 6, 0]  # unknown until clients are built
    population, sampler = Population(range(5), sizes.__getitem__), OortSampler(2, **SLOW)
    assert [sampler(0, r, population) for r in range(3)] == [[1, 3]] * 3
    sampler.update(0, {1: report(1, 1.0), 3: report(3, 1.0)})
    assert sampler(0, 1, population) == [1, 3]


def test_empty_clients_do_not_reduce_the_cohort_size() -> None:
    sizes, built = [0, 4, 0, 6, 0, 5], list[int]()  # unknown until clients are built

    def size_of(client: int) -> int:
        built.append(client)
        if client == 5:
            raise OSError("unreadable")
        return sizes[client]

    population, sampler = Population(range(6), size_of), OortSampler(2)
    cohorts = [sampler(0, r, population) for r in range(20)]
    assert {i for cohort in cohorts for i in cohort} == {1, 3, 5}  # the round reports failures
    assert {len(cohort) for cohort in cohorts} == {2}
    assert max(map(built.count, (0, 2, 4))) == 1
    sampler.update(0, {1: report(1, 1.0), 3: report(3, 1.0), 5: report(5, 0.1)})
    assert all(len(sampler(0, r, population)) == 2 for r in range(20))


def test_mean_loss_replaces_missing_squared_losses() -> None:
    sampler = OortSampler(2)
    sampler.update(0, {"a": report("a", 1.5, size=4), "b": report("b", -2.0, size=3), "c": report("c", 9.0, steps=0)})
    sampler.update(1, {"d": report("d", math.nan)})
    assert {i: row[:3] for i, row in sampler.state_dict()["clients"].items()} == {
        "a": [6.0, 1, 1],
        "b": [6.0, 1, 1],
        "c": [0.0, 1, 1],
        "d": [0.0, 2, 1],
    }
    with pytest.raises(FederatedError, match=r"squared_loss='square'\): client 'a' has logged no such value.*'acc'"):
        OortSampler(2, squared_loss="square").update(0, {"a": report("a", 1.0, acc=0.5)})


def test_reported_durations_scale_the_utility() -> None:
    sampler = OortSampler(1, exploration=0.0, clock="reports", pacer_step=2.0, clip=1.0)
    sampler.update(0, {"a": report("a", 1.0, seconds=1.0), "b": report("b", 1.0, seconds=4.0)})
    assert sampler._utilities(0, 0, ["a", "b"], [0, 1]).tolist() == pytest.approx([10.0, 10.0 * 0.25])


def test_clients_over_the_participation_limit_come_last() -> None:
    sampler = OortSampler(2, exploration=0.0, most_rounds=2)
    for number in range(3):
        sampler.update(number, {"a": report("a", 9.0)})
    sampler.update(3, {"b": report("b", 1.0), "c": report("c", 1.0)})
    assert all(sampler(0, r, list("abc")) == ["b", "c"] for r in range(20))
    sampler.update(4, {"c": report("c", 1.0)})  # its second round: the limit is 2
    assert all(sampler(0, r, list("abc")) == ["b", "c"] for r in range(20))
    sampler.update(5, {"c": report("c", 1.0)})
    drawn = {tuple(sampler(0, r, list("abc"))) for r in range(40)}
    assert drawn == {("a", "b"), ("b", "c")}  # b, and one of the others


@pytest.mark.parametrize("k", [1, 3, 4])
def test_cohort_always_has_the_requested_size(k: int) -> None:
    sampler = OortSampler(k, exploration=0.3)
    for number in range(8):
        cohort = sampler(1, number, list("abcd"))
        assert len(set(cohort)) == k
        sampler.update(number, {i: report(i, 0.0) for i in cohort})  # without utility


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exploration": 1.2}, r"exploration must be a finite number in \[0, 1\]"),
        ({"exploration_decay": -1}, r"exploration_decay must be a finite number in \[0, 1\]"),
        ({"cutoff": 2}, r"cutoff must be a finite number in \[0, 1\]"),
        ({"clip": 0}, r"clip must be a finite number in \(0, 1\]"),
        ({"clip": 1.5}, r"clip must be a finite number in \(0, 1\]"),
        ({"clock": 3.0}, "clock must be a ClientClock, 'reports' or None"),
        ({"clock": "reports"}, "Pass both, or neither"),
        ({"pacer_step": 2.0}, "Pass both, or neither"),
        ({"window": 0}, "window must be an integer of at least 1"),
        ({"most_rounds": 0}, "most_rounds must be"),
        ({"squared_loss": ""}, "squared_loss must be a string"),
    ],
)
def test_invalid_values_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        OortSampler(2, **options)
