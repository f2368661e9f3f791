import pytest
import torch

from lightning_fed.algorithms import FedAvg, FedNova
from lightning_fed.core.rounds import Run
from tests.helpers import Round, play, quadratic

X = torch.zeros(1, dtype=torch.float64)
GRAD = quadratic((1.0, 2.0), (-2.0, 4.0))


def test_unequal_steps_match_hand_computed_values():
    # d_0 = -2 after one step, d_1 = 3 after two; tau_eff = 0.25 / 4 + 0.5 * 3 / 4
    played = play(FedNova(), GRAD, (1, 3), X, [Round({0: (0,), 1: (0, 1)})])
    assert played.x[0].item() == -0.4375 * 1.75


def test_equal_steps_match_fedavg():
    rounds = [Round({0: (0, 1), 1: (0, 1)})] * 3
    ours, theirs = (play(a, GRAD, (1, 3), X, rounds).x for a in (FedNova(), FedAvg()))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=0)


@pytest.mark.thorough
def test_stationary_point_is_independent_of_local_work():
    # at a small rate, it solves 1.5 x + 1 = 0 (zero mean gradient), although client 1 takes eight times as many steps
    rounds = [Round({0: (0,), 1: (0,) * 8})] * 400
    ours, theirs = (play(a, GRAD, (1, 1), X, rounds, lr=2**-8).x[-1].item() for a in (FedNova(), FedAvg()))
    assert abs(ours + 2 / 3) < 0.04
    assert abs(theirs + 2 / 3) > 0.5


def test_rates_may_be_scalar_vector_or_per_client():
    y = torch.zeros(3, 2)
    for lr_sum, shape in ((0.5, ()), (torch.tensor(0.5), ()), (torch.ones(2), (2,)), (torch.ones(3, 1), (3, 1))):
        run = Run(y, y, {}, {}, {}, {}, {}, 1, 1, 1, lr_sum, lambda: y)
        assert FedNova().finish(y, run).send["lr_sum"].shape == shape
