"""FedSAM, MoFedSAM, FedSpeed and FedProxVR by hand and in NumPy; the given cases are in tests/oracle."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fed.algorithms import FedAvg, FedCM, FedDyn, FedProxVR, FedSAM, FedSpeed, MoFedSAM
from lightning_fed.algorithms.fedsam import unit
from lightning_fed.core.errors import FederatedError
from tests.helpers import Round, play

P, CLIENTS, LR = 4, 3, 0.1
STREAM = np.random.default_rng(0)
ROWS = [(STREAM.normal(size=(n, P)), STREAM.normal(size=n)) for n in (5, 8, 6)]
SIZES = tuple(len(targets) for _, targets in ROWS)
X = STREAM.normal(size=P)
ROUNDS = [
    Round({0: ([0, 1], [2, 3, 4], [1, 2]), 2: ([5], [0, 1, 2])}),
    Round({1: ([0, 7], [3], [4, 5]), 0: ([4, 0],)}),
    Round({2: ([1, 2], [3, 4]), 1: ([2, 6], [1])}),
]
Array = NDArray[np.float64]


def gradient(y: Array, i: int, batch: Any = None) -> Array:
    """The gradient of half the mean squared error and a quartic term, so that it is not linear."""
    rows, targets = ROWS[i] if batch is None else (part[batch] for part in ROWS[i])
    return rows.T @ (rows @ y - targets) / len(targets) + 0.3 * y**3


def grad(y: Tensor, i: int, batch: Any) -> Tensor:
    return torch.from_numpy(gradient(y.numpy(), i, batch))


def assert_follows(algorithm: Any, expected: list[Array], weighting: str | None = None) -> None:
    played = play(algorithm, grad, SIZES, torch.from_numpy(X), ROUNDS, LR, weighting)
    for got, want in zip(played.x, expected, strict=True):
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-12, atol=1e-14)


def mean(ids: list[int], values: list[Array], weighting: str) -> Array:
    weights = [SIZES[i] if weighting == "examples" else 1 for i in ids]
    return np.average(values, axis=0, weights=weights)


def uphill(y: Array, i: int, batch: Any, rho: float, eps: float) -> Array:
    g = gradient(y, i, batch)
    return gradient(y + rho * g / (np.sqrt((g**2).sum()) + eps), i, batch)


@pytest.mark.parametrize("eps", [0.0, 0.3])
@pytest.mark.parametrize("weighting", [None, "examples"])
def test_fedsam(eps: float, weighting: str | None) -> None:
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
def test_mofedsam(eps: float, mode: Any, weighting: str | None) -> None:
    x, momentum, expected = X, np.zeros(P), []
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


@pytest.mark.parametrize(("perturb", "eps"), [("plain", 0.0), ("unit", 0.0), ("unit", 0.3)])
@pytest.mark.parametrize("dual_average", ["cohort", "all"])
@pytest.mark.parametrize("alpha", [0.6, 1.0])
def test_fedspeed(perturb: Any, eps: float, dual_average: Any, alpha: float) -> None:
    x, duals, expected = X, np.zeros((CLIENTS, P)), []
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


@pytest.mark.parametrize("estimator", ["svrg", "sarah"])
@pytest.mark.parametrize("weighting", [None, "uniform"])
@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_fedproxvr(estimator: Any, weighting: str | None, mu: float) -> None:
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


def test_without_a_radius_they_are_the_methods_that_they_are_made_of() -> None:
    pairs = [
        (FedSAM(0.0), FedAvg()),
        (MoFedSAM(0.0, 1.0), FedAvg()),
        (MoFedSAM(0.0, 0.3), FedCM(0.3)),
        (MoFedSAM(0.4, 1.0), FedSAM(0.4)),
    ]
    for ours, other in pairs:
        one, two = (play(a, grad, SIZES, torch.from_numpy(X), ROUNDS, LR, "examples") for a in (ours, other))
        assert all(torch.equal(*pair) for pair in zip(one.x, two.x, strict=True)), ours
    for ours in (FedSpeed(0.5, 0.0, dual_average="all"), FedSpeed(0.5, 0.4, 0.0, dual_average="all")):
        one, two = (play(a, grad, SIZES, torch.from_numpy(X), ROUNDS, LR) for a in (ours, FedDyn(2.0)))
        for pair in zip(one.x, two.x, strict=True):
            torch.testing.assert_close(*pair, rtol=1e-13, atol=1e-15)


def test_a_gradient_of_zero_has_no_direction() -> None:
    assert torch.equal(unit(torch.zeros(3), 0.0), torch.zeros(3))
    assert torch.equal(unit(torch.tensor([3.0, 4.0]), 0.0), torch.tensor([3.0, 4.0]) / 5)
    assert torch.equal(unit(torch.tensor([3.0, 4.0]), 5.0), torch.tensor([3.0, 4.0]) / 10)


def test_sarah_follows_the_iterate_before_and_svrg_the_start() -> None:
    """One client, two batches: the second one tells the estimators apart, the first one does not."""
    at = torch.from_numpy(X)
    for steps, same in ((1, True), (2, False)):
        ends = [
            play(FedProxVR(0.2, kind), grad, SIZES, at, [Round({0: ([0, 1], [2, 3])[:steps]})], LR).x[0]
            for kind in ("svrg", "sarah")
        ]
        assert torch.allclose(*ends, rtol=1e-14, atol=1e-15) == same


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedSAM(-0.1), r"rho must be a finite number in \[0, inf\)"),
        (lambda: FedSAM(0.1, eps=-1), "eps=-1"),
        (lambda: MoFedSAM(0.1, 0), r"alpha must be a finite number in \(0, 1\]"),
        (lambda: MoFedSAM(-1, 0.1), "rho=-1"),
        (lambda: MoFedSAM(0.1, 0.1, eta_g_mode="x"), "eta_g_mode must be"),
        (lambda: FedSpeed(0, 0.1), r"lam must be a finite number in \(0, inf\)"),
        (lambda: FedSpeed(1, -0.1), "rho=-0.1"),
        (lambda: FedSpeed(1, 0.1, alpha=1.5), r"alpha must be a finite number in \[0, 1\]"),
        (lambda: FedSpeed(1, 0.1, perturb="sam"), "perturb must be 'plain' or 'unit'"),
        (lambda: FedSpeed(1, 0.1, dual_average="x"), "dual_average must be 'cohort' or 'all'"),
        (lambda: FedSpeed(1, 0.1, eps=0.1), "eps=0.1 has no effect with perturb='plain'"),
        (lambda: FedProxVR(-1), r"mu must be a finite number in \[0, inf\)"),
        (lambda: FedProxVR(0.1, "saga"), "estimator must be 'svrg' or 'sarah'"),
    ],
)
def test_wrong_hyper_parameters_are_named(make: Any, message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        make()
