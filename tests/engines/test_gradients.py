"""Gradients outside the local steps have no side effects."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_fed import FederatedCallback
from lightning_fed.algorithms import Algorithm, FedAvg, FedDane, FedProx, Mime, MimeMVR, Scaffold, SGDm
from lightning_fed.core.errors import FederatedError
from tests.helpers.engines import SIZES, Ordinary, assert_close, data, run, state_of

METHODS: dict[str, Callable[[], Algorithm]] = {
    "Mime": lambda: Mime(SGDm()),
    "MimeMVR": lambda: MimeMVR(0.1),
    "SCAFFOLD, option i": lambda: Scaffold(option="i"),
    "FedDANE": lambda: FedDane(mu=0.1),
    "FedProx, adaptive": lambda: FedProx(mu=0.1, adaptive=True),
}


class Counts(Ordinary):
    """Assigns a new tensor to its buffer in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen = self.seen + 1
        return super().training_step(batch, batch_idx)


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_assigned_buffer_counts_only_local_steps(method: str) -> None:
    counted = [
        state_of(run("sequential", Counts, algorithm=make()))["buffer.seen"] for make in (METHODS[method], FedAvg)
    ]
    assert torch.equal(*counted)
    assert float(counted[0]) > 0


class OneNumber(Ordinary):
    """Returns its loss as a tensor of shape [1]."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx).reshape(1)


@pytest.mark.thorough
def test_losses_of_the_population_may_have_one_dimension() -> None:
    options: dict[str, Any] = {"algorithm": METHODS["FedProx, adaptive"](), "max_rounds": 1}
    one, other = (state_of(run("sequential", make, **options)) for make in (Ordinary, OneNumber))
    assert torch.equal(one["x"], other["x"])


class NewMetrics(Ordinary):
    """Counts the batches of each round in a new metric, which is added to the others or replaces the last one."""

    def __init__(self, adds: bool) -> None:
        super().__init__()
        self.adds, self.tracker, self.made = adds, torch.nn.ModuleList([MeanMetric()]), list[MeanMetric]()

    def on_train_epoch_start(self) -> None:
        self.made.append(MeanMetric())
        if self.adds:
            self.tracker.append(self.made[-1])
        else:
            self.tracker[0] = self.made[-1]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.tracker[-1].update(1.0)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("adds", [True, False], ids=["added", "replaced"])
@pytest.mark.parametrize(
    "method", ["Mime", *(pytest.param(m, marks=pytest.mark.thorough) for m in ["SCAFFOLD, option i", "FedDANE"])]
)
def test_metrics_of_hooks_count_only_local_steps(method: str, adds: bool) -> None:
    models = [NewMetrics(adds), NewMetrics(adds)]
    for model, make in zip(models, (METHODS[method], FedAvg), strict=True):
        run("sequential", lambda model=model: model, algorithm=make(), max_rounds=2)
        assert model.tracker[-1] is model.made[-1]
    found, expected = ([metric.update_count for metric in model.made] for model in models)
    assert found == expected
    assert min(found) > 0


class Weighted(Counts):
    """Its loss depends on a buffer that every step changes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / self.seen


@pytest.mark.parametrize(
    "method", ["SCAFFOLD, option i", *(pytest.param(m, marks=pytest.mark.thorough) for m in ["Mime", "FedDANE"])]
)
def test_full_gradient_is_independent_of_the_batch_size(method: str) -> None:
    small, whole = (
        run("sequential", Weighted, partial(data, SIZES, full_batch_size=size), algorithm=METHODS[method]())
        for size in (2, 512)
    )
    assert_close(state_of(small), state_of(whole))


class Scaled(Ordinary):
    alpha = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.alpha * super().training_step(batch, batch_idx)


class Scales(FederatedCallback):
    """Sets a loss factor for each client."""

    def on_client_start(self, trainer: Any, pl_module: Any, round: int, client_id: Any) -> None:
        pl_module.alpha = 1.0 + client_id


class Rates(FederatedCallback):
    """Sets a learning rate for each client."""

    def on_client_start(self, trainer: Any, pl_module: Any, round: int, client_id: Any) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] = 0.01 * (1 + client_id)


@pytest.mark.parametrize("engine", ["sequential", "auto"])
@pytest.mark.parametrize("method", ["Mime", "MimeMVR", "FedDANE", "FedProx, adaptive"])
def test_per_client_attribute_with_averaged_gradients_is_rejected(method: str, engine: str) -> None:
    with pytest.raises(FederatedError, match="on_client_start changes the attribute 'alpha' of Scaled for client"):
        run(engine, Scaled, algorithm=METHODS[method](), callbacks=[Scales()])


@pytest.mark.thorough
def test_per_client_rates_and_per_client_gradients_are_allowed() -> None:
    run("sequential", Scaled, algorithm=METHODS["Mime"](), callbacks=[Rates()])
    run("sequential", Scaled, algorithm=METHODS["SCAFFOLD, option i"](), callbacks=[Scales()])
