"""FedProxVR in NumPy; the given cases are in tests/oracle."""

from typing import Any

import pytest
import torch

from lightning_fed.algorithms import FedProxVR
from lightning_fed.core.errors import FederatedError
from tests.helpers import Round
from tests.helpers.quartic import LR, ROUNDS, X, assert_follows, gradient, mean, path


@pytest.mark.parametrize("estimator", ["svrg", "sarah"])
@pytest.mark.parametrize("weighting", [None, "uniform"])
@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_fedproxvr_matches_numpy_reference(estimator: Any, weighting: str | None, mu: float) -> None:
    x, expected = X, []
    for plan in ROUNDS:
        ends = []
        for i, batches in plan.batches.items():
            v = full = gradient(x, i)
            before, y = x, (x - LR * v + LR * mu * x) / (1 + LR * mu)
            for batch in batches:
                anchor, center = (x, full) if estimator == "svrg" else (before, v)
                v = gradient(y, i, batch) - gradient(anchor, i, batch) + center
                before, y = y, (y - LR * v + LR * mu * x) / (1 + LR * mu)
            ends.append(y)
        x = mean(list(plan.batches), ends, weighting or "examples")
        expected.append(x)
    assert_follows(FedProxVR(mu, estimator), expected, weighting)


def test_sarah_and_svrg_differ_from_the_second_batch() -> None:
    """With one client and two batches, the estimators differ only from the second batch on."""
    for steps, same in ((1, True), (2, False)):
        rounds = [Round({0: ([0, 1], [2, 3])[:steps]})]
        ends = [path(FedProxVR(0.2, kind), rounds)[0] for kind in ("svrg", "sarah")]
        assert torch.allclose(*ends, rtol=1e-14, atol=1e-15) == same


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedProxVR(-1), r"mu must be a finite number in \[0, inf\)"),
        (lambda: FedProxVR(0.1, "saga"), "estimator must be 'svrg' or 'sarah'"),
    ],
)
def test_invalid_hyperparameters_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        make()
