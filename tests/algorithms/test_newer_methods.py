"""FedExP, FedACG and SCAFFOLD-M by hand; the given cases are in tests/oracle."""

import pytest
import torch

from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import FedACG, FedAvg, FedCM, FedExP, FedProx, Scaffnew, ScaffoldM
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import Cohort
from tests.helpers import Round, play, quadratic
from tests.helpers.training import Net, clients, trainer

X = torch.zeros(1, dtype=torch.float64)
GRAD = quadratic((1.0, 2.0), (-2.0, 4.0))
ROUNDS = [Round({0: (0, 1), 1: (0, 1)}), Round({0: (0,), 1: (0,)})]


def test_fedexp_extrapolates_where_clients_disagree():
    # y = 0.875 and -1.5: the mean change is -0.3125, the mean square 1.5078125
    played = play(FedExP(eps=0.001), GRAD, (1, 1), X, ROUNDS[:1])
    eta_g = (0.875**2 + 1.5**2) / 2 / (2 * (0.3125**2 + 0.001))
    assert played.server[0]["eta_g"].item() == pytest.approx(eta_g, rel=1e-14)
    assert played.x[0].item() == pytest.approx(-0.3125 * eta_g, rel=1e-14)


def test_fedexp_never_steps_less_than_fedavg_and_then_hands_the_mean_on_untouched():
    delta = torch.ones(1)
    mean = {"delta": delta, "square": torch.ones(1)}
    direction, server = FedExP().update_server(torch.zeros(1), {}, mean, Cohort(1, 1, 3))
    assert direction is delta
    assert server["eta_g"].item() == 1


def test_fedexp_shows_the_mean_of_the_last_two_iterates_but_the_first_alone():
    algorithm = FedExP()
    played = play(algorithm, GRAD, (1, 1), X, ROUNDS)
    assert torch.equal(algorithm.evaluate_at(played.x[0], played.server[0]), played.x[0])
    shown = algorithm.evaluate_at(played.x[1], played.server[1])
    torch.testing.assert_close(shown, (played.x[0] + played.x[1]) / 2, rtol=1e-15, atol=0)


def test_fedexp_scales_eps_as_its_authors_do():
    paper, cohort = FedExP(0.02), FedExP(0.01, "cohort", 0.5)
    mean = {"delta": torch.ones(1), "square": torch.full((1,), 9.0)}
    for number, eps in ((0, 0.02), (2, 0.005)):
        _, server = cohort.update_server(torch.zeros(1), {}, mean, Cohort(2, 5, number))
        assert server["eta_g"].item() == pytest.approx(9 / (2 * (1 + eps)))
    assert paper.update_server(torch.zeros(1), {}, mean, Cohort(2, 5, 2))[1]["eta_g"].item() == pytest.approx(9 / 2.04)


def test_fedacg_starts_at_the_point_that_the_momentum_leads_to():
    algorithm = FedACG(lam=0.5, beta=0.0)
    played = play(algorithm, GRAD, (1, 1), X, ROUNDS)
    # the first round is FedAvg's: m = -0.3125, x = m, and clients start next at z = 1.5 m
    assert played.server[0]["m"].item() == -0.3125
    assert played.x[0].item() == pytest.approx(1.5 * -0.3125, rel=1e-15)
    assert algorithm.evaluate_at(played.x[0], played.server[0]).item() == pytest.approx(-0.3125, rel=1e-15)


def test_fedacg_without_momentum_is_fedprox():
    ours = play(FedACG(lam=0, beta=0.3), GRAD, (1, 3), X, ROUNDS, weighting="examples")
    assert ours.x == play(FedProx(0.3), GRAD, (1, 3), X, ROUNDS).x


def test_scaffold_m_keeps_the_mean_of_the_clients_own_gradients():
    played = play(ScaffoldM(beta=0.5), GRAD, (1, 1), X, ROUNDS[:1])
    # half steps of 0.25: gradients -2 and -1.75 at 0.25; 4 and 3 at -0.5
    assert played.server[0]["c"].item() == ((-2 - 1.75) / 2 + (4 + 3) / 2) / 2
    assert played.server[0]["g"].item() == (0.5 * (-2 - 1.75) / 2 + 0.5 * (4 + 3) / 2) / 2


def test_scaffold_m_moves_as_fedcm_in_its_first_round_and_with_beta_one_as_fedavg():
    for beta, other in ((0.4, FedCM(0.4)), (1.0, FedAvg())):
        weighting = "uniform" if beta == 1 else None
        ours = play(ScaffoldM(beta), GRAD, (1, 3), X, ROUNDS[:1])
        assert ours.x == play(other, GRAD, (1, 3), X, ROUNDS[:1], weighting=weighting).x


def test_scaffnew_renews_h_with_the_next_x():
    played = play(Scaffnew(prob=0.5), GRAD, (1, 3), X, ROUNDS)
    # y = 0.875 and -1.5, and their plain mean; h_i = 0.5 / 0.25 (x - y_i)
    assert played.x[0].item() == -0.3125
    h = 2 * (-0.3125 - 0.875), 2 * (-0.3125 + 1.5)
    ends = (-0.3125 - 0.25 * (-0.3125 - 2 - h[0]), -0.3125 - 0.25 * (-0.625 + 4 - h[1]))
    assert played.x[1].item() == pytest.approx(sum(ends) / 2, rel=1e-15)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"clients_per_round": 2}, "there are 2 of 3"),
        ({"clients_per_round": 1.0, "local_steps": None, "local_epochs": 1}, "3 of 3, with 2 to 3 steps"),
        ({"clients_per_round": 1.0, "on_client_error": "drop"}, "leave on_client_error at 'raise'"),
    ],
)
def test_scaffnew_refuses_a_cohort_that_is_not_everybody_alike(options, why):
    fitted = trainer(algorithm=Scaffnew(0.5), **{"local_steps": 2, "local_epochs": None, **options})
    with pytest.raises(FederatedError, match=f"Scaffnew needs all clients in every round.*{why}"):
        fitted.fit(Net(), FederatedDataModule(clients=clients((4, 6, 4)), batch_size=2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Scaffnew(0), r"prob must be a finite number in \(0, 1\]"),
        (lambda: FedExP(eps=0), r"eps must be a finite number in \(0, inf\)"),
        (lambda: FedExP(eps_decay=1.5), "eps_decay=1.5"),
        (lambda: FedExP(eps_scaling="code"), "eps_scaling must be 'paper' or 'cohort'"),
        (lambda: FedACG(lam=1), r"lam must be a finite number in \[0, 1\)"),
        (lambda: FedACG(beta=-1), "beta=-1"),
        (lambda: ScaffoldM(beta=0), r"beta must be a finite number in \(0, 1\]"),
        (lambda: ScaffoldM(0.5, gamma=0), "gamma=0"),
        (lambda: ScaffoldM(0.5, gamma_mode="x"), "gamma_mode must be"),
    ],
)
def test_wrong_hyper_parameters_are_named(make, message):
    with pytest.raises(FederatedError, match=message):
        make()
