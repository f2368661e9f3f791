"""The inexactness of clients' local solutions, by hand."""

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_fed import FederatedCallback, FederatedDataModule
from lightning_fed.algorithms import FedProx
from lightning_fed.callbacks import Inexactness
from lightning_fed.models import Quadratic
from tests.helpers.training import fit, trainer


class Listen(FederatedCallback):
    """Records the logged values of gamma."""

    def __init__(self) -> None:
        self.heard: dict[str, float] = {}

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.heard |= {name: float(value) for name, value in trainer.callback_metrics.items() if "gamma" in name}


@pytest.mark.parametrize(("mu", "steps", "gamma"), [(0.0, 1, 0.5), (0.0, 2, 0.25), (1.0, 1, 0.0)])
def test_gamma_equals_the_remaining_gradient_fraction(mu: float, steps: int, gamma: float) -> None:
    # F(x) = x^2 / 2 - 2 x from 0: steps of rate 1/2 halve the gradient -2, and with mu = 1 the first one solves
    rows = TensorDataset(*torch.tensor([[1.0], [-2.0]], dtype=torch.float64))
    measure, listen = Inexactness(), Listen()
    options = {"local_steps": steps, "max_rounds": 1, "clients_per_round": 1.0, "precision": "64-true"}
    run = trainer(algorithm=FedProx(mu=mu), callbacks=[measure, listen], **options)
    run.fit(Quadratic(x0=0.0, lr=0.5), FederatedDataModule(clients=[rows, rows], batch_size=1))
    assert measure.gamma == {0: pytest.approx(gamma), 1: pytest.approx(gamma)}
    assert listen.heard == {"client/gamma": pytest.approx(gamma), "client/gamma_max": pytest.approx(gamma)}


def test_measuring_keeps_identical_bits() -> None:
    assert torch.equal(fit(algorithm=FedProx(mu=0.1), callbacks=Inexactness()), fit(algorithm=FedProx(mu=0.1)))
