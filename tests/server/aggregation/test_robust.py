"""Robust aggregation: the result of each rule, the influence of bad clients on a run, and refusals."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, FederatedError
from lightning_fed.algorithms import (
    Algorithm,
    FedAvg,
    FedDane,
    FedDyn,
    FedNova,
    FedProx,
    Mime,
    Scaffold,
    ServerOnly,
    SGDm,
)
from lightning_fed.core.rounds import Run, Update
from lightning_fed.models import MLPClassifier
from lightning_fed.server import (
    Aggregator,
    CoordinateMedian,
    GeometricMedian,
    NormClipping,
    RobustAggregator,
    TrimmedMean,
)
from lightning_fed.server.participation import Participant
from tests.helpers.aggregation import X, add_one, cohort, combined, matrix
from tests.helpers.engines import Ordinary, assert_agree, assert_close, run, state_of
from tests.helpers.selection import covering
from tests.helpers.training import Net, data, fit, trainer

RULES: dict[str, Aggregator] = {
    "clipping": NormClipping(1.0),
    "median": CoordinateMedian(),
    "trimmed": TrimmedMean(0.25),
    "geometric": GeometricMedian(iterations=30),
}
HOLDING = [name for name in RULES if name != "clipping"]
messages_of = st.integers(1, 9).flatmap(
    lambda count: st.lists(
        st.lists(st.floats(-10, 10, width=32), min_size=3, max_size=3), min_size=count, max_size=count
    )
)


# ------------------------------------------------------------------ by hand


def test_messages_that_start_at_one_place_are_combined_each() -> None:
    numbers = torch.arange(6, dtype=torch.float64)
    names = dict.fromkeys(("half", "even"), "uniform")
    aggregation = CoordinateMedian().of_round(names, "uniform", cohort([1]), 1)
    add_one(aggregation, 0, 1, {"half": numbers[:3], "even": numbers[::2]})
    found, _ = aggregation.compute(X)
    assert found["half"].tolist() == [0, 1, 2]
    assert found["even"].tolist() == [0, 2, 4]


def test_median_matches_a_hand_computation() -> None:
    three = matrix([1, 5, -9], [2, 4, 0], [90, -7, 1])
    assert torch.equal(combined(CoordinateMedian(), three), matrix([2, 4, 0])[0])
    assert torch.equal(combined(CoordinateMedian(), three[:2]), matrix([1.5, 4.5, -4.5])[0])


def test_trimmed_mean_matches_a_hand_computation() -> None:
    five = matrix([1, 0, 0], [2, 0, 0], [6, 0, 0], [99, 0, 0], [-99, 0, 3])
    assert torch.equal(combined(TrimmedMean(0.2), five), matrix([3, 0, 0])[0])
    assert torch.equal(combined(TrimmedMean(0.39), five), matrix([3, 0, 0])[0])  # floor(1.95) = 1 at either end
    assert torch.equal(combined(TrimmedMean(0.4), five), matrix([2, 0, 0])[0])


def test_trim_count_tolerates_floating_point_rounding() -> None:
    values = torch.arange(100.0, dtype=torch.float64)[:, None].expand(100, 3).clone()
    values[71:] = 1e9  # 29 of 100, and 0.29 * 100 is less than 29
    assert float(combined(TrimmedMean(0.29), values)[0]) == pytest.approx(sum(range(29, 71)) / 42)


def test_weiszfeld_step_matches_a_hand_computation() -> None:
    two = matrix([0, 0, 0], [4, 0, 0])
    # from the mean z = 1 of weights 3/4 and 1/4: distances 1 and 3, so 0.75 and 1/12
    want = (4 / 12) / (0.75 + 1 / 12)
    assert float(combined(GeometricMedian(iterations=1), two, sizes=[3, 1])[0]) == pytest.approx(want, rel=1e-12)
    # smoothing above all distances gives the mean
    assert float(combined(GeometricMedian(1, nu=100.0), two, sizes=[3, 1])[0]) == pytest.approx(1.0, rel=1e-12)


def test_outliers_in_geometric_median_fade_at_the_documented_rate() -> None:
    b, length, weights = 2 / 11, 1e12, torch.full((11,), 1 / 11, dtype=torch.float64)
    messages = torch.randn(11, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    messages[:2] = length * torch.tensor([1.0, 0.0, 0.0])
    for iterations in (1, 3, 6):
        found = GeometricMedian(iterations).combine(messages, weights, lambda part: part)
        assert float(found.norm()) == pytest.approx(length * b * (b / (1 - b)) ** iterations, rel=0.3)


def test_geometric_median_minimizes_the_sum_of_distances() -> None:
    points = torch.randn(7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sizes = [1, 2, 3, 4, 3, 2, 1]
    z = combined(GeometricMedian(iterations=500), points, sizes)
    weights = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)

    def objective(at: Tensor) -> Tensor:
        return (weights * (points - at).norm(dim=1)).sum()

    nudges = 1e-3 * torch.randn(200, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert all(objective(z) <= objective(z + nudge) for nudge in nudges)


def test_clipping_matches_a_hand_computation() -> None:
    two = matrix([0, 0, 0.5], [3, 4, 0])
    want = (3 * two[0] + two[1] / 5) / 4
    torch.testing.assert_close(combined(NormClipping(1.0), two, sizes=[3, 1]), want, rtol=1e-12, atol=0.0)


def test_each_message_has_its_own_clipping_bound() -> None:
    rule = NormClipping({"delta": 1.0, "c": 10.0})
    aggregation = rule.of_round({"delta": "uniform", "c": "population"}, "examples", cohort([1]), 10)
    add_one(aggregation, 0, 1, {"delta": matrix([3, 4, 0])[0], "c": matrix([30, 40, 0])[0]})
    means, _ = aggregation.compute(X)
    torch.testing.assert_close(means["delta"], matrix([0.6, 0.8, 0])[0])
    torch.testing.assert_close(means["c"], matrix([0.6, 0.8, 0])[0])  # 10 / N


# ------------------------------------------------------------------ all rules


@pytest.mark.parametrize("name", RULES)
@given(rows=messages_of, chance=st.randoms(use_true_random=False))
def test_result_is_independent_of_message_and_client_order(name: str, rows: Any, chance: Any) -> None:
    messages = matrix(*rows)
    order = list(range(len(rows)))
    chance.shuffle(order)
    once = combined(RULES[name], messages)
    arrived = combined(RULES[name], messages, order=order)
    if name in HOLDING:
        assert torch.equal(once, arrived)
    torch.testing.assert_close(once, arrived, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(once, combined(RULES[name], messages[order]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", RULES)
@given(row=st.lists(st.floats(-0.5, 0.5), min_size=3, max_size=3), count=st.integers(1, 8))
@settings(max_examples=20)
def test_equal_messages_are_returned_unchanged(name: str, row: list[float], count: int) -> None:
    messages = matrix(*[row] * count)
    torch.testing.assert_close(combined(RULES[name], messages), messages[0], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("rule", [TrimmedMean(0.0), NormClipping(1e9)], ids=repr)
@given(rows=messages_of)
@settings(max_examples=20)
def test_rule_equals_the_mean_without_trimming_or_clipping(rule: Aggregator, rows: Any) -> None:
    messages = matrix(*rows)
    torch.testing.assert_close(combined(rule, messages), messages.mean(dim=0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "length"), covering(list(HOLDING), [1e2, 1e4, 1e6]))
@given(bad=st.integers(0, 4), seed=st.integers(0, 99))
@settings(max_examples=15)
def test_bad_clients_below_breakdown_point_have_bounded_influence(
    name: str, length: float, bad: int, seed: int
) -> None:
    rule = {**RULES, "trimmed": TrimmedMean(0.4)}[name]
    stream = torch.Generator().manual_seed(seed)
    messages = torch.randn(10, 3, generator=stream, dtype=torch.float64)
    clean = messages[bad:].clone()
    messages[:bad] = length * torch.randn(3, generator=stream, dtype=torch.float64)
    found = combined(rule, messages)
    if name == "geometric":  # at most 2 / (1 - 2 * share) times the largest distance among the good
        radius = (clean - clean.mean(dim=0)).norm(dim=1).max()
        assert (found - clean.mean(dim=0)).norm() <= 2 * (1 - bad / 10) / (1 - 2 * bad / 10) * radius
    else:
        assert bool(((clean.min(dim=0).values <= found) & (found <= clean.max(dim=0).values)).all())


@pytest.mark.parametrize("name", HOLDING)
def test_majority_of_bad_clients_breaks_the_result(name: str) -> None:
    messages = torch.zeros(10, 3, dtype=torch.float64)
    messages[:6] = 1e6
    assert float(combined(RULES[name], messages).abs().max()) > 1e5


@pytest.mark.parametrize("name", HOLDING)
def test_repeated_draws_count_except_in_population_means(name: str) -> None:
    messages = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    together = combined(RULES[name], messages, counts=[1, 3, 1, 1], weighting="uniform")
    apart = combined(RULES[name], messages[[0, 1, 1, 1, 2, 3]], weighting="uniform")
    torch.testing.assert_close(together, apart, rtol=1e-9, atol=1e-9)
    once = combined(RULES[name], messages, counts=[1, 3, 1, 1], reduces="population")
    torch.testing.assert_close(once, 0.4 * combined(RULES[name], messages, weighting="uniform"))


def test_rules_handle_messages_wider_than_one_block() -> None:
    messages = torch.randn(5, 40_000, generator=torch.Generator().manual_seed(0))
    aggregation = CoordinateMedian().of_round({"delta": "uniform"}, "uniform", cohort([1] * 5), 5)
    for i in range(5):
        add_one(aggregation, i, 1, {"delta": messages[i]})
    assert torch.equal(aggregation.compute(messages[0])[0]["delta"], messages.median(dim=0).values)


@pytest.mark.parametrize(("returned", "found"), [(None, "a NoneType"), (torch.ones(1), r"the shape \[1\]")])
def test_custom_rule_with_an_invalid_result_is_rejected(returned: Any, found: str) -> None:
    class Own(RobustAggregator):
        def combine(self, messages: Tensor, weights: Tensor, sum_: Any) -> Any:
            return returned

    with pytest.raises(FederatedError, match=f"Own.combine must return one number .* 3 columns of 'delta', .* {found}"):
        combined(Own(), matrix([1, 2, 3], [1, 2, 3]))


def test_held_messages_are_copies() -> None:
    aggregation = CoordinateMedian().of_round({"delta": "uniform"}, "uniform", cohort([1]), 5)
    memory = torch.ones(3, dtype=torch.float64)
    add_one(aggregation, 0, 1, {"delta": memory})
    memory.zero_()  # an engine reuses its memory for the next client
    assert float(aggregation.compute(X)[0]["delta"][0]) == 1.0


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_message_is_rejected_naming_the_client(name: str, value: float) -> None:
    aggregation = RULES[name].of_round({"delta": "uniform"}, "uniform", cohort([1, 1]), 5)
    with pytest.raises(FederatedError, match="Client 'c1' sent a message 'delta' that is not finite"):
        add_one(aggregation, 1, 1, {"delta": torch.tensor([value, 0.0, 0.0])})


# ------------------------------------------------------------------ in a run


@pytest.mark.parametrize(
    ("algorithm", "rule"),
    [
        pytest.param(FedAvg(), CoordinateMedian(), marks=pytest.mark.thorough),
        (Scaffold(), GeometricMedian()),
        pytest.param(FedDyn(1.0), TrimmedMean(0.3), marks=pytest.mark.thorough),
        pytest.param(FedNova(), GeometricMedian(), marks=pytest.mark.thorough),
        pytest.param(Mime(SGDm()), GeometricMedian(), marks=pytest.mark.thorough),
        (ServerOnly(), TrimmedMean(0.3)),
    ],
    ids=repr,
)
def test_engines_and_chunk_sizes_agree(algorithm: Algorithm, rule: Aggregator) -> None:
    options: dict[str, Any] = {"algorithm": algorithm, "aggregator": rule, "max_rounds": 2, "limit_val_batches": 0}
    if not algorithm.local_work:
        options["local_epochs"] = None
    one = run("sequential", **options)
    assert_agree(one, run("vectorized", chunk_size=3, **options))


@pytest.mark.thorough
def test_run_with_zero_trimming_matches_the_uniform_mean() -> None:
    for algorithm in (FedAvg(), Scaffold(), Mime(SGDm())):
        options: dict[str, Any] = {"algorithm": algorithm, "limit_val_batches": 0, "max_rounds": 2}
        plain = run("sequential", **options, **({} if isinstance(algorithm, Scaffold) else {"weighting": "uniform"}))
        held = run("sequential", aggregator=TrimmedMean(0.0), **options)
        assert_agree(plain, held, rtol=1e-9)  # the reports include drift and weights


def test_run_with_wide_bounds_matches_the_weighted_mean() -> None:
    bounds = {"delta": 1e9, "full_grad_x": 1e9}
    options: dict[str, Any] = {"algorithm": Mime(SGDm()), "limit_val_batches": 0, "max_rounds": 2}
    clipped = run("sequential", aggregator=NormClipping(bounds), **options)
    assert_close(state_of(run("sequential", **options)), state_of(clipped), rtol=1e-9)


@pytest.mark.parametrize(
    ("algorithm", "names"),
    [
        (ServerOnly(), ["delta"]),
        (Scaffold("i"), ["delta", "delta_c"]),  # each client reads only its own gradient at x, not their mean
        (Mime(SGDm()), ["delta", "full_grad_x"]),
        (FedDane(0.1), ["delta", "full_grad_x"]),
    ],
    ids=repr,
)
def test_bounds_are_required_only_for_sent_messages(algorithm: Algorithm, names: list[str]) -> None:
    options = {} if algorithm.local_work else {"local_epochs": None}
    bounds = dict.fromkeys(names, 1.0)
    run("sequential", algorithm=algorithm, aggregator=NormClipping(bounds), max_rounds=1, **options)


class Poisoned(Algorithm):
    """FedAvg whose clients with an odd number of examples send something else."""

    def __init__(self, attack: str) -> None:
        self.attack = attack

    def finish(self, y: Tensor, run: Run) -> Update:
        noise = torch.randn(run.delta.shape, generator=torch.Generator().manual_seed(0))
        sent = {"flip": -run.delta, "flip ten times": -10 * run.delta, "noise": 10 * noise}[self.attack]
        return Update(send={"delta": sent if run.num_examples % 2 == 1 else run.delta})


def digits_of(bad: int, clients: int = 10) -> tuple[FederatedDataModule, TensorDataset]:
    """Return the digits, with ``bad`` clients that have an odd number of examples, and the test set."""
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(x / 16.0, dtype=torch.float32)[order], torch.tensor(y)[order]
    sizes = [71 if i < bad else 70 for i in range(clients)]
    parts = torch.arange(sum(sizes)).split(sizes)
    test = TensorDataset(x[sum(sizes) :], y[sum(sizes) :])
    sets = [TensorDataset(x[part], y[part]) for part in parts]
    return FederatedDataModule(clients=sets, val=test, batch_size=10), test


def accuracy(attack: str | None, aggregator: Aggregator | None) -> float:
    datamodule, test = digits_of(0 if attack is None else 2)
    torch.manual_seed(0)
    model = MLPClassifier(hidden=(), lr=0.5)
    algorithm = FedAvg() if attack is None else Poisoned(attack)
    options: dict[str, Any] = {"max_rounds": 12, "limit_val_batches": 0, "clients_per_round": 1.0}
    trainer(algorithm=algorithm, aggregator=aggregator, weighting="uniform", **options).fit(model, datamodule)
    x, y = test.tensors
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


DEFENCES: Mapping[str, Aggregator] = {
    "median": CoordinateMedian(),
    "trimmed": TrimmedMean(0.25),
    "geometric": GeometricMedian(iterations=10),
}


@pytest.fixture(scope="module")
def clean() -> float:
    return accuracy(None, None)


@pytest.mark.thorough
@pytest.mark.parametrize("attack", ["flip ten times", "noise"])
def test_one_fifth_bad_clients_breaks_the_mean(attack: str, clean: float) -> None:
    assert clean > 0.9
    assert accuracy(attack, None) < 0.6


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("attack", "name"),
    [pytest.param(a, name, id=f"{a}-{name}") for a in ("flip ten times", "noise") for name in DEFENCES],
)
def test_one_fifth_bad_clients_does_not_break_robust_rules(attack: str, name: str, clean: float) -> None:
    assert accuracy(attack, DEFENCES[name]) > clean - 0.03


@pytest.mark.thorough
def test_robust_rules_keep_accuracy_under_sign_flips(clean: float) -> None:
    for rule in DEFENCES.values():
        assert accuracy("flip", rule) > clean - 0.03


@pytest.mark.thorough
def test_clipping_keeps_accuracy_with_one_fifth_bad_clients(clean: float) -> None:
    assert accuracy("flip ten times", NormClipping(1.0)) > clean - 0.03


def test_full_batch_gradients_go_through_the_rule() -> None:
    sets = [
        TensorDataset(torch.randn(8, 6, generator=torch.Generator().manual_seed(i)), torch.arange(8) % 3)
        for i in range(5)
    ]
    sets[0] = TensorDataset(1e5 * sets[0].tensors[0], sets[0].tensors[1])  # at 10^6, the run would end too early
    norms = {}
    for rule in (None, CoordinateMedian()):
        t = trainer(algorithm=Mime(SGDm()), aggregator=rule, weighting="uniform", clients_per_round=1.0, max_rounds=1)
        torch.manual_seed(0)
        t.fit(nn_linear(), FederatedDataModule(clients=sets, batch_size=8))
        norms[repr(rule)] = float(t.fit_loop.server["m"].norm())
    assert norms["None"] > 1e3
    assert norms["CoordinateMedian()"] < 10


def nn_linear() -> Net:
    model = Net(dropout=0.0)
    model.body = nn.Identity()
    model.head = nn.Linear(6, 3)
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=1e-9)
    return model


def test_clients_without_steps_are_excluded() -> None:
    aggregation = CoordinateMedian().of_round(
        {"delta": "uniform"}, "uniform", [Participant("a", 0, 5, 1, 1), Participant("b", 1, 5, 1, 0)], 5
    )
    add_one(aggregation, 0, 1, {"delta": torch.ones(3, dtype=torch.float64)})
    assert aggregation.weights([1], "uniform") == [0.0]
    assert torch.equal(aggregation.compute(X)[0]["delta"], torch.ones(3, dtype=torch.float64))


def test_aggregator_defaults_to_none() -> None:
    assert trainer().fit_loop.settings.aggregator is None


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrimmedMean(0.5), r"TrimmedMean\(beta=0.5\): beta must be a finite number in \[0, 0.5\)"),
        (lambda: TrimmedMean(-0.1), r"beta must be a finite number in \[0, 0.5\)"),
        (lambda: TrimmedMean("a"), "beta must be"),
        (lambda: GeometricMedian(0), "iterations must be an integer of at least 1"),
        (lambda: GeometricMedian(nu=0.0), r"nu must be a finite number in \(0, inf\)"),
        (lambda: NormClipping(0.0), r"max_norm must be a finite number in \(0, inf\)"),
        (lambda: NormClipping({"delta": float("nan")}), r"max_norm\['delta'\] must be a finite number in \(0, inf\)"),
    ],
)
def test_invalid_arguments_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregator": "median"}, "aggregator must be an Aggregator such as CoordinateMedian.*found 'median'"),
        ({"aggregator": CoordinateMedian}, "aggregator must be an Aggregator"),
        ({"aggregator": CoordinateMedian(), "weighting": "examples"}, "weighting='examples' cannot be combined with"),
        ({"aggregator": TrimmedMean(0.1), "weighting": "steps"}, "weighting='steps' cannot be combined with"),
        ({"aggregator": GeometricMedian(), "algorithm": FedProx(0.1, adaptive=True)}, "FedProx.*losses"),
        ({"aggregator": NormClipping(1.0), "algorithm": Scaffold()}, r"bound for each of \['delta', 'delta_c'\]"),
        ({"aggregator": NormClipping({"delta": 1.0}), "algorithm": Mime(SGDm())}, "'full_grad_x'"),
        ({"aggregator": NormClipping({"delta": 1.0, "dleta": 1.0})}, "bound for each of"),
    ],
)
def test_incompatible_options_are_rejected(options: Any, message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        trainer(**options)


class Normalized(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(self.body, nn.BatchNorm1d(8))


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_averaged_and_local_buffers_are_rejected(buffers: str) -> None:
    with pytest.raises(FederatedError, match="buffers='server'"):
        fit(Normalized(), data(batch_size=4), aggregator=CoordinateMedian(), buffers=buffers)


def test_server_buffers_are_supported() -> None:
    fit(Normalized(), data((8, 8, 8)), aggregator=CoordinateMedian(), buffers="server", max_rounds=1)
