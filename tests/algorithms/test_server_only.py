from functools import partial

import torch

from lightning_fed.algorithms import ServerOnly
from tests.helpers import Round, play, quadratic

X = torch.zeros(1, dtype=torch.float64)
GRAD = quadratic((1.0, 2.0), (-2.0, 4.0))


def test_each_round_takes_one_server_step_on_the_mean_gradient():
    sgd = partial(torch.optim.SGD, lr=0.5)
    # independent of batches: g = -2 / 4 + 3 * 4 / 4 = 2.5, then 1.75 x + 2.5
    played = play(ServerOnly(), GRAD, (1, 3), X, [Round({0: (0, 1), 1: ()})] * 2, server_optimizer=sgd)
    assert [x.item() for x in played.x] == [-1.25, -1.25 - 0.5 * (1.75 * -1.25 + 2.5)]


def test_declares_no_local_work_and_gradient_at_x():
    assert not ServerOnly.local_work
    assert ServerOnly.full_grad_at == ("x",)
