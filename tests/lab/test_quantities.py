"""Numbers derived from curves, in exact values."""

import math

import pytest

from lightning_fed import FederatedError
from lightning_fed.lab.quantities import Metric, cost, parse_quantity

METRICS = {
    "val_acc": Metric("val_acc", "max", "accuracy"),
    "val_loss": Metric("val_loss", "min", "loss"),
    "other": Metric("other", "min", "other loss"),
    "overflown": Metric("overflown", "max", "likelihood"),
}


SERIES = {
    "val_acc": {2: 0.5, 4: 0.8, 6: 0.7},
    "val_loss": {2: 3.0, 4: math.nan, 6: 1.0},
    "other": {2: 3.0, 4: 5.0, 6: 1.0, 8: 1.5},
    "round/gradients": dict.fromkeys(range(1, 7), 10.0),
    "comm/bytes_up": dict.fromkeys(range(1, 7), 1.0),
    "comm/bytes_down": dict.fromkeys(range(1, 7), 2.0),
    "overflown": {2: 0.5, 4: math.inf, 6: 0.7},
    "time/simulated": {n: float(n * n) for n in range(1, 7)},
}


LOSS = "population/train_loss"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("final", 0.7),
        ("best", 0.8),
        ("mean", 2.0 / 3),
        ("last 2", 0.75),
        ("last 99", 2.0 / 3),
        ("round 4", 0.8),
        ("final val_loss", 1.0),
        ("best val_loss", 1.0),
        ("round 4 val_loss", math.inf),
        ("setbacks", 0.1),
        ("setbacks other", 2.5),
        ("setbacks val_loss", math.inf),
        ("mean val_loss", math.inf),  # nan is the worst value
        ("rounds to 0.75", 4),
        ("rounds to .5 val_acc", 2),
        ("rounds to 0.9", math.inf),
        ("rounds to 1e0 val_loss", 6),
        ("gradients to 0.75", 40),
        ("bytes to 0.75", 12),
        ("simulated seconds to 0.75", 16),
        ("simulated seconds to 0.75 over 2", 36),
        ("rounds to 0.65 over 2 val_acc", 4),
        ("rounds to 0.6 over 3", 6),
        ("rounds to 0.1 over 4", math.inf),  # there are three values
        ("rounds to 2 over 2 val_loss", math.inf),
        ("climb 2", 0.1),
        ("climb 4", -0.2),
        ("climb 1", 0.0),  # no two values are one round apart
        ("climb 2 other", 2.0),
        ("best overflown", 0.7),  # an infinite value is no good one, even where high values are good
        ("round 4 overflown", -math.inf),
        ("rounds to 0.6 overflown", 6),
    ],
)
def test_quantity_has_its_expected_value(text: str, value: float) -> None:
    assert parse_quantity("here", text, METRICS).of(SERIES) == pytest.approx(value)


@pytest.mark.parametrize(
    ("factor", "value", "target"), [(1.0, 0.8999999761581421, "0.9"), (100.0, 0.57, "57"), (100.0, 0.29, "29")]
)
def test_value_equal_to_the_target_reaches_it_despite_rounding(factor: float, value: float, target: str) -> None:
    metrics = {"val_acc": Metric("val_acc", "max", "accuracy", factor)}
    assert parse_quantity("here", f"rounds to {target}", metrics).of({"val_acc": {1: 0.1, 2: value, 3: 0.95}}) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("finall", "is not a quantity"),
        ("final val_ac", "Did you mean 'val_acc'"),
        ("rounds to", "is not a quantity"),
        ("rounds to many", "is not a quantity"),
        ("last 0", "at least 1"),
        ("rounds to 1 over 0", "at least 1"),
        ("final over 2", "'over 2'"),
        (3, "is not a quantity"),
        ("", "is not a quantity"),
    ],
)
def test_invalid_quantity_is_rejected(text: object, message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        parse_quantity("here", text, METRICS)


def test_settling_requires_the_training_loss() -> None:
    with pytest.raises(FederatedError, match=f"needs {LOSS} among the metrics"):
        parse_quantity("here", "settled", METRICS)
    with pytest.raises(FederatedError, match=f"{LOSS} was not logged"):
        parse_quantity("here", "settled", {**METRICS, LOSS: Metric(LOSS, "min", "loss")}).of(SERIES)


def test_lower_climb_is_better() -> None:
    quantity = parse_quantity("here", "climb 10", METRICS)
    assert (quantity.mode, quantity.worst) == ("min", math.inf)
    assert quantity.label == "greatest climb in 10 rounds of accuracy"


def test_unlogged_metric_is_named() -> None:
    with pytest.raises(FederatedError, match="val_acc was not logged"):
        parse_quantity("here", "final", METRICS).of({"other": {1: 1.0}})
    with pytest.raises(FederatedError, match="round/gradients"):
        cost({"val_acc": {1: 1.0}}, "gradients")


def test_costs_of_a_resumed_run_without_its_first_rounds_are_unknown() -> None:
    with pytest.raises(FederatedError, match="begins with round 5, so the gradients before are not known"):
        cost({"val_acc": {5: 1.0}, "round/gradients": {5: 10.0, 6: 10.0}}, "gradients")
    assert cost({"val_acc": {5: 1.0}}, "rounds") == {5: 5.0}
    assert cost({"val_acc": {6: 1.0}, "time/simulated": {5: 7.0}}, "simulated seconds") == {5: 7.0, 6: 7.0}  # a total


def test_lower_cost_is_better_for_any_metric() -> None:
    assert parse_quantity("here", "rounds to 0.5", METRICS).mode == "min"
    assert parse_quantity("here", "final", METRICS).worst == -math.inf
