"""FedSpeed in NumPy; the given cases are in tests/oracle."""

from typing import Any

import numpy as np
import pytest
import torch

from lightning_fed.algorithms import FedDyn, FedSpeed
from lightning_fed.core.errors import FederatedError
from tests.helpers.quartic import LR, ROUNDS, SIZES, X, assert_follows, gradient, mean, path


@pytest.mark.parametrize(("perturb", "eps"), [("plain", 0.0), ("unit", 0.0), ("unit", 0.3)])
@pytest.mark.parametrize("dual_average", ["cohort", "all"])
@pytest.mark.parametrize("alpha", [0.6, 1.0])
def test_fedspeed_matches_numpy_reference(perturb: Any, eps: float, dual_average: Any, alpha: float) -> None:
    x, duals, expected = X, np.zeros((len(SIZES), len(X))), []
    for plan in ROUNDS:
        ids, ends = list(plan.batches), []
        for i, batches in plan.batches.items():
            y = x
            for batch in batches:
                g = gradient(y, i, batch)
                at = y + 0.4 * (g if perturb == "plain" else g / (np.sqrt((g**2).sum()) + eps))
                y = y - LR * ((1 - alpha) * g + alpha * gradient(at, i, batch) + (y - x + duals[i]) / 2.0)
            ends.append(y)
            duals[i] += y - x
        x = mean(ids, ends, "uniform") + (duals[ids] if dual_average == "cohort" else duals).mean(0)
        expected.append(x)
    assert_follows(FedSpeed(2.0, 0.4, alpha, perturb, eps, dual_average), expected, "examples")


def test_matches_feddyn_without_radius_or_second_gradient() -> None:
    for ours in (FedSpeed(0.5, 0.0, dual_average="all"), FedSpeed(0.5, 0.4, 0.0, dual_average="all")):
        for pair in zip(path(ours), path(FedDyn(2.0)), strict=True):
            torch.testing.assert_close(*pair, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedSpeed(0, 0.1), r"lam must be a finite number in \(0, inf\)"),
        (lambda: FedSpeed(1, -0.1), "rho=-0.1"),
        (lambda: FedSpeed(1, 0.1, alpha=1.5), r"alpha must be a finite number in \[0, 1\]"),
        (lambda: FedSpeed(1, 0.1, perturb="sam"), "perturb must be 'plain' or 'unit'"),
        (lambda: FedSpeed(1, 0.1, dual_average="x"), "dual_average must be 'cohort' or 'all'"),
        (lambda: FedSpeed(1, 0.1, eps=0.1), "eps=0.1 has no effect with perturb='plain'"),
    ],
)
def test_invalid_hyperparameters_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        make()
