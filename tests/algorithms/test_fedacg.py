"""FedACG by hand; the given cases are in tests/oracle."""

import pytest
import torch

from lightning_fed.algorithms import FedACG, FedProx
from lightning_fed.core.errors import FederatedError
from tests.helpers import Round, play, quadratic

X = torch.zeros(1, dtype=torch.float64)
GRAD = quadratic((1.0, 2.0), (-2.0, 4.0))
ROUNDS = [Round({0: (0, 1), 1: (0, 1)}), Round({0: (0,), 1: (0,)})]


def test_clients_start_at_the_momentum_lookahead_point():
    algorithm = FedACG(lam=0.5, beta=0.0)
    played = play(algorithm, GRAD, (1, 1), X, ROUNDS)
    # the first round is FedAvg's: m = -0.3125 and x = m. Then clients start at z = 1.5 m
    assert played.server[0]["m"].item() == -0.3125
    assert played.x[0].item() == pytest.approx(1.5 * -0.3125, rel=1e-15)
    assert algorithm.evaluate_at(played.x[0], played.server[0]).item() == pytest.approx(-0.3125, rel=1e-15)


def test_zero_momentum_equals_fedprox():
    ours = play(FedACG(lam=0, beta=0.3), GRAD, (1, 3), X, ROUNDS, weighting="examples")
    assert ours.x == play(FedProx(0.3), GRAD, (1, 3), X, ROUNDS).x


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedACG(lam=1), r"lam must be a finite number in \[0, 1\)"),
        (lambda: FedACG(beta=-1), "beta=-1"),
    ],
)
def test_invalid_hyperparameters_are_rejected(make, message):
    with pytest.raises(FederatedError, match=message):
        make()
