"""FedExP by hand; the given cases are in tests/oracle."""

import pytest
import torch

from lightning_fed.algorithms import FedExP
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import Cohort
from tests.helpers import Round, play, quadratic

X = torch.zeros(1, dtype=torch.float64)
GRAD = quadratic((1.0, 2.0), (-2.0, 4.0))
ROUNDS = [Round({0: (0, 1), 1: (0, 1)}), Round({0: (0,), 1: (0,)})]


def test_server_step_extrapolates_when_clients_disagree():
    # y = 0.875 and -1.5: the mean change is -0.3125, the mean square 1.5078125
    played = play(FedExP(eps=0.001), GRAD, (1, 1), X, ROUNDS[:1])
    eta_g = (0.875**2 + 1.5**2) / 2 / (2 * (0.3125**2 + 0.001))
    assert played.server[0]["eta_g"].item() == pytest.approx(eta_g, rel=1e-14)
    assert played.x[0].item() == pytest.approx(-0.3125 * eta_g, rel=1e-14)


def test_minimum_step_size_one_returns_mean_delta_unmodified():
    delta = torch.ones(1)
    mean = {"delta": delta, "square": torch.ones(1)}
    direction, server = FedExP().update_server(torch.zeros(1), {}, mean, Cohort(1, 1, 3))
    assert direction is delta
    assert server["eta_g"].item() == 1


def test_evaluation_averages_last_two_iterates_after_first_round():
    algorithm = FedExP()
    played = play(algorithm, GRAD, (1, 1), X, ROUNDS)
    assert torch.equal(algorithm.evaluate_at(played.x[0], played.server[0]), played.x[0])
    shown = algorithm.evaluate_at(played.x[1], played.server[1])
    torch.testing.assert_close(shown, (played.x[0] + played.x[1]) / 2, rtol=1e-15, atol=0)


def test_eps_is_scaled_as_in_the_authors_code():
    paper, cohort = FedExP(0.02), FedExP(0.01, "cohort", 0.5)
    mean = {"delta": torch.ones(1), "square": torch.full((1,), 9.0)}
    for number, eps in ((0, 0.02), (2, 0.005)):
        _, server = cohort.update_server(torch.zeros(1), {}, mean, Cohort(2, 5, number))
        assert server["eta_g"].item() == pytest.approx(9 / (2 * (1 + eps)))
    assert paper.update_server(torch.zeros(1), {}, mean, Cohort(2, 5, 2))[1]["eta_g"].item() == pytest.approx(9 / 2.04)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedExP(eps=0), r"eps must be a finite number in \(0, inf\)"),
        (lambda: FedExP(eps_decay=1.5), "eps_decay=1.5"),
        (lambda: FedExP(eps_scaling="code"), "eps_scaling must be 'paper' or 'cohort'"),
    ],
)
def test_invalid_hyperparameters_are_rejected(make, message):
    with pytest.raises(FederatedError, match=message):
        make()
