"""Measurements of clients, on problems with known constants."""

import math
from typing import Any

import pytest
import torch

from lightning_fed.algorithms import ServerOnly
from lightning_fed.data import LeastSquares, Quadratics
from lightning_fed.lab.diagnosis.theory import suggest
from lightning_fed.models import LinearRegression, Quadratic
from tests.helpers.measured import RATE, STEPS, A, measured, of_quadratics


def test_measured_constants_match_quadratics() -> None:
    m = of_quadratics(x0=1.0, G=10.0)  # gradients 13 and -9
    assert (m.population, m.clients, m.few, m.steps) == (2, 2, 2, (STEPS, STEPS, STEPS))
    assert m.loss == pytest.approx(1.0)
    assert m.gradient == pytest.approx(2.0)
    assert list(m.G) == pytest.approx([11.0, 0.0])
    assert pytest.approx(math.sqrt((13**2 + 9**2) / 2) / 2) == m.B
    assert m.noise == (pytest.approx(2.0), 0.0)
    assert m.curvature[0] == pytest.approx(2.0)
    assert m.delta[0] == m.delta_mean == pytest.approx(1.0)
    assert (m.rate, m.is_plain, m.round) == (RATE, True, 0)


@pytest.mark.parametrize("steps", [1, 4, 40])
def test_drift_matches_the_closed_form(steps: int) -> None:
    m = of_quadratics(x0=1.0, G=10.0, local_steps=steps)
    length = [(1 - (1 - RATE * a) ** steps) / a for a in (*A, 2.0)]
    apart = -(length[0] * 13 + length[1] * -9) / 2
    together = -length[2] * 2
    assert m.drift == pytest.approx(abs(apart - together) / (RATE * steps), abs=1e-12)
    assert m.progress == pytest.approx(abs(together) / (RATE * steps))
    # to first order in the rate, drift is at most its bound; these two clients reach it
    assert steps == 40 or m.drift <= suggest(m, steps, 2, 10, 0.0).drift_bound + 1e-12


def test_gradient_equals_the_drift_at_the_fedavg_fixed_point() -> None:
    tiny, G = 1e-4, 10.0  # noqa: N806
    first, second = ((1 - (1 - tiny * a) ** STEPS) / a for a in A)
    x = (second - first) * G / (first * A[0] + second * A[1])  # the fixed point of the clients' mean
    data = Quadratics(a=A, G=G)
    m = measured(Quadratic(x0=x, lr=tiny), data)
    assert m.gradient == pytest.approx(m.drift, rel=1e-3)
    assert m.drift == pytest.approx(suggest(m, STEPS, 2, 10, 0.0).drift_bound, rel=1e-2)


@pytest.mark.thorough
def test_measured_hessians_match_least_squares() -> None:
    data = LeastSquares(num_clients=5, dim=4, samples=12, seed=3)
    m = measured(LinearRegression(4, bias=False), data, few=5)
    hessians = [x.T @ x / len(x) for x, _ in (data.client_dataset(i).tensors for i in range(5))]
    mean = sum(hessians) / 5
    norms = [float(torch.linalg.matrix_norm(h - mean, 2)) for h in hessians]
    assert m.curvature[0] == pytest.approx(float(torch.linalg.eigvalsh(mean)[-1]), rel=1e-2)
    assert m.delta[0] == pytest.approx(max(norms), rel=1e-2)
    assert m.delta_mean == pytest.approx(sum(norms) / 5, rel=1e-2)


@pytest.mark.thorough
def test_sample_of_clients_reports_its_uncertainty() -> None:
    data = LeastSquares(num_clients=40, dim=3, samples=10, seed=1)
    whole = measured(LinearRegression(3, bias=False), data, clients=40, few=2)
    part = measured(LinearRegression(3, bias=False), data, clients=10, few=2)
    assert (whole.clients, part.clients, part.few) == (40, 10, 2)
    assert whole.G[1] == 0.0
    assert 0 < part.G[1] < part.G[0]
    assert abs(part.G[0] - whole.G[0]) < 3 * part.G[1]


def test_inapplicable_measurements_are_nan() -> None:
    m = of_quadratics(algorithm=ServerOnly(), local_steps=None)
    assert (m.rate, m.steps) == (1.0, (0, 0, 0))  # the server's rate
    assert math.isnan(m.drift)


def test_model_not_twice_differentiable_is_measured_without_hessians() -> None:
    class Rough(LinearRegression):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _Once.apply(super().forward(x))

    m = measured(Rough(3, bias=False), LeastSquares(num_clients=3, dim=3, samples=8))
    assert "cannot be differentiated twice" in m.no_hessian
    assert math.isnan(m.delta[0])
    assert m.G[0] > 0
    theory = suggest(m, STEPS, 3, 10, 0.0)
    assert math.isnan(theory.mvr_rate)
    assert math.isnan(theory.ceiling)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad
