"""Measures do not affect a run, resumed or not, and several processes measure the same as one."""

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn

from lightning_fed import FederatedCallback
from lightning_fed.algorithms import FedAvg, Mime, Scaffold, SGDm
from lightning_fed.callbacks import (
    ClientAccuracy,
    ControlVariateError,
    GradientDissimilarity,
    HessianDissimilarity,
    Inexactness,
    LocalDrift,
    PersonalizedAccuracy,
    TargetMetric,
    TrainingLoss,
    UpdateCosine,
)
from tests.helpers.training import Net, Trajectory, classification, data, parameters, same, seeded, trainer

MEASURES: dict[str, Callable[[], Callback]] = {
    "gradients": GradientDissimilarity,
    "hessians": lambda: HessianDissimilarity(clients=2, max_iterations=2),
    "drift": LocalDrift,
    "cosine": UpdateCosine,
    "loss": TrainingLoss,
    "controls": ControlVariateError,
    "target": lambda: TargetMetric("val_loss", 0.5, mode="min"),
    "clients": ClientAccuracy,
    "clients_train": lambda: ClientAccuracy("val_loss", mode="min", on="train", every_n_rounds=2),
    "personalized": lambda: PersonalizedAccuracy(local_steps=3),
}
VAL = {i: classification(6, seed=200 + i) for i in range(6)}


class Moody(Net):
    """Has dropout, running statistics, and a validation that draws random numbers."""

    def __init__(self, momentum: float = 0.0) -> None:
        super().__init__(momentum=momentum)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("val_noise", torch.rand(()))

    def on_validation_epoch_end(self) -> None:
        assert "val_noise" in self.trainer.callback_metrics

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=self.hparams.momentum)


class Notes(FederatedCallback):
    """Records the state of the module, the trainer and the global generators after a measure."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, trainer: Any, module: Any) -> None:
        own = {k: float(v) for k, v in trainer.callback_metrics.items() if k in ("train_loss", "val_loss", "val_noise")}
        modes = [part.training for part in module.modules()]
        draws = torch.rand(2).tolist(), random.random(), float(np.random.rand())
        grads = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
        state = {k: v.clone() for k, v in module.state_dict().items()}
        self.seen.append([own, modes, list(draws), str(trainer.state.stage), grads, state])

    def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
        self.note(trainer, pl_module)

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        self.note(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.note(trainer, pl_module)


def run(measures: list[Callback], method: Any, **kwargs: Any) -> tuple[Tensor, Notes, Trajectory, Any]:
    notes, path, model = Notes(), Trajectory(), seeded(Moody, momentum=kwargs.pop("momentum", 0.0))
    ckpt_path, extra = kwargs.pop("ckpt_path", None), kwargs.pop("callbacks", [])
    fitted = trainer(callbacks=[*measures, *extra, notes, path], algorithm=method, **kwargs)
    fitted.fit(model, data(client_val=VAL, drop_last=True), ckpt_path=ckpt_path)
    return parameters(model), notes, path, fitted.fit_loop.state.state_dict()


RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "fedavg": (FedAvg(), {}),
    "scaffold": (Scaffold(), {}),
    "keeping": (FedAvg(), {"momentum": 0.9, "local_optimizer_state": "keep", "buffers": "local"}),
    "mime": (Mime(base=SGDm()), {}),
}


@cache
def without_measures(kind: str) -> tuple[Tensor, Notes, Trajectory, Any]:
    method, options = RUNS[kind]
    return run([], method, max_rounds=2, **options)


PAIRS = [(kind, name) for kind in RUNS for name in MEASURES if kind == "scaffold" or name != "controls"]
TOGETHER = [
    ("scaffold", ("controls", "drift", "cosine", "clients_train")),
    ("keeping", ("gradients", "hessians", "loss", "personalized")),
    ("mime", ("target", "clients")),
]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        *TOGETHER,
        *(pytest.param(kind, (name,), id=f"{kind}-{name}", marks=pytest.mark.thorough) for kind, name in PAIRS),
    ],
)
def test_run_with_measures_has_identical_bits(kind: str, names: tuple[str, ...]) -> None:
    method, options = RUNS[kind]
    measures = [MEASURES[name]() for name in names]
    without, with_it = without_measures(kind), run(measures, method, max_rounds=2, **options)
    assert torch.equal(without[0], with_it[0])
    assert same(without[1].seen, with_it[1].seen)
    assert all(same(a, b) for a, b in zip(without[2].ends, with_it[2].ends, strict=True))
    assert same(without[3], with_it[3])


def test_default_selection_covers_every_measure() -> None:
    assert sorted(name for _, names in TOGETHER for name in names) == sorted(MEASURES)


@pytest.mark.thorough
@pytest.mark.parametrize("method", [FedAvg(), Scaffold()], ids=repr)
def test_resumed_run_with_measures_has_identical_bits(method: Any, tmp_path: Path) -> None:
    def measures() -> list[Callback]:
        return [make() for name, make in MEASURES.items() if name != "controls" or isinstance(method, Scaffold)]

    without = run([], method, max_rounds=3)
    saving = {"callbacks": [ModelCheckpoint(tmp_path, save_last=True)], "enable_checkpointing": True}
    run(measures(), method, max_rounds=2, **saving)
    resumed = run(measures(), method, max_rounds=3, ckpt_path=tmp_path / "last.ckpt")
    assert torch.equal(without[0], resumed[0])
    assert all(torch.equal(a, b) for a, b in zip(without[2].models[2:], resumed[2].models, strict=True))


def test_measures_do_not_affect_the_vectorized_engine() -> None:
    def fitted(measures: list[Callback]) -> Tensor:
        model = seeded(Net)
        run = trainer(callbacks=measures, algorithm=Scaffold(), engine="vectorized", max_rounds=2)
        run.fit(model, data(client_val=VAL))
        return parameters(model)

    measures = [make() for name, make in MEASURES.items() if name != "drift"]
    assert torch.equal(fitted([]), fitted(measures))


class Impatient(FederatedCallback):
    """Evaluates a client before a round, and repeatedly within it."""

    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []

    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        self.found = [trainer.fit_loop.evaluate_client(0, "train", steps=3)]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(trainer.fit_loop.evaluate_client(0, "train", steps=3))


@pytest.mark.thorough
def test_evaluating_a_client_mid_training_does_not_change_the_run() -> None:
    impatient = Impatient()
    options = {"momentum": 0.9, "local_optimizer_state": "keep", "buffers": "local", "max_rounds": 2}
    without, with_it = without_measures("keeping"), run([impatient], FedAvg(), **options)
    assert torch.equal(without[0], with_it[0])
    assert same(without[3], with_it[3])
    assert len(impatient.found) > 5
    assert all(found == impatient.found[0] for found in impatient.found)


@pytest.mark.thorough
def test_measuring_is_deterministic() -> None:
    def measured() -> dict[str, float]:
        fitted = trainer(callbacks=[make() for make in MEASURES.values()], algorithm=Scaffold(), max_rounds=1)
        fitted.fit(seeded(Moody), data(client_val=VAL, drop_last=True))
        return {k: float(v) for k, v in fitted.callback_metrics.items() if k.split("/")[0] != "round"}

    assert measured() == measured()


# Several processes

FAMILIES = {"gradient", "population", "hessian", "drift", "update", "control", "clients_train", "personalized_train"}


class Write(FederatedCallback):
    """Writes the last logged values to disk, since the processes' memory is lost afterwards."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        values = {
            k: float(v) for k, v in trainer.callback_metrics.items() if k.split("/")[0] in FAMILIES or "gamma" in k
        }
        if trainer.is_global_zero:
            self.path.write_text(json.dumps(values))


def measured(path: Path, **kwargs: Any) -> dict[str, float]:
    measures = [
        GradientDissimilarity(),
        TrainingLoss(),
        HessianDissimilarity(clients=2, max_iterations=2),
        LocalDrift(),
        UpdateCosine(),
        ControlVariateError(),
        Inexactness(),
        ClientAccuracy(on="train"),
        PersonalizedAccuracy(on="train", local_steps=2),
    ]
    run = trainer(callbacks=[*measures, Write(path)], algorithm=Scaffold(), max_rounds=1, clients_per_round=4, **kwargs)
    run.fit(seeded(), data())
    found: dict[str, float] = json.loads(path.read_text())
    return found


@pytest.mark.thorough
def test_two_processes_measure_the_same_as_one(tmp_path: Path) -> None:
    alone = measured(tmp_path / "alone.json")
    assert {name.split("/")[0] for name in alone} == {*FAMILIES, "client"}
    together = measured(tmp_path / "together.json", strategy="clients_fork", devices=2)
    assert together == {name: pytest.approx(value, rel=1e-4, abs=1e-6) for name, value in alone.items()}
