"""FedSAM and MoFedSAM in NumPy; the given cases are in tests/oracle."""

from typing import Any

import numpy as np
import pytest
import torch

from lightning_fed.algorithms import FedAvg, FedCM, FedSAM, MoFedSAM
from lightning_fed.algorithms.fedsam import unit
from lightning_fed.core.errors import FederatedError
from tests.helpers.quartic import LR, ROUNDS, Array, X, assert_follows, gradient, mean, path


def uphill(y: Array, i: int, batch: Any, rho: float, eps: float) -> Array:
    g = gradient(y, i, batch)
    return gradient(y + rho * g / (np.sqrt((g**2).sum()) + eps), i, batch)


@pytest.mark.parametrize("eps", [0.0, 0.3])
@pytest.mark.parametrize("weighting", [None, "examples"])
def test_fedsam_matches_numpy_reference(eps: float, weighting: str | None) -> None:
    x, expected = X, []
    for plan in ROUNDS:
        ends = []
        for i, batches in plan.batches.items():
            y = x
            for batch in batches:
                y = y - LR * uphill(y, i, batch, 0.4, eps)
            ends.append(y)
        x = mean(list(plan.batches), ends, weighting or "uniform")
        expected.append(x)
    assert_follows(FedSAM(0.4, eps), expected, weighting)


@pytest.mark.parametrize("eps", [0.0, 0.3])
@pytest.mark.parametrize("mode", ["relative", "paper"])
@pytest.mark.parametrize("weighting", [None, "examples"])
def test_mofedsam_matches_numpy_reference(eps: float, mode: Any, weighting: str | None) -> None:
    x, momentum, expected = X, np.zeros_like(X), []
    for plan in ROUNDS:
        ways, paths = [], []
        for i, batches in plan.batches.items():
            y = x
            for batch in batches:
                y = y - LR * (0.3 * uphill(y, i, batch, 0.4, eps) + 0.7 * momentum)
            ways.append(y - x)
            paths.append((x - y) / (LR * len(batches)))
        momentum = mean(list(plan.batches), paths, weighting or "uniform")
        way = mean(list(plan.batches), ways, weighting or "uniform")
        x = x + 0.8 * way if mode == "relative" else x - 0.8 * momentum
        expected.append(x)
    assert_follows(MoFedSAM(0.4, 0.3, 0.8, mode, eps), expected, weighting)


def test_special_cases_equal_simpler_methods() -> None:
    pairs = [
        (FedSAM(0.0), FedAvg()),
        (MoFedSAM(0.0, 1.0), FedAvg()),
        (MoFedSAM(0.0, 0.3), FedCM(0.3)),
        (MoFedSAM(0.4, 1.0), FedSAM(0.4)),
    ]
    for ours, other in pairs:
        one, two = (path(a, weighting="examples") for a in (ours, other))
        assert all(torch.equal(*pair) for pair in zip(one, two, strict=True)), ours


def test_zero_gradient_gives_zero_direction() -> None:
    assert torch.equal(unit(torch.zeros(3), 0.0), torch.zeros(3))
    assert torch.equal(unit(torch.tensor([3.0, 4.0]), 0.0), torch.tensor([3.0, 4.0]) / 5)
    assert torch.equal(unit(torch.tensor([3.0, 4.0]), 5.0), torch.tensor([3.0, 4.0]) / 10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedSAM(-0.1), r"rho must be a finite number in \[0, inf\)"),
        (lambda: FedSAM(0.1, eps=-1), "eps=-1"),
        (lambda: MoFedSAM(0.1, 0), r"alpha must be a finite number in \(0, 1\]"),
        (lambda: MoFedSAM(-1, 0.1), "rho=-1"),
        (lambda: MoFedSAM(0.1, 0.1, eta_g_mode="x"), "eta_g_mode must be"),
    ],
)
def test_invalid_hyperparameters_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        make()
