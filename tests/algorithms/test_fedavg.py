import pytest
import torch

from lightning_fed.algorithms import FedAvg
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import Run
from tests.helpers import Round, play, quadratic

X = torch.zeros(1, dtype=torch.float64)
GRAD = quadratic((1.0, 2.0), (-2.0, 4.0))
TWICE = Round({0: (0, 1), 1: (0, 1)})


def test_mean_is_weighted_by_examples():
    # y_0 = 0.5, 0.875 and y_1 = -1, -1.5, with weights 1/4 and 3/4
    played = play(FedAvg(), GRAD, (1, 3), X, [TWICE], lr=0.25)
    assert played.x[0].item() == -0.90625


def test_uniform_weighting_matches_hand_computed_mean():
    assert play(FedAvg(), GRAD, (1, 3), X, [TWICE], weighting="uniform").x[0].item() == -0.3125


def test_normalized_pseudo_gradient_averages_over_local_steps():
    # mean gradients along the paths: -1.75 and 3. With one step fewer: -2 and 3
    algorithm = FedAvg(pseudo_grad="normalized")
    assert play(algorithm, GRAD, (1, 3), X, [TWICE]).x[0].item() == -1.8125
    assert play(algorithm, GRAD, (1, 3), X, [Round({0: (0,), 1: (0, 1)})]).x[0].item() == -1.75


def test_raw_pseudo_gradient_sends_engine_delta():
    delta = torch.ones(1)
    run = Run(X, delta, {}, {}, {}, {}, {}, 1, 1, 1, 0.1, lambda: torch.zeros(1))
    assert FedAvg().finish(X, run).send["delta"] is delta


def test_unknown_pseudo_gradient_is_rejected():
    with pytest.raises(FederatedError, match=r"FedAvg\(pseudo_grad='mean'\): .* be 'raw' or 'normalized'"):
        FedAvg(pseudo_grad="mean")
