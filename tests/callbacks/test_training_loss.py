"""The loss over all clients' training examples, against a plain loop over them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import SumMetric

from lightning_fed import FederatedCallback, FederatedError
from lightning_fed.callbacks import TrainingLoss
from tests.helpers.training import Net, clients, data, seeded, trainer


class WithDropout(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.5, self.training))


class Remembers(Net):
    """Adds to the loss its mode and what its buffer and its metric have counted, and draws in eval mode, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.steps = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) + float(self.training)
        self.count += 1
        self.steps.update(1.0)
        self.train()
        return loss + self.count + self.steps.compute() + torch.rand(())


class LossesInTwoOrders(FederatedCallback):
    """Measures all clients at once, in two orders, and each by itself."""

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        loop, ids = trainer.fit_loop, [0, 1, 2]
        self.all = loop.training_losses(ids)
        self.backwards = loop.training_losses(ids[::-1])
        self.alone = {i: loop.training_loss(i) for i in ids}


def losses(model: nn.Module, datasets: Any) -> list[float]:
    """Return each client's mean loss in eval mode."""
    model.eval()
    with torch.no_grad():
        return [F.cross_entropy(model(d.tensors[0]), d.tensors[1]).item() for d in datasets]


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_it_is_the_weighted_mean_of_the_clients_losses_in_eval_mode(weighting: Any) -> None:
    sizes = (3, 11, 30)
    datasets = clients(sizes)
    model = WithDropout()
    run = trainer(callbacks=[TrainingLoss(weighting=weighting)], max_rounds=2, clients_per_round=2)
    run.fit(model, data(sizes))
    f = losses(model, datasets)
    weights = sizes if weighting == "examples" else (1, 1, 1)
    expected = sum(w * v for w, v in zip(weights, f, strict=True)) / sum(weights)
    assert float(run.callback_metrics["population/train_loss"]) == pytest.approx(expected, rel=1e-5)


def test_a_clients_loss_is_the_same_whoever_is_measured_before_it() -> None:
    seen = LossesInTwoOrders()
    run = trainer(callbacks=[seen], max_rounds=1)
    run.fit(Remembers(), data((3, 11, 30)))
    assert len(set(seen.all.values())) == 3
    assert seen.all == seen.backwards == seen.alone


class LossOfOne(FederatedCallback):
    """Measures one client, which is on a site that says what it is given."""

    def __init__(self, answers: dict[int, Any] | None = None) -> None:
        self.answers = answers

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        if self.answers is not None:
            trainer.fit_loop.clients.measure_on_sites = lambda *_: self.answers
        self.loss = trainer.fit_loop.training_loss(0)


def test_a_client_without_examples_has_no_loss_and_is_named() -> None:
    with pytest.raises(FederatedError, match="Client 0 has no training examples"):
        trainer(callbacks=[LossOfOne()], max_rounds=1, clients_per_round=2).fit(seeded(), data((0, 11, 30)))


def test_a_client_whose_site_does_not_answer_is_named() -> None:
    answered, silent = LossOfOne({0: {"loss": 2.0}}), LossOfOne({})
    trainer(callbacks=[answered], max_rounds=1).fit(seeded(), data())
    assert answered.loss == 2.0
    with pytest.raises(FederatedError, match="site of client 0 has not answered"):
        trainer(callbacks=[silent], max_rounds=1).fit(seeded(), data())


def test_only_the_clients_asked_for_are_measured_and_only_in_the_rounds_asked_for() -> None:
    callback = TrainingLoss(clients=2, every_n_rounds=3)
    run = trainer(callbacks=[callback], max_rounds=2)
    run.fit(seeded(), data())
    assert len(callback.measured) == 2
    assert "population/train_loss" not in run.callback_metrics


def test_a_weighting_that_does_not_exist_is_refused() -> None:
    with pytest.raises(FederatedError, match="weighting"):
        TrainingLoss(weighting="sizes")  # type: ignore[arg-type]
