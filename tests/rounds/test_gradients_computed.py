"""The gradients that a round is reported to have computed are those that were computed."""

from typing import Any

import pytest
import torch

from lightning_fed import FederatedCallback
from lightning_fed.algorithms import FedAvg, FedDane, Mime, MimeLite, MimeMVR, Scaffold, ServerOnly, SGDm
from lightning_fed.server import SystemsHeterogeneity
from tests.helpers.selection import covering
from tests.helpers.training import Net, data, trainer


class Counting(Net):
    """Count the examples whose gradient is taken."""

    examples = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.examples += len(batch[0])
        return super().training_step(batch, batch_idx)


class Gradients(FederatedCallback):
    """Add up what the rounds report."""

    total = 0

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        self.total += round_report.gradients


@pytest.mark.parametrize(
    ("method", "work"),
    covering(
        [
            FedAvg(), Scaffold(), Scaffold(option="i"), Mime(base=SGDm()), MimeLite(base=SGDm()), MimeMVR(a=0.1),
            FedDane(mu=0.1), ServerOnly(),
        ],
        [{"local_epochs": 2}, {"local_steps": 7}],
    ),
)  # fmt: skip
def test_every_example_whose_gradient_is_taken_is_counted(method: Any, work: dict[str, int]) -> None:
    model, gradients = Counting(), Gradients()
    local = work if method.local_work else {"local_epochs": None}
    run = trainer(algorithm=method, max_rounds=3, clients_per_round=2, callbacks=gradients, **local)
    run.fit(model, data(sizes=(5, 9, 14)))
    assert gradients.total == model.examples > 0
    assert run.callback_metrics["round/gradients"] > 0


def test_stragglers_compute_less() -> None:
    model, gradients = Counting(), Gradients()
    slow = SystemsHeterogeneity(stragglers=0.9, policy="keep")
    run = trainer(max_rounds=3, clients_per_round=3, callbacks=gradients, local_epochs=4, heterogeneity=slow)
    run.fit(model, data(sizes=(5, 9, 14)))
    assert 0 < gradients.total == model.examples < 3 * 4 * (5 + 9 + 14)
