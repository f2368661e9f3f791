"""The spread of a metric over clients in exact numbers."""

import math

import pytest

from lightning_fed import FederatedError
from lightning_fed.metrics import spread


def test_mean_deviation_and_percentiles_match_the_clients() -> None:
    found = spread([float(v) for v in range(11)])
    assert (found.mean, found.p10, found.p90) == (5.0, 1.0, 9.0)
    assert found.std == pytest.approx(10**0.5)


@pytest.mark.parametrize(("count", "tenth"), [(1, 1), (9, 1), (10, 1), (11, 2), (20, 2), (21, 3)])
@pytest.mark.parametrize("mode", ["max", "min"])
def test_worst_tenth_has_at_least_a_tenth_of_the_clients(count: int, tenth: int, mode: str) -> None:
    values = [float((7 * v) % count) for v in range(count)]
    worst = sorted(values, reverse=mode == "min")[:tenth]
    assert spread(values, mode).worst_10 == pytest.approx(sum(worst) / tenth)  # type: ignore[arg-type]


def test_values_are_named_with_a_prefix() -> None:
    named = spread([1.0, 2.0]).named("clients/val_acc")
    assert set(named) == {f"clients/val_acc/{name}" for name in ("mean", "std", "worst_10", "p10", "p90")}


def test_empty_values_are_rejected() -> None:
    with pytest.raises(FederatedError, match="no values"):
        spread([])


@pytest.mark.parametrize("mode", ["max", "min"])
def test_client_with_nan_is_among_the_worst(mode: str) -> None:
    assert math.isnan(spread([0.9, math.nan, 0.8], mode).worst_10)  # type: ignore[arg-type]
