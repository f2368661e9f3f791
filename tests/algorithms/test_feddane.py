import pytest
import torch

from lightning_fed.algorithms import FedDane
from lightning_fed.core.errors import FederatedError
from tests.helpers import Round, play, quadratic

X = torch.zeros(1, dtype=torch.float64)
GRAD = quadratic((1.0, 2.0), (-2.0, 4.0))


def test_separate_gradient_cohort_matches_hand_computed_values():
    # g = grad F_1(0) = 4 although client 0 trains; v = -2 + 4 + 2 = 4, then -3 + 4 + 2 + mu (-1) = 2
    played = play(FedDane(mu=1), GRAD, (1, 3), X, [Round({0: (0, 1)}, grad_cohort=(1,))])
    assert played.x[0].item() == -1.5


def test_same_gradient_cohort_matches_hand_computed_values():
    # g = -2 / 4 + 3 * 4 / 4 = 2.5; v = 2.5 for both, then -2.625 + 2 + 2.5 and 2.75 - 4 + 2.5
    algorithm = FedDane(mu=0, grad_cohort="same")
    played = play(algorithm, GRAD, (1, 3), X, [Round({0: (0, 1), 1: (0, 1)}, grad_cohort=(1,))])
    y_0, y_1 = -0.625 - 0.25 * 1.875, -0.625 - 0.25 * 1.25
    assert played.x[0].item() == 0.25 * y_0 + 0.75 * y_1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedDane(mu=-0.5), r"FedDane\(mu=-0.5\)"),
        (lambda: FedDane(mu=0, grad_cohort="other"), r"grad_cohort must be 'own' or 'same'"),
    ],
)
def test_invalid_hyperparameters_are_rejected(make, message):
    with pytest.raises(FederatedError, match=message):
        make()
