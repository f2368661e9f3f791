"""Weighted means of messages: the rules, excluded clients, and clients drawn twice."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedCallback, FederatedDataModule, FederatedError
from lightning_fed.algorithms import FedAvg, Scaffold
from lightning_fed.server import (
    CoordinateMedian,
    GeometricMedian,
    NormClipping,
    RobustAggregator,
    TrimmedMean,
    WeightedSampler,
)
from lightning_fed.server.aggregation.mean import Aggregation
from lightning_fed.server.participation import Participant
from tests.helpers import engines
from tests.helpers.aggregation import add_one, combined, matrix
from tests.helpers.training import trainer


def cohort(*members: tuple[int, int, int, int]) -> list[Participant]:
    """Return participants of (stored index, size, count, steps)."""
    return [Participant(f"client {i}", i, size, count, steps) for i, size, count, steps in members]


THREE = cohort((0, 10, 1, 4), (5, 30, 1, 2), (7, 20, 2, 4))


def vector(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


# ------------------------------------------------------------------ weights


def weights_of(weighting: Any, members: Sequence[Participant], local_work: bool = True) -> list[float]:
    aggregation = Aggregation({"delta": "weighting"}, weighting, members, population=10, local_work=local_work)
    return aggregation.weights([p.index for p in members], "weighting")


@pytest.mark.parametrize(
    ("weighting", "raw"),
    [
        ("examples", [10, 30, 40]),
        ("uniform", [1, 1, 2]),
        ("steps", [4, 2, 8]),
        (lambda client_id, size, steps: size * steps, [40, 60, 160]),
        (lambda client_id, size, steps: {"client 5": 3}.get(client_id, 0), [0, 3, 0]),
    ],
    ids=["examples", "uniform", "steps", "function", "function of the id"],
)
def test_weights_match_a_hand_computation(weighting: Any, raw: list[float]) -> None:
    assert weights_of(weighting, THREE) == [w / sum(raw) for w in raw]


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 5), st.integers(1, 99)), min_size=1, max_size=8),
    st.sampled_from(["examples", "uniform", "steps"]),
)
def test_weights_sum_to_one_and_repeated_draws_add_up(members: list[tuple[int, int, int]], weighting: str) -> None:
    weights = weights_of(weighting, cohort(*((i, *m) for i, m in enumerate(members))))
    assert math.fsum(weights) == pytest.approx(1.0, rel=1e-12)
    repeated = [(i, size, steps) for i, (size, count, steps) in enumerate(members) for _ in range(count)]
    apart = weights_of(weighting, cohort(*((j, size, 1, steps) for j, (_, size, steps) in enumerate(repeated))))
    for i, weight in enumerate(weights):
        together = sum(w for w, (k, _, _) in zip(apart, repeated, strict=True) if k == i)
        assert together == pytest.approx(weight, rel=1e-12)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_invalid_weights_are_rejected_naming_the_client(value: float) -> None:
    with pytest.raises(FederatedError, match="finite weights >= 0, found .* for client 'client 5'"):
        weights_of(lambda i, size, steps: value if i == "client 5" else 1.0, THREE)


def test_all_zero_weights_are_rejected() -> None:
    with pytest.raises(FederatedError, match="not all zero, found zeros for the clients .*'client 7'"):
        weights_of(lambda i, size, steps: 0, THREE)
    with pytest.raises(FederatedError, match="not all zero"):
        weights_of("steps", cohort((0, 3, 1, 0)), local_work=False)


# ------------------------------------------------------------------ means


def aggregate(
    members: Sequence[Participant],
    reduces: Mapping[str, str],
    sends: Mapping[int, Mapping[str, Tensor]],
    weighting: Any = "examples",
    population: int = 10,
    local_work: bool = True,
    taken: Mapping[int, int] | None = None,
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Aggregate messages at x = 0, so that a client's parameters are its delta. Every delta is the engine's own.

    Clients take their planned steps, unless ``taken`` gives other numbers.
    """
    aggregation = Aggregation(reduces, weighting, members, population, local_work)
    steps = {p.index: p.steps for p in members} | dict(taken or {})
    for index, send in sends.items():
        add_one(aggregation, index, steps[index], dict(send), send.get("delta"))
    return aggregation.compute(torch.zeros(1, dtype=torch.float64))


@pytest.mark.parametrize(
    ("rule", "weighting", "want"),
    [
        ("weighting", "examples", (1 * 10 + 2 * 30 + 6 * 40) / 80),
        ("weighting", "uniform", (1 + 2 + 6 * 2) / 4),
        ("weighting", "steps", (1 * 4 + 2 * 2 + 6 * 8) / 14),
        ("weighting", lambda i, size, steps: size * steps, (1 * 40 + 2 * 60 + 6 * 160) / 260),
        ("examples", "uniform", (1 * 10 + 2 * 30 + 6 * 40) / 80),
        ("uniform", "examples", (1 + 2 + 6 * 2) / 4),
        ("population", "examples", (1 + 2 + 6) / 10),
    ],
)
def test_every_reduction_rule_matches_a_hand_computation(rule: str, weighting: Any, want: float) -> None:
    sends = {0: {"m": vector(1.0)}, 5: {"m": vector(2.0)}, 7: {"m": vector(6.0)}}
    means, models = aggregate(THREE, {"m": rule}, sends, weighting)
    torch.testing.assert_close(means, {"m": vector(want)}, rtol=1e-10, atol=0.0)
    assert models is None


def test_each_message_is_reduced_by_its_own_rule() -> None:
    reduces = {"delta": "uniform", "c": "population", "g": "examples"}
    sends = {i: {"delta": vector(v), "c": vector(v), "g": vector(v)} for i, v in ((0, 1.0), (5, 2.0), (7, 6.0))}
    means, models = aggregate(THREE, reduces, sends)
    want = {"delta": vector(15 / 4), "c": vector(0.9), "g": vector(310 / 80)}
    torch.testing.assert_close(means, want, rtol=1e-10, atol=0.0)
    torch.testing.assert_close(models, vector(15 / 4), rtol=1e-10, atol=0.0)


@pytest.mark.parametrize("weighting", ["examples", "uniform", "steps"])
@pytest.mark.parametrize("sends_model", [True, False])
def test_batched_updates_match_one_by_one_updates(weighting: Any, sends_model: bool) -> None:
    stream = torch.Generator().manual_seed(1)
    members = cohort(*((i, 1 + i % 7, 1 + i % 2, 1 + i % 3) for i in range(300)))
    reduces = {"delta": "weighting", "c": "population", "n": "uniform"}
    x, y = torch.randn(11, generator=stream), torch.randn(300, 11, generator=stream)
    send = {"delta": y - x, "c": torch.randn(300, 11, generator=stream), "n": torch.randn(300, generator=stream)}
    taken = {p.index: p.steps - 1 if p.index % 5 == 0 and p.steps > 1 else p.steps for p in members}
    one_by_one, at_once = (Aggregation(reduces, weighting, members, 500) for _ in range(2))
    for i, steps in taken.items():
        add_one(one_by_one, i, steps, {k: v[i] for k, v in send.items()}, y[i] if sends_model else None)
    for rows in torch.arange(300).split([1, 170, 129]):
        part = {i: taken[i] for i in rows.tolist()}
        at_once.update(part, {k: v[rows] for k, v in send.items()}, y[rows] if sends_model else None)
    assert at_once.partial()["steps"] == one_by_one.partial()["steps"]
    assert at_once.partial()["given"] == pytest.approx(one_by_one.partial()["given"], rel=1e-12)
    (means, models), (expected, expected_models) = at_once.compute(x), one_by_one.compute(x)
    torch.testing.assert_close(means, expected, rtol=1e-6, atol=1e-7)
    assert (models is None) == (expected_models is None) == (not sends_model)
    if sends_model:
        torch.testing.assert_close(models, expected_models, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_mean_of_one_client_equals_its_model_exactly(dtype: torch.dtype) -> None:
    stream = torch.Generator().manual_seed(0)
    x, y = ((1e4 * torch.randn(50, generator=stream)).to(dtype) for _ in range(2))
    y = y * 1e-6
    delta = y - x
    assert not torch.equal(x + delta, y)  # a sum would round
    aggregation = Aggregation({"delta": "weighting"}, "examples", cohort((3, 17, 1, 2)), 10)
    add_one(aggregation, 3, 2, {"delta": delta}, y)
    means, models = aggregation.compute(x)
    assert models.dtype == means["delta"].dtype == dtype
    assert torch.equal(models, y)
    torch.testing.assert_close(means["delta"], delta)


def test_mean_of_equal_clients_equals_their_model_exactly() -> None:
    x, y = torch.full((1,), 1e8), torch.full((1,), 0.1)
    members = cohort(*((i, 2 * i + 1, 1, 1) for i in range(4)))
    aggregation = Aggregation({"delta": "weighting"}, "examples", members, 10)
    for i in range(4):
        delta = y - x
        add_one(aggregation, i, 1, {"delta": delta}, y)
    assert torch.equal(aggregation.compute(x)[1], y)


@pytest.mark.parametrize("other", [0, 1, 2])
def test_mean_model_is_none_if_any_client_sends_no_model(other: int) -> None:
    x, members = vector(1.0), cohort((0, 1, 1, 1), (1, 1, 1, 1), (2, 2, 1, 1))
    aggregation = Aggregation({"delta": "weighting"}, "examples", members, 10)
    for i, y in enumerate((vector(2.0), vector(5.0), vector(9.0))):
        delta = y - x
        add_one(aggregation, i, 1, {"delta": delta}, None if i == other else y)
    means, models = aggregation.compute(x)
    torch.testing.assert_close(means["delta"], vector((1 + 4 + 2 * 8) / 4), rtol=1e-10, atol=0.0)
    assert models is None


def test_population_mean_of_deltas_yields_no_mean_model() -> None:
    x, y = vector(1.0), vector(4.0)
    delta = y - x
    aggregation = Aggregation({"delta": "population"}, "examples", cohort((0, 1, 1, 1)), 6)
    add_one(aggregation, 0, 1, {"delta": delta}, y)
    means, models = aggregation.compute(x)
    torch.testing.assert_close(means["delta"], vector(0.5), rtol=1e-10, atol=0.0)
    assert models is None


def test_sums_use_float64_and_messages_are_not_modified() -> None:
    members = cohort(*((i, 1, 1, 1) for i in range(3)))
    values = [torch.tensor([v]) for v in (1e8, 1.0, -1e8)]  # a float32 sum would lose the 1
    aggregation = Aggregation({"m": "uniform"}, "examples", members, 3)
    for i, value in enumerate(values):
        add_one(aggregation, i, 1, {"m": value})
    means, _ = aggregation.compute(torch.zeros(1))
    assert means["m"].dtype == torch.float32
    assert float(means["m"]) == pytest.approx(1 / 3, rel=1e-6)
    assert [float(v) for v in values] == [1e8, 1.0, -1e8]


def test_messages_longer_than_one_block_are_summed_correctly() -> None:
    size = 2**16 + 3  # longer than the block converted at once
    members = cohort(*((i, i + 1, 1, 1) for i in range(3)))
    messages = torch.randn(3, 2, size, generator=torch.Generator().manual_seed(0))
    sent = {i: {"m": message.t().contiguous().t()} for i, message in enumerate(messages)}  # not contiguous
    means, _ = aggregate(members, {"m": "examples"}, sent)
    want = torch.einsum("c,cab->ab", torch.tensor([1.0, 2.0, 3.0]).double() / 6, messages.double())
    torch.testing.assert_close(means["m"], want, rtol=1e-14, atol=1e-15)


def test_means_are_detached() -> None:
    w = torch.ones(1, dtype=torch.float64, requires_grad=True)
    means, _ = aggregate(cohort((0, 1, 1, 1)), {"m": "uniform"}, {0: {"m": 2 * w}})
    assert not means["m"].requires_grad


@pytest.mark.parametrize(
    ("send", "message"),
    [
        ({"delta": 1.0}, r"sent the messages \['delta'\], but `reduces` declares \['c', 'delta'\]"),
        ({"delta": 1.0, "c": 1.0, "d": 1.0}, r"sent the messages \['c', 'd', 'delta'\]"),
        ({}, r"sent the messages \[\]"),
    ],
)
def test_undeclared_or_missing_messages_are_rejected(send: dict[str, float], message: str) -> None:
    aggregation = Aggregation({"delta": "uniform", "c": "population"}, "examples", THREE, 10)
    with pytest.raises(FederatedError, match=message):
        add_one(aggregation, 0, 4, {k: vector(v) for k, v in send.items()})


# ------------------------------------------------------------------ clients without steps


@pytest.mark.parametrize("weighting", ["examples", "uniform", "steps"])
def test_clients_without_planned_steps_have_zero_weight(weighting: str) -> None:
    members = cohort((0, 10, 1, 4), (1, 1000, 1, 0), (2, 30, 1, 4))
    aggregation = Aggregation({"delta": "weighting"}, weighting, members, 10)
    want = [0.25, 0.0, 0.75] if weighting == "examples" else [0.5, 0.0, 0.5]
    assert aggregation.weights(range(3), "weighting") == want
    assert aggregation.weights(range(3), "population") == [0.1] * 3


def test_methods_without_local_work_require_no_steps() -> None:
    members = cohort((0, 10, 1, 0), (1, 30, 1, 0))
    sends = {0: {"delta": vector(4.0)}, 1: {"delta": vector(8.0)}}
    means, _ = aggregate(members, {"delta": "weighting"}, sends, local_work=False)
    torch.testing.assert_close(means["delta"], vector(7.0), rtol=1e-10, atol=0.0)


def test_cohort_without_steps_yields_no_means() -> None:
    aggregation = Aggregation({"delta": "weighting"}, "examples", cohort((0, 10, 1, 0)), 10)
    assert aggregation.weights([0], "weighting") == [0.0]
    assert aggregation.compute(vector(1.0)) == ({}, None)


def test_clients_that_send_nothing_are_excluded_from_the_mean() -> None:
    # client 5 of size 30 sends nothing: the others' shares grow to 1/5 and 4/5, or to 1/3 and 2/3
    reduces = {"delta": "weighting", "u": "uniform", "c": "population"}
    sends = {i: {"delta": vector(v), "u": vector(v), "c": vector(v)} for i, v in ((0, 1.0), (7, 6.0))}
    means, models = aggregate(THREE, reduces, sends)
    want = {"delta": vector(5.0), "u": vector(13 / 3), "c": vector(0.7)}
    torch.testing.assert_close(means, want, rtol=1e-10, atol=0.0)
    torch.testing.assert_close(models, vector(5.0), rtol=1e-10, atol=0.0)


@pytest.mark.parametrize(
    ("weighting", "raw"),
    [
        ("steps", (4, 1, 8)),
        (lambda client_id, size, steps: size * steps, (40, 30, 160)),
        ("examples", (10, 30, 40)),
        ("uniform", (1, 1, 2)),
    ],
    ids=["steps", "function", "examples", "uniform"],
)
def test_weights_use_the_steps_actually_taken(weighting: Any, raw: Sequence[float]) -> None:
    # client 5 takes one of its two planned steps
    sends = {i: {"delta": vector(v), "c": vector(v)} for i, v in ((0, 1.0), (5, 2.0), (7, 6.0))}
    means, models = aggregate(THREE, {"delta": "weighting", "c": "population"}, sends, weighting, taken={5: 1})
    want = sum(w * v for w, v in zip(raw, (1.0, 2.0, 6.0), strict=True)) / sum(raw)
    torch.testing.assert_close(means, {"delta": vector(want), "c": vector(0.9)}, rtol=1e-10, atol=0.0)
    torch.testing.assert_close(models, vector(want), rtol=1e-10, atol=0.0)


def test_all_zero_weights_after_training_are_rejected() -> None:
    sends = {0: {"delta": vector(1.0)}, 5: {"delta": vector(2.0)}}
    aggregation = Aggregation({"delta": "weighting"}, lambda i, size, steps: steps >= 2, THREE[:2], 10)
    for index, send in sends.items():
        add_one(aggregation, index, 1, send, vector(3.0) + send["delta"])
    with pytest.raises(FederatedError, match="not all zero"):
        aggregation.compute(vector(3.0))


def test_weight_may_become_positive_after_training() -> None:
    sends = {0: {"delta": vector(1.0)}, 5: {"delta": vector(2.0)}}
    means, _ = aggregate(THREE[:2], {"delta": "weighting"}, sends, lambda i, n, k: k < 4, taken={0: 3})
    torch.testing.assert_close(means["delta"], vector(1.5), rtol=1e-10, atol=0.0)


# ------------------------------------------------------------------ in a run


class Line(pl.LightningModule):
    """F_i(x) = (x - b_i)^2 / 2; one step at rate 1/2 from x ends at (x + b_i) / 2."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 0.5 * F.mse_loss(self.x.expand_as(batch[0]), batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


B = (4.0, 8.0, 16.0, 32.0)
SIZES = (1, 2, 3, 4)


class Record(FederatedCallback):
    def __init__(self) -> None:
        self.started: list[Any] = []
        self.reports: list[Any] = []

    def on_client_start(self, trainer: Any, pl_module: Any, round: int, client_id: Any) -> None:
        self.started.append(client_id)

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        self.reports.append(round_report)


def run(**kwargs: Any) -> tuple[float, Any, Record]:
    clients = [TensorDataset(torch.full((n, 1), b, dtype=torch.float64)) for b, n in zip(B, SIZES, strict=True)]
    model, record = Line(), Record()
    fitted = trainer(**{"local_epochs": 1, "max_rounds": 1, "precision": "64-true", "callbacks": record, **kwargs})
    fitted.fit(model, FederatedDataModule(clients=clients, batch_size=4))
    return float(model.x.detach()), fitted.fit_loop, record


def twice(seed: int, round: int) -> list[int]:
    return [0, 3, 0]


@pytest.mark.parametrize(
    ("weighting", "weights"),
    [
        ("uniform", {0: 2 / 3, 3: 1 / 3}),
        ("examples", {0: 2 / 6, 3: 4 / 6}),
        ("steps", {0: 2 / 3, 3: 1 / 3}),
        (lambda client_id, size, steps: client_id + size, {0: 2 / 9, 3: 7 / 9}),
    ],
    ids=["uniform", "examples", "steps", "function"],
)
def test_client_drawn_twice_trains_once_and_counts_twice(weighting: Any, weights: dict[int, float]) -> None:
    x, _, record = run(sampler=twice, weighting=weighting)
    (report,) = record.reports
    assert record.started == [0, 3]
    assert report.cohort == (0, 3)
    assert dict(report.steps) == {0: 1, 3: 1}
    assert dict(report.weights) == pytest.approx(weights, rel=1e-10)
    assert x == pytest.approx(sum(w * B[i] / 2 for i, w in weights.items()), rel=1e-10)


def test_scaffold_c_counts_a_client_drawn_twice_once() -> None:
    x, loop, record = run(sampler=twice, algorithm=Scaffold())
    assert record.started == [0, 3]
    assert x == pytest.approx((2 * 2.0 + 16.0) / 3, rel=1e-10)
    # c_i = (x - y_i) / (K * lr) = -b_i at x = 0, and c is the sum of their changes over N = 4
    assert float(loop.state.clients.get(0)["c_i"]) == pytest.approx(-4.0, rel=1e-10)
    assert float(loop.server["c"]) == pytest.approx(-(4.0 + 32.0) / 4, rel=1e-10)


def test_sampling_by_size_with_uniform_weighting() -> None:
    x, sampler = 0.0, WeightedSampler(3)
    found, _, record = run(sampler=sampler, weighting="uniform", max_rounds=6, algorithm=FedAvg())
    repeated = 0
    for report in record.reports:
        drawn = sampler(0, report.round, Sized())
        assert report.cohort == tuple(dict.fromkeys(drawn))
        assert dict(report.weights) == pytest.approx({i: drawn.count(i) / 3 for i in drawn}, rel=1e-10)
        x = sum((x + B[i]) / 2 for i in drawn) / 3
        repeated += len(set(drawn)) < 3
    assert found == pytest.approx(x, rel=1e-10)
    assert repeated > 0


class Sized(list[int]):
    """The four clients with their sizes."""

    sizes = SIZES

    def __init__(self) -> None:
        super().__init__(range(4))


class Tired(Line):
    """Skips every batch after the second."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch_idx < 2 else None


@pytest.mark.parametrize("module", [Line, Tired])
def test_weighting_by_steps_uses_steps_taken_in_a_run(module: type[Line]) -> None:
    # batches of one: after n steps a client is at b (1 - 2^-n)
    clients = [TensorDataset(torch.full((n, 1), b, dtype=torch.float64)) for b, n in zip(B, SIZES, strict=True)]
    steps = SIZES if module is Line else [min(n, 2) for n in SIZES]
    model, record = module(), Record()
    fitted = trainer(weighting="steps", clients_per_round=1.0, max_rounds=1, precision="64-true", callbacks=record)
    fitted.fit(model, FederatedDataModule(clients=clients, batch_size=1))
    assert dict(record.reports[0].steps) == dict(enumerate(steps))
    weights = [n / sum(steps) for n in steps]
    assert dict(record.reports[0].weights) == pytest.approx(dict(enumerate(weights)), rel=1e-10)
    want = sum(w * b * (1 - 0.5**n) for w, b, n in zip(weights, B, steps, strict=True))
    assert float(model.x.detach()) == pytest.approx(want, rel=1e-10)


def test_unweighted_rules_reject_example_weighted_messages() -> None:
    class ByExamples(FedAvg):
        reduces = {"delta": "examples"}

    with pytest.raises(FederatedError, match="averages messages by examples"):
        trainer(algorithm=ByExamples(), aggregator=CoordinateMedian())
    trainer(algorithm=ByExamples(), aggregator=GeometricMedian())


class Widest(RobustAggregator):
    """A custom rule: the largest value."""

    def combine(self, messages: Tensor, weights: Tensor, sum_: Any) -> Tensor:
        return messages.max(dim=0).values


def test_custom_aggregator_is_supported() -> None:
    assert torch.equal(combined(Widest(), matrix([1, 5, 0], [2, 3, -1])), matrix([2, 5, 0])[0])
    assert repr(Widest()) == "Widest()"
    engines.run("sequential", aggregator=Widest(), sampler=WeightedSampler(3), clients_per_round=None, max_rounds=1)


def test_aggregator_repr_shows_the_constructor_call() -> None:
    shown = [repr(rule) for rule in (TrimmedMean(0.1), GeometricMedian(), NormClipping(2))]
    assert shown == ["TrimmedMean(beta=0.1)", "GeometricMedian(iterations=3, nu=1e-06)", "NormClipping(max_norm=2.0)"]
