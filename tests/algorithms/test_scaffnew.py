"""Scaffnew by hand, and the cohorts that it refuses. The given cases are in tests/oracle."""

import pytest
import torch

from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import Scaffnew
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import Run
from tests.helpers import Round, play, quadratic
from tests.helpers.training import Net, clients, trainer

X = torch.zeros(1, dtype=torch.float64)
GRAD = quadratic((1.0, 2.0), (-2.0, 4.0))
ROUNDS = [Round({0: (0, 1), 1: (0, 1)})] * 2


def test_h_is_updated_with_the_next_x():
    played = play(Scaffnew(prob=0.5), GRAD, (1, 3), X, ROUNDS)
    # y = 0.875 and -1.5, and x is their unweighted mean; h_i = 0.5 / 0.25 (x - y_i)
    assert played.x[0].item() == -0.3125
    h = 2 * (-0.3125 - 0.875), 2 * (-0.3125 + 1.5)
    ends = [-0.3125, -0.3125]
    for _ in range(2):  # the h_i sum to zero, so the mean after one step hides them
        ends = [ends[0] - 0.25 * (ends[0] - 2 - h[0]), ends[1] - 0.25 * (2 * ends[1] + 4 - h[1])]
    assert played.x[1].item() == pytest.approx(sum(ends) / 2, rel=1e-15)


def test_h_is_unchanged_in_a_round_with_zero_rates():
    runs = [Run(X, X, {}, {}, {"h_i": X + 3.0}, {}, {}, 4.0, 4.0, 2, rate, lambda: X, True) for rate in (0.0, X)]
    for run in runs:
        kept = Scaffnew(prob=0.5).finish(X, run).keep
        assert torch.equal(Scaffnew(prob=0.5).init_local(X, {}, kept)["h_i"], X + 3.0)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"clients_per_round": 2}, "there are 2 of 3"),
        ({"clients_per_round": 1.0, "local_steps": None, "local_epochs": 1}, "3 of 3, with 2 to 3 steps"),
        ({"clients_per_round": 1.0, "on_client_error": "drop"}, "leave on_client_error at 'raise'"),
    ],
)
def test_partial_or_uneven_cohort_is_rejected(options, why):
    fitted = trainer(algorithm=Scaffnew(0.5), **{"local_steps": 2, "local_epochs": None, **options})
    with pytest.raises(FederatedError, match=f"Scaffnew needs all clients in every round.*{why}"):
        fitted.fit(Net(), FederatedDataModule(clients=clients((4, 6, 4)), batch_size=2))


def test_invalid_probability_is_rejected():
    with pytest.raises(FederatedError, match=r"prob must be a finite number in \(0, 1\]"):
        Scaffnew(0)
