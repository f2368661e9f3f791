"""APFL at the ends of its mixture, and its refusals. The given cases are in tests/oracle."""

from typing import Any

import pytest
import torch

from lightning_fed import FederatedError
from lightning_fed.algorithms import APFL, FedAvg
from tests.helpers import Round, play, quadratic
from tests.helpers.personal import close, kept, one_client, run

STEPS = Round({0: (0, 1)})


@pytest.mark.thorough
def test_averaged_model_equals_fedavg_for_any_mixture() -> None:
    averaged = run(FedAvg(), weighting="uniform").fit_loop.state.x
    for alpha in (0.0, 0.6):
        assert torch.equal(run(APFL(alpha), weighting="uniform").fit_loop.state.x, averaged), alpha


def test_single_client_with_alpha_one_matches_server_model() -> None:
    fitted = run(APFL(1.0), one_client(), clients_per_round=1)
    close(kept(fitted)[0]["v"], fitted.fit_loop.state.x)


def test_two_steps_match_hand_computed_values() -> None:
    played = play(APFL(0.5), quadratic((1.0,), (-2.0,)), (1,), torch.zeros(1, dtype=torch.float64), [STEPS])
    # y = 0.5 and v = 0.25 after one step of 0.25: half of it moves v. Then the gradient at 0.375 is -1.625
    assert played.x[0].item() == 0.5 + 0.25 * 1.5
    assert played.clients[0][0]["v"].item() == 0.25 + 0.25 * 0.5 * 1.625


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: APFL(1.5), r"alpha must be a finite number in \[0, 1\]"),
        (lambda: run(APFL(0.5), accumulate_grad_batches=2), "accumulate_grad_batches=2 cannot be combined with APFL"),
        (lambda: run(APFL(0.5), personal=["head.*"]), "cannot be combined with APFL.*own whole model"),
    ],
)
def test_invalid_hyperparameters_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        make()
