"""SCAFFOLD-M by hand; the given cases are in tests/oracle."""

import pytest
import torch

from lightning_fed.algorithms import FedAvg, FedCM, ScaffoldM
from lightning_fed.core.errors import FederatedError
from tests.helpers import Round, play, quadratic

X = torch.zeros(1, dtype=torch.float64)
GRAD = quadratic((1.0, 2.0), (-2.0, 4.0))
ROUNDS = [Round({0: (0, 1), 1: (0, 1)})]


def test_server_keeps_the_mean_of_client_gradients():
    played = play(ScaffoldM(beta=0.5), GRAD, (1, 1), X, ROUNDS)
    # half steps of 0.25: gradients -2 and -1.75 at 0.25; 4 and 3 at -0.5
    assert played.server[0]["c"].item() == ((-2 - 1.75) / 2 + (4 + 3) / 2) / 2
    assert played.server[0]["g"].item() == (0.5 * (-2 - 1.75) / 2 + 0.5 * (4 + 3) / 2) / 2


@pytest.mark.parametrize(
    ("options", "x"),
    [
        # y = 0.46875 and -0.875; the mean direction of the four steps is 0.40625
        ({}, -0.203125),
        ({"gamma": 2.0}, 2 * -0.203125),
        ({"gamma": 0.5, "gamma_mode": "paper"}, -0.5 * 0.40625),
    ],
)
def test_server_steps_match_hand_computed_values(options, x):
    assert play(ScaffoldM(0.5, **options), GRAD, (1, 1), X, ROUNDS).x[0].item() == x


def test_first_round_matches_fedcm_and_fedavg_with_beta_one():
    for beta, other in ((0.4, FedCM(0.4)), (1.0, FedAvg())):
        weighting = "uniform" if beta == 1 else None
        ours = play(ScaffoldM(beta), GRAD, (1, 3), X, ROUNDS)
        assert ours.x == play(other, GRAD, (1, 3), X, ROUNDS, weighting=weighting).x


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ScaffoldM(beta=0), r"beta must be a finite number in \(0, 1\]"),
        (lambda: ScaffoldM(0.5, gamma=0), "gamma=0"),
        (lambda: ScaffoldM(0.5, gamma_mode="x"), "gamma_mode must be"),
    ],
)
def test_invalid_hyperparameters_are_rejected(make, message):
    with pytest.raises(FederatedError, match=message):
        make()
