import math

import pytest
import torch

from lightning_fed.algorithms import FedAvg, FedProx
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import Cohort
from tests.helpers import Round, play, quadratic

X = torch.zeros(1, dtype=torch.float64)
GRAD = quadratic((1.0, 2.0), (-2.0, 4.0))
TWICE = Round({0: (0, 1), 1: (0, 1)})


def test_proximal_term_matches_hand_computed_values():
    # y_0: 0.5, then 0.5 - 0.25 (-1.5 + 0.5); y_1: -1, then -1 - 0.25 (2 - 1)
    played = play(FedProx(mu=1), GRAD, (1, 3), X, [TWICE])
    assert played.x[0].item() == 0.25 * 0.75 + 0.75 * -1.25
    assert played.server[0]["mu"].item() == 1.0


def test_mu_zero_equals_fedavg():
    rounds = [TWICE, Round({1: (0,)})]
    prox, avg = (play(a, GRAD, (1, 3), X, rounds).x for a in (FedProx(mu=0), FedAvg()))
    assert prox == avg


def adapt(algorithm: FedProx, losses: list[float]) -> list[float]:
    server, mus = algorithm.init_server(X), []
    for r, loss in enumerate(losses):
        server = algorithm.begin_round(X, server, Cohort(1, 1, r, loss=torch.tensor(loss, dtype=torch.float64)))
        mus.append(server["mu"].item())
    return mus


def test_mu_rises_with_the_loss_and_falls_after_patience():
    algorithm = FedProx(mu=0.5, adaptive={"step": 0.25, "patience": 2})
    assert algorithm.population_loss
    #          first  rose  fell  fell  fell  rose  fell  equal fell  fell
    losses = [1.0, 2.0, 1.5, 1.0, 0.5, 0.75, 0.5, 0.5, 0.25, 0.125]
    assert adapt(algorithm, losses) == [0.5, 0.75, 0.75, 0.5, 0.5, 0.75, 0.75, 0.75, 0.75, 0.5]


def test_mu_never_falls_below_zero():
    assert adapt(FedProx(mu=0.1, adaptive={"step": 0.25, "patience": 1}), [3.0, 2.0, 1.0]) == [0.1, 0.0, 0.0]


def test_new_mu_takes_effect_in_the_current_round():
    algorithm = FedProx(mu=0, adaptive={"step": 1.0, "patience": 5})
    losses = iter([1.0, 2.0])
    played = play(
        algorithm, GRAD, (1, 3), X, [TWICE, TWICE], loss=lambda x: torch.tensor(next(losses), dtype=torch.float64)
    )
    fixed = play(FedProx(mu=1), GRAD, (1, 3), played.x[0], [TWICE])
    assert played.x[1] == fixed.x[0]


def test_population_loss_is_not_requested_without_adaptation():
    for algorithm in (FedProx(mu=1), FedProx(mu=1, adaptive=False)):
        assert not algorithm.population_loss
        assert set(algorithm.init_server(X)) == {"mu"}


def test_mu_stays_float32_with_half_precision_models():
    assert FedProx(mu=0.1).init_server(torch.zeros(2, dtype=torch.bfloat16))["mu"].dtype == torch.float32


def test_adaptive_rule_is_filled_with_defaults():
    assert FedProx(mu=1, adaptive={"patience": 3.0}).adaptive == {"step": 0.1, "patience": 3}


def test_engine_without_population_loss_is_rejected():
    algorithm = FedProx(mu=1, adaptive=True)
    with pytest.raises(FederatedError, match="population loss"):
        algorithm.begin_round(X, algorithm.init_server(X), Cohort(1, 1, 0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedProx(mu=-1), r"FedProx\(mu=-1\): mu must be a finite number in \[0, inf\)"),
        (lambda: FedProx(mu=math.nan), "mu=nan"),
        (lambda: FedProx(mu=1, adaptive=0.1), r"FedProx\(adaptive=0.1\): adaptive must be None, True or"),
        (lambda: FedProx(mu=1, adaptive={"steps": 0.1}), r"unknown \['steps'\]; allowed are 'step' and 'patience'"),
        (lambda: FedProx(mu=1, adaptive={"step": 0}), r"adaptive\['step'\]=0"),
        (lambda: FedProx(mu=1, adaptive={"patience": 0}), r"adaptive\['patience'\]=0"),
        (lambda: FedProx(mu=1, adaptive={"patience": 2.5}), "patience must be a whole number"),
    ],
)
def test_invalid_hyperparameters_are_rejected(make, message):
    with pytest.raises(FederatedError, match=message):
        make()
