"""The rounds when runs settle, and the largest worsening of a curve."""

import math

import pytest

from lightning_fed.lab.quantities import Metric, parse_quantity
from lightning_fed.lab.stability import climb, settled

METRICS = {
    "val_acc": Metric("val_acc", "max", "accuracy"),
    "val_loss": Metric("val_loss", "min", "loss"),
    "other": Metric("other", "min", "other loss"),
}


LOSS = "population/train_loss"


@pytest.mark.parametrize(
    ("loss", "round"),
    [
        ({1: 3.0, 2: 2.0, 3: 2.00009, 4: 1.0}, 3),  # it has converged
        ({1: 3.0, 2: 2.0, 3: 2.00011, 4: 1.0}, 4),  # it has not
        ({1: 3.0, 3: 3.0, 4: 1.0}, 4),  # the value between is unknown
        ({n: 0.2 * n for n in range(1, 15)}, 11),  # growth by 2 in ten rounds
        ({n: 0.09 * n for n in range(1, 15)}, 14),  # growth by 0.9 only
        ({1: math.nan, 2: 2.0}, 2),
    ],
)
def test_run_settles_when_its_loss_converges_or_starts_to_diverge(loss: dict[int, float], round: int) -> None:
    metrics = {**METRICS, LOSS: Metric(LOSS, "min", "loss")}
    series = {LOSS: loss, "val_acc": {n: float(n) for n in range(1, 20)}}
    assert parse_quantity("here", "settled val_acc", metrics).of(series) == round
    assert parse_quantity("here", "settled", metrics).of({**series, "val_acc": {2: 0.5, 99: 0.9}}) == 0.5


def test_climb_is_the_worsening_over_a_number_of_rounds() -> None:
    curve = {1: 3.0, 2: 2.0, 3: 2.5, 4: 2.25}
    assert climb(curve, 1, "min") == (0.5, {2, 3})
    assert climb(curve, 1, "max") == (1.0, {1, 2})
    assert climb(curve, 3, "min") == (-0.75, {1, 4})  # it only improves
    assert climb({1: 3.0, 5: 4.0}, 2, "min") == (0.0, set())
    assert climb({1: math.inf, 2: math.inf}, 1, "min") == (0.0, {1, 2})


def test_rounds_that_show_settling_are_returned() -> None:
    assert settled({1: 3.0, 2: 2.0, 3: 2.00005}) == (3, {2, 3})
    assert settled({1: 0.0, 11: 1.5, 12: 9.0}) == (11, {1, 11})
    assert settled({1: 3.0, 4: 1.0}) == (4, {4})
