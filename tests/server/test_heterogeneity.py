"""Stragglers, deadlines and dropout: the work that each client completes, and the effect on a run."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed import FederatedCallback, FederatedError
from lightning_fed.algorithms import FedAvg, FedNova, Scaffold, ServerOnly
from lightning_fed.server import BernoulliSampler, FedAvgM, SystemsHeterogeneity
from tests.helpers.training import data, parameters, same, seeded, trainer

K = 10
CLIENTS = list(range(100, 100 + K))


def completed(
    het: SystemsHeterogeneity, round: int, epochs: int = 4, steps: int = 40, seed: int = 0
) -> list[int | None]:
    return het(seed, round, CLIENTS, [epochs] * K, [steps] * K)


# ------------------------------------------------------------------ stragglers


@pytest.mark.parametrize(
    ("share", "clients", "want"),
    [(0.0, 10, 0), (0.5, 10, 5), (0.9, 10, 9), (1.0, 10, 10), (0.25, 10, 3), (0.24, 10, 2), (0.5, 1, 1), (0.5, 3, 2)],
)
def test_straggler_share_is_exact_in_every_round(share: float, clients: int, want: int) -> None:
    het = SystemsHeterogeneity(stragglers=share, policy="drop")
    for r in range(20):
        done = het(0, r, range(clients), [2] * clients, [6] * clients)
        assert done.count(None) == want
        assert done.count(6) == clients - want


def test_clients_are_stragglers_equally_often() -> None:
    rounds, het = 2000, SystemsHeterogeneity(stragglers=0.3, policy="drop")
    slow = Counter(i for r in range(rounds) for i, done in enumerate(completed(het, r)) if done is None)
    assert sum(slow.values()) == 3 * rounds
    for count in slow.values():
        assert abs(count - 0.3 * rounds) <= 5 * math.sqrt(0.3 * 0.7 * rounds)


@pytest.mark.parametrize("epochs", [2, 5, 20])
def test_straggler_epochs_are_uniform(epochs: int) -> None:
    rounds, het = 300, SystemsHeterogeneity(stragglers=1.0)
    found = Counter(done for r in range(rounds) for done in completed(het, r, epochs, steps=7 * epochs))
    assert set(found) == {7 * e for e in range(1, epochs + 1)}
    n, p = rounds * K, 1 / epochs
    for count in found.values():
        assert abs(count - n * p) <= 5 * math.sqrt(n * p * (1 - p))


@pytest.mark.parametrize("steps", [1, 2, 6])
def test_straggler_steps_are_uniform_within_a_single_epoch(steps: int) -> None:
    rounds, het = 300, SystemsHeterogeneity(stragglers=1.0)
    found = Counter(done for r in range(rounds) for done in completed(het, r, epochs=1, steps=steps))
    assert set(found) == set(range(1, steps + 1))
    n, p = rounds * K, 1 / steps
    for count in found.values():
        assert abs(count - n * p) <= 5 * math.sqrt(n * p * (1 - p))


@given(
    share=st.floats(0, 1),
    work=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=8),
    seed=st.integers(0, 2**40),
    round=st.integers(0, 1000),
)
def test_stragglers_complete_whole_epochs(share: float, work: list[tuple[int, int]], seed: int, round: int) -> None:
    epochs, steps = [e for e, _ in work], [e * per_epoch for e, per_epoch in work]
    done = SystemsHeterogeneity(stragglers=share)(seed, round, range(len(work)), epochs, steps)
    for n, (e, per_epoch) in zip(done, work, strict=True):
        assert n is not None
        assert 1 <= n <= e * per_epoch
        assert e == 1 or n % per_epoch == 0
    less = sum(n < s for n, s in zip(done, steps, strict=True))
    assert less <= math.floor(share * len(work) + 0.5)


# ------------------------------------------------------------------ deadline and dropout


def test_deadline_cuts_by_constant_log_normal_speeds() -> None:
    het = SystemsHeterogeneity(deadline=20, speed_spread=0.7)
    first = completed(het, 0, steps=10**6)
    assert all(completed(het, r, steps=10**6) == first for r in range(5))
    assert len(set(first)) > K // 2
    assert completed(het, 0, steps=10**6, seed=1) != first
    assert completed(het, 0, steps=15) == [min(n, 15) for n in first]
    # log(steps / deadline) is normal with mean 0 and the given spread
    n = 400
    many = SystemsHeterogeneity(deadline=1e6, speed_spread=0.7)(0, 0, range(n), [1] * n, [10**9] * n)
    logs = torch.tensor(many, dtype=torch.float64).div(1e6).log()
    assert abs(float(logs.mean())) < 5 * 0.7 / n**0.5
    assert abs(float(logs.std()) - 0.7) < 5 * 0.7 / (2 * n) ** 0.5


def test_speeds_are_independent_of_the_deadline() -> None:
    one, two = (SystemsHeterogeneity(deadline=d, speed_spread=1.0) for d in (1000, 2000))
    for a, b in zip(completed(one, 0, steps=10**9), completed(two, 3, steps=10**9), strict=True):
        assert b in (2 * a, 2 * a + 1)


def test_zero_speed_spread_completes_the_floored_deadline() -> None:
    assert completed(SystemsHeterogeneity(deadline=7.9, speed_spread=0), 0) == [7] * K
    assert set(completed(SystemsHeterogeneity(deadline=7.9, speed_spread=1e6), 0)) == {None, 40}
    assert completed(SystemsHeterogeneity(deadline=40, speed_spread=0), 0) == [40] * K
    assert completed(SystemsHeterogeneity(deadline=39.5, speed_spread=0, policy="drop"), 0) == [None] * K
    assert completed(SystemsHeterogeneity(deadline=40, speed_spread=0, policy="drop"), 0) == [40] * K


def test_client_without_a_step_in_time_is_dropped() -> None:
    assert completed(SystemsHeterogeneity(deadline=0.99, speed_spread=0), 0) == [None] * K


def test_dropout_drops_clients_with_its_probability() -> None:
    rounds, het = 400, SystemsHeterogeneity(dropout=0.3)
    done = [n for r in range(rounds) for n in completed(het, r)]
    assert set(done) == {None, 40}
    n = rounds * K
    assert abs(done.count(None) - 0.3 * n) <= 5 * math.sqrt(0.21 * n)


@pytest.mark.parametrize("policy", ["keep", "drop"])
def test_lost_clients_are_dropped_under_both_policies(policy: Any) -> None:
    het = SystemsHeterogeneity(dropout=0.5, policy=policy)
    assert [completed(het, r) for r in range(5)] == [completed(SystemsHeterogeneity(dropout=0.5), r) for r in range(5)]


# ------------------------------------------------------------------ all together


def test_default_settings_complete_all_steps() -> None:
    assert completed(SystemsHeterogeneity(), 3) == [40] * K


def test_causes_are_independent_and_the_minimum_applies() -> None:
    alone = {
        "stragglers": SystemsHeterogeneity(stragglers=0.6),
        "deadline": SystemsHeterogeneity(deadline=25),
        "dropout": SystemsHeterogeneity(dropout=0.4),
    }
    together = SystemsHeterogeneity(stragglers=0.6, deadline=25, dropout=0.4)
    for r in range(20):
        each = zip(*(completed(het, r) for het in alone.values()), strict=True)
        want = [None if lost is None else min(slow, in_time) for slow, in_time, lost in each]
        assert completed(together, r) == want


def test_drop_policy_drops_all_incomplete_clients() -> None:
    slow = SystemsHeterogeneity(stragglers=0.6, policy="drop")
    late = SystemsHeterogeneity(deadline=40)
    both = SystemsHeterogeneity(stragglers=0.6, deadline=40, policy="drop")
    seen = Counter[str]()
    for r in range(10):
        for s, t, done in zip(completed(slow, r), completed(late, r), completed(both, r), strict=True):
            assert done == (40 if s == 40 and t == 40 else None)
            seen[f"{s is None} {t != 40}"] += 1
    assert len(seen) == 4  # every combination came up


def test_completed_steps_depend_only_on_seed_and_round() -> None:
    het = SystemsHeterogeneity(stragglers=0.5, deadline=30, dropout=0.2)
    first = [completed(het, r) for r in range(10)]
    torch.manual_seed(5)
    assert [completed(het, r) for r in reversed(range(10))][::-1] == first
    assert [completed(het, r, seed=1) for r in range(10)] != first


@pytest.mark.parametrize(
    "settings", [{"stragglers": 1.0}, {"stragglers": 1.0, "deadline": 20, "dropout": 0.3}, {"dropout": 0.5}], ids=str
)
def test_client_draw_is_independent_of_its_cohort(settings: dict[str, Any]) -> None:
    het = SystemsHeterogeneity(**settings)
    for r in range(10):
        whole = dict(zip(CLIENTS, completed(het, r), strict=True))
        some = [107, 100, 103]
        assert het(0, r, some, [4] * 3, [40] * 3) == [whole[i] for i in some]


def test_client_without_steps_is_dropped() -> None:
    assert SystemsHeterogeneity(stragglers=1.0)(0, 0, [0, 1], [1, 1], [0, 1]) == [None, 1]


def test_empty_cohort() -> None:
    assert SystemsHeterogeneity(stragglers=0.5, dropout=0.5, deadline=3)(0, 0, [], [], []) == []


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("stragglers", -0.1, r"a finite number in \[0, 1\]"),
        ("stragglers", 1.1, r"a finite number in \[0, 1\]"),
        ("stragglers", math.nan, r"a finite number in \[0, 1\]"),
        ("stragglers", True, r"a finite number in \[0, 1\]"),
        ("stragglers", "half", r"a finite number in \[0, 1\]"),
        ("dropout", 1.0, r"a finite number in \[0, 1\)"),
        ("dropout", -0.1, r"a finite number in \[0, 1\)"),
        ("dropout", math.nan, r"a finite number in \[0, 1\)"),
        ("deadline", 0, r"a finite number in \(0, inf\)"),
        ("deadline", -3.0, r"a finite number in \(0, inf\)"),
        ("deadline", math.inf, r"a finite number in \(0, inf\)"),
        ("deadline", math.nan, r"a finite number in \(0, inf\)"),
        ("speed_spread", -1.0, r"a finite number in \[0, inf\)"),
        ("speed_spread", math.inf, r"a finite number in \[0, inf\)"),
    ],
)
def test_out_of_range_values_are_rejected(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(FederatedError, match=rf"SystemsHeterogeneity\({name}={value!r}\): {name} must be {allowed}"):
        SystemsHeterogeneity(**{name: value})


def test_unknown_policy_is_rejected() -> None:
    with pytest.raises(FederatedError, match="\\(policy='wait'\\): policy must be 'keep' or 'drop'"):
        SystemsHeterogeneity(policy="wait")  # type: ignore[arg-type]


def test_repr_round_trips() -> None:
    het = SystemsHeterogeneity(stragglers=0.5, policy="drop", dropout=0.1, deadline=30)
    again = eval(repr(het), {"SystemsHeterogeneity": SystemsHeterogeneity})  # our own text
    assert vars(again) == vars(het)


def test_methods_without_local_work_reject_heterogeneity() -> None:
    with pytest.raises(FederatedError, match="does not apply to ServerOnly, whose clients take no local steps"):
        trainer(algorithm=ServerOnly(), heterogeneity=SystemsHeterogeneity(), local_epochs=None)


# ------------------------------------------------------------------ in a run

SIZES = (13, 8, 21, 5, 16, 9)  # 4, 2, 6, 2, 4, 3 batches of four
BATCHES = [4, 2, 6, 2, 4, 3]


class Record(FederatedCallback):
    """Keeps every round's report, and the parameters and states after it."""

    def __init__(self) -> None:
        self.reports: list[Any] = []
        self.models: list[torch.Tensor] = []
        self.states: list[dict[str, Any]] = []

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        self.reports.append(round_report)
        self.models.append(parameters(pl_module).clone())
        self.states.append(copied(trainer.fit_loop.state.state_dict()))


def copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    return [copied(v) for v in value] if isinstance(value, list) else value


def record(rounds: int = 4, **kwargs: Any) -> Record:
    kept = Record()
    run = trainer(max_rounds=rounds, callbacks=kept, clients_per_round=kwargs.pop("clients_per_round", 1.0), **kwargs)
    run.fit(seeded(), data(SIZES))
    assert [report.round for report in kept.reports] == list(range(rounds))
    return kept


@pytest.mark.parametrize("algorithm", [FedAvg(), Scaffold(), FedNova()], ids=repr)
def test_partial_work_is_kept_and_counted(algorithm: Any) -> None:
    het = SystemsHeterogeneity(stragglers=0.5)
    kept = record(2, algorithm=algorithm, heterogeneity=het, local_epochs=3)
    for report in kept.reports:
        want = het(0, report.round, range(6), [3] * 6, [3 * n for n in BATCHES])
        assert dict(report.steps) == dict(enumerate(want))
        assert report.dropped == ()
        assert sum(report.weights.values()) == pytest.approx(1.0)
    assert any(report.steps[i] < 3 * n for report in kept.reports for i, n in enumerate(BATCHES))


def test_dropped_stragglers_are_reported_without_affecting_x() -> None:
    het = SystemsHeterogeneity(stragglers=0.5, policy="drop")
    kept = record(2, heterogeneity=het, local_epochs=2)
    for report in kept.reports:
        want = het(0, report.round, range(6), [2] * 6, [2 * n for n in BATCHES])
        assert report.cohort == tuple(i for i, n in enumerate(want) if n is not None)
        assert report.dropped == tuple(i for i, n in enumerate(want) if n is None)
        assert len(report.dropped) == 3
        assert dict(report.steps) == {i: 2 * BATCHES[i] for i in report.cohort}
        total = sum(SIZES[i] for i in report.cohort)
        assert dict(report.weights) == {i: pytest.approx(SIZES[i] / total) for i in report.cohort}

    def without(seed: int, round: int) -> list[int]:
        return [i for i in range(6) if i not in kept.reports[round].dropped]

    chosen = Record()
    trainer(max_rounds=2, callbacks=chosen, sampler=without, local_epochs=2).fit(seeded(), data(SIZES))
    assert all(map(torch.equal, chosen.models, kept.models))


def test_deadline_cuts_local_steps_within_an_epoch() -> None:
    het = SystemsHeterogeneity(deadline=5, speed_spread=0.8)
    want = het(0, 0, range(6), [1] * 6, [9] * 6)
    (report,) = record(1, heterogeneity=het, local_steps=9).reports
    assert dict(report.steps) == {i: n for i, n in enumerate(want) if n is not None}
    assert report.dropped == tuple(i for i, n in enumerate(want) if n is None)
    assert len(set(want)) > 2


def test_dropped_clients_keep_their_state() -> None:
    het = SystemsHeterogeneity(stragglers=0.5, policy="drop")
    kept = record(algorithm=Scaffold(), heterogeneity=het, local_epochs=1)
    stayed = 0
    for report, before, after in zip(kept.reports[1:], kept.states, kept.states[1:], strict=False):
        for i in range(6):
            old, new = before["client_states"].get(i), after["client_states"].get(i)
            if i in report.dropped:
                assert same(old, new)
                stayed += old is not None
            else:
                assert old is None or not same(old, new)
    assert stayed > 0


EMPTY: list[dict[str, Any]] = [
    {"heterogeneity": SystemsHeterogeneity(deadline=0.5, speed_spread=0.0)},
    {"heterogeneity": SystemsHeterogeneity(stragglers=1.0, policy="drop")},
]


@pytest.mark.parametrize("settings", EMPTY, ids=str)
@pytest.mark.parametrize("algorithm", [FedAvg(), Scaffold(option="i")], ids=repr)
def test_rounds_with_all_clients_dropped_change_nothing(settings: dict[str, Any], algorithm: Any) -> None:
    kept = record(2, algorithm=algorithm, local_epochs=1, **settings)
    for report, model, state in zip(kept.reports, kept.models, kept.states, strict=True):
        assert report.cohort == ()
        assert report.dropped == tuple(range(6))
        assert report.steps == report.weights == report.sizes == report.clients == {}
        assert math.isnan(report.loss)
        assert math.isnan(report.drift)
        assert report.update_norm == 0.0
        assert report.bytes_up == report.bytes_down == 0
        assert torch.equal(model, parameters(seeded()))
        assert state["client_states"] == {}
        assert same(state["state"], kept.states[0]["state"])


@pytest.mark.parametrize("algorithm", [FedAvg(), Scaffold(), Scaffold(option="i")], ids=repr)
def test_empty_rounds_change_nothing_and_the_run_continues(algorithm: Any) -> None:
    kept = record(
        8, algorithm=algorithm, sampler=BernoulliSampler(0.2), clients_per_round=None, server_optimizer=FedAvgM
    )
    cohorts = [BernoulliSampler(0.2)(0, r, range(6)) for r in range(8)]
    assert [list(report.cohort) for report in kept.reports] == cohorts
    assert all(report.dropped == () for report in kept.reports)
    quiet = 0
    for r in range(1, 8):
        before, after = ({k: v for k, v in s.items() if k != "round"} for s in (kept.states[r - 1], kept.states[r]))
        assert same(before, after) == (cohorts[r] == [])
        assert torch.equal(kept.models[r], kept.models[r - 1]) == (cohorts[r] == [])
        assert kept.states[r]["round"] == r + 1
        quiet += cohorts[r] == [] and any(cohorts[r + 1 :])
    assert quiet > 0  # an empty round precedes a round with clients


def test_run_with_empty_and_partial_rounds_resumes_exactly(tmp_path: Any) -> None:
    common: dict[str, Any] = {
        "algorithm": Scaffold(),
        "sampler": BernoulliSampler(0.3),
        "heterogeneity": SystemsHeterogeneity(stragglers=0.5, dropout=0.4, deadline=4),
        "local_epochs": 2,
    }
    straight = seeded()
    trainer(max_rounds=6, **common).fit(straight, data(SIZES))
    half = trainer(max_rounds=3, **common)
    half.fit(seeded(), data(SIZES))
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed = seeded()
    trainer(max_rounds=6, **common).fit(resumed, data(SIZES), ckpt_path=tmp_path / "half.ckpt")
    assert torch.equal(parameters(resumed), parameters(straight))
