import pytest
import torch

from lightning_fed.algorithms import FedAvg, FedCM
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import Cohort
from tests.helpers import Round, play, quadratic

X = torch.zeros(1, dtype=torch.float64)
GRAD = quadratic((1.0, 2.0), (-2.0, 4.0))
ROUNDS = [Round({0: (0, 1), 1: (0, 1)}), Round({0: (0,), 1: (0,)})]


def test_relative_mode_matches_hand_computed_values():
    played = play(FedCM(alpha=0.5), GRAD, (1, 3), X, ROUNDS)
    # round 1: y = 0.46875 and -0.875, mean directions -0.9375 and 1.75; clients have equal weights
    assert played.x[0].item() == -0.203125
    assert played.server[0]["delta"].item() == 0.40625
    # round 2: half of -2.203125 and of 3.59375, plus half of 0.40625
    assert played.x[1].item() == -0.203125 - 0.25 * (-0.8984375 + 2.0) / 2
    assert played.server[1]["delta"].item() == (-0.8984375 + 2.0) / 2


def test_server_steps_match_hand_computed_values():
    assert play(FedCM(alpha=0.5, eta_g=0.25, eta_g_mode="paper"), GRAD, (1, 3), X, ROUNDS).x[0].item() == -0.1015625
    assert play(FedCM(alpha=0.5, eta_g=2.0), GRAD, (1, 3), X, ROUNDS).x[0].item() == -0.40625


def test_unequal_steps_are_normalized_per_client():
    # directions -1, -0.875 (mean -0.9375) and 2
    played = play(FedCM(alpha=0.5), GRAD, (1, 3), X, [Round({0: (0, 1), 1: (0,)})])
    assert played.server[0]["delta"].item() == (-0.9375 + 2.0) / 2


def test_alpha_one_equals_fedavg():
    ours = play(FedCM(alpha=1), GRAD, (1, 3), X, ROUNDS, weighting="examples")
    assert ours.x == play(FedAvg(), GRAD, (1, 3), X, ROUNDS).x


def test_eta_g_one_returns_mean_delta_unmodified():
    delta = torch.ones(1)
    direction, _ = FedCM(alpha=0.5).update_server(X, {}, {"delta": delta, "gradient": delta}, Cohort(1, 1, 0))
    assert direction is delta


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedCM(alpha=0), r"FedCM\(alpha=0\): alpha must be a finite number in \(0, 1\]"),
        (lambda: FedCM(alpha=1.1), "alpha=1.1"),
        (lambda: FedCM(alpha=0.1, eta_g=0.0), "eta_g=0.0"),
        (lambda: FedCM(alpha=0.1, eta_g_mode="absolute"), r"eta_g_mode must be 'relative' or 'paper'"),
    ],
)
def test_invalid_hyperparameters_are_rejected(make, message):
    with pytest.raises(FederatedError, match=message):
        make()
