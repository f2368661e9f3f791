"""Krum, Multi-Krum and Bulyan: hand computations, a NumPy reference, the influence of bad clients, and refusals."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fed import FederatedError
from lightning_fed.algorithms import FedAvg, Mime, Scaffold, SGDm
from lightning_fed.server import Aggregator, BernoulliSampler, Bulyan, Krum, MultiKrum, UniformSampler
from tests.helpers.aggregation import cohort, combined, matrix
from tests.helpers.engines import assert_agree, run
from tests.helpers.training import data, fit, trainer

# ------------------------------------------------------------------ the reference: loops, as the papers write them


def krum_choice(vectors: list[np.ndarray], f: int, neighbors: int) -> int:
    """Return the index of Krum's choice, which is the first of equal scores."""
    scores = []
    for i, v in enumerate(vectors):
        squares = sorted(float(np.sum((v - w) ** 2)) for j, w in enumerate(vectors) if j != i)
        scores.append(sum(squares[:neighbors]))
    return int(np.argmin(scores))


def krum(rows: np.ndarray, f: int) -> np.ndarray:
    return rows[krum_choice(list(rows), f, len(rows) - f - 2)]


def multi_krum(rows: np.ndarray, f: int, m: int) -> np.ndarray:
    n = len(rows)
    scores = []
    for i in range(n):
        squares = sorted(np.linalg.norm(rows[i] - rows[j]) ** 2 for j in range(n) if j != i)
        scores.append(sum(squares[: n - f - 2]))
    return rows[np.argsort(scores, kind="stable")[:m]].mean(axis=0)


def bulyan(rows: np.ndarray, f: int) -> np.ndarray:
    received, selection, n = list(rows), [], len(rows)
    while len(selection) < n - 2 * f:
        selection.append(received.pop(krum_choice(received, f, max(1, len(received) - f - 2))))
    beta, out = n - 4 * f, np.empty(rows.shape[1])
    for k in range(rows.shape[1]):
        values = [v[k] for v in selection]
        nearest = sorted(values, key=lambda value: abs(value - np.median(values)))[:beta]
        out[k] = np.mean(nearest)
    return out


CASES: list[tuple[Aggregator, Callable[[np.ndarray], np.ndarray], int]] = [
    (Krum(0), lambda rows: krum(rows, 0), 3),
    (Krum(2), lambda rows: krum(rows, 2), 7),
    (MultiKrum(2), lambda rows: multi_krum(rows, 2, len(rows) - 2), 7),
    (MultiKrum(1, num_selected=3), lambda rows: multi_krum(rows, 1, 3), 5),
    (Bulyan(0), lambda rows: bulyan(rows, 0), 3),
    (Bulyan(1), lambda rows: bulyan(rows, 1), 7),
    (Bulyan(2), lambda rows: bulyan(rows, 2), 11),
]


@pytest.mark.parametrize(("rule", "reference", "least"), CASES, ids=[repr(rule) for rule, _, _ in CASES])
@given(more=st.integers(0, 6), seed=st.integers(0, 999), scale=st.sampled_from([1e-6, 1.0, 1e6]))
@settings(max_examples=15)
def test_rules_match_the_reference_implementation(
    rule: Aggregator, reference: Any, least: int, more: int, seed: int, scale: float
) -> None:
    rows = scale * np.random.default_rng(seed).standard_normal((least + more, 3))
    rows[-1] *= 1e3  # one client is far away
    found = combined(rule, torch.from_numpy(rows))
    np.testing.assert_allclose(found.numpy(), reference(rows), rtol=1e-12, atol=1e-12 * scale)


def test_distances_between_large_messages_avoid_cancellation() -> None:
    rows = np.random.default_rng(0).standard_normal((9, 3)) + 1e9
    np.testing.assert_array_equal(combined(Krum(2), torch.from_numpy(rows)).numpy(), krum(rows, 2))


def test_rules_handle_messages_wider_than_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fed.server.aggregation.robust._BLOCK", 4)
    rows = np.random.default_rng(0).standard_normal((7, 10))
    messages = torch.from_numpy(rows)
    for rule, want in ((Krum(1), krum(rows, 1)), (Bulyan(1), bulyan(rows, 1))):
        found = rule.combine(messages, torch.full((7,), 1 / 7, dtype=torch.float64), lambda part: part)
        np.testing.assert_allclose(found.numpy(), want, rtol=1e-12)


def test_processes_with_column_shards_select_the_same_client() -> None:
    messages = torch.randn(9, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = torch.full((9,), 1 / 9, dtype=torch.float64)
    for rule in (Krum(2), MultiKrum(2), Bulyan(1)):
        whole = rule.combine(messages, weights, lambda part: part)
        halves, seen = messages.split(5, dim=1), list[torch.Tensor]()

        def note(part: torch.Tensor, seen: list[torch.Tensor] = seen) -> torch.Tensor:
            seen.append(part.clone())
            return part

        for half in halves:
            rule.combine(half, weights, note)
        total = seen[0] + seen[1]
        parts = [rule.combine(half, weights, lambda _, total=total: total) for half in halves]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=0.0)


# ------------------------------------------------------------------ by hand


def test_krum_matches_a_hand_computation() -> None:
    # n - f - 2 = 2 neighbors: the scores are 1 + 4, 1 + 1, 1 + 4, 64 + 81 and 98^2 + 88^2
    rows = matrix([0, 0, 0], [1, 0, 0], [2, 0, 0], [10, 0, 0], [98, 0, 0])
    assert torch.equal(combined(Krum(1), rows), rows[1])
    assert torch.equal(combined(MultiKrum(1, num_selected=1), rows), rows[1])
    assert torch.equal(combined(MultiKrum(1), rows), matrix([3.25, 0, 0])[0])


def test_bulyan_breaks_distance_ties_toward_the_lower_value() -> None:
    rows = matrix(*([value, 0, 0] for value in (0, 3, 4, 4.5, 5, 100, 200)))  # Krum selects the first five
    torch.testing.assert_close(combined(Bulyan(1), rows), matrix([(3 + 4 + 4.5) / 3, 0, 0])[0])


def test_krum_ties_go_to_the_first_client_in_any_arrival_order() -> None:
    rows = matrix([0, 0, 0], [1, 0, 0], [5, 0, 0], [6, 0, 0], [50, 0, 0])
    for order in itertools.islice(itertools.permutations(range(5)), 0, 120, 17):
        assert torch.equal(combined(Krum(1), rows, order=order), combined(Krum(1), rows))


def test_repeated_draws_count_except_in_population_means() -> None:
    rows = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    together = combined(MultiKrum(1), rows, counts=[1, 3, 1, 1, 1, 1], weighting="uniform")
    apart = combined(MultiKrum(1), rows[[0, 1, 1, 1, 2, 3, 4, 5]], weighting="uniform")
    torch.testing.assert_close(together, apart, rtol=1e-12, atol=0.0)
    once = combined(MultiKrum(1), rows, counts=[1, 3, 1, 1, 1, 1], reduces="population")
    torch.testing.assert_close(once, 0.6 * combined(MultiKrum(1), rows, weighting="uniform"))
    combined(MultiKrum(2), rows, counts=[1, 3, 1, 1, 1, 1], weighting="uniform")  # needs 7, and there are 8
    with pytest.raises(FederatedError, match="needs at least 7 clients in every round, found a round with 6"):
        combined(MultiKrum(2), rows, counts=[1, 3, 1, 1, 1, 1], reduces="population")


@pytest.mark.parametrize("rule", [Krum(2), MultiKrum(2), Bulyan(2)], ids=repr)
@pytest.mark.parametrize("length", [1e2, 1e6])
def test_result_stays_in_honest_range_with_tolerated_bad_clients(rule: Aggregator, length: float) -> None:
    stream = torch.Generator().manual_seed(0)
    rows = torch.randn(11, 3, generator=stream, dtype=torch.float64)
    good = rows[2:].clone()
    rows[:2] = length * torch.randn(3, generator=stream, dtype=torch.float64)  # the bad clients agree with each other
    found = combined(rule, rows)
    assert bool(((good.min(dim=0).values <= found) & (found <= good.max(dim=0).values)).all())


# ------------------------------------------------------------------ in a run


EVERYONE: dict[str, Any] = {"limit_val_batches": 0, "max_rounds": 2, "clients_per_round": 6}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("algorithm", "rule"),
    [
        (Scaffold(), MultiKrum(1)),
        (FedAvg(), Krum(1)),
        (Mime(SGDm()), Krum(1)),
        (FedAvg(), Bulyan(0)),
    ],
    ids=repr,
)
def test_engines_and_chunk_sizes_agree(algorithm: Any, rule: Aggregator) -> None:
    options: dict[str, Any] = {"algorithm": algorithm, "aggregator": rule, **EVERYONE}
    assert_agree(run("sequential", **options), run("vectorized", chunk_size=3, **options))


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Krum(-1), r"Krum\(num_bad=-1\): num_bad must be an integer of at least 0"),
        (lambda: Bulyan(0.2), "num_bad must be an integer"),
        (lambda: MultiKrum(1, num_selected=0), "num_selected must be an integer of at least 1"),
        (lambda: trainer(aggregator=Krum(0), weighting="examples"), "weighting='examples' cannot be combined with"),
        (
            lambda: trainer(aggregator=Krum(1), clients_per_round=4),
            r"Krum\(num_bad=1\) needs at least 5 clients in every round, found clients_per_round=4",
        ),
        (
            lambda: trainer(aggregator=MultiKrum(1, 6), sampler=UniformSampler(6)),
            "needs at least 7 clients in every round, found clients_per_round=6",
        ),
        (
            lambda: trainer(aggregator=Bulyan(1), clients_per_round=6),
            "needs at least 7 clients in every round, found clients_per_round=6",
        ),
    ],
)
def test_invalid_arguments_are_rejected_before_the_run(make: Any, message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        make()


def test_round_with_too_few_clients_is_rejected_before_training() -> None:
    options: dict[str, Any] = {"aggregator": Krum(2), "max_rounds": 1}
    with pytest.raises(FederatedError, match=r"at least 7 clients in every round, found a round with 6 clients"):
        fit(datamodule=data(), clients_per_round=1.0, **options)
    with pytest.raises(FederatedError, match="at least 7 clients in every round"):
        fit(datamodule=data(), sampler=BernoulliSampler(1.0), **options)


def test_round_that_loses_too_many_clients_is_rejected() -> None:
    aggregation = Krum(1).of_round({"delta": "uniform"}, "uniform", cohort([1] * 5), 10)
    for i in range(4):
        aggregation.update({i: 1}, {"delta": torch.zeros(1, 3)})
    with pytest.raises(FederatedError, match="found a round in which 4 clients sent messages"):
        aggregation.compute(torch.zeros(3))


def test_empty_round_changes_nothing() -> None:
    aggregation = Krum(1).of_round({"delta": "uniform"}, "uniform", [], 10)
    assert aggregation.compute(torch.zeros(3)) == ({}, None)
