"""Several processes measure what one does."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_fed import FederatedCallback
from lightning_fed.algorithms import Scaffold
from lightning_fed.callbacks import (
    ClientAccuracy,
    ControlVariateError,
    GradientDissimilarity,
    HessianDissimilarity,
    Inexactness,
    LocalDrift,
    PersonalizedAccuracy,
    TrainingLoss,
    UpdateCosine,
)
from tests.helpers.training import data, seeded, trainer

FAMILIES = {"gradient", "population", "hessian", "drift", "update", "control", "clients_train", "personalized_train"}


class Write(FederatedCallback):
    """Writes what was logged last, since the processes' own memory is gone afterwards."""

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
    run = trainer(callbacks=[*measures, Write(path)], algorithm=Scaffold(), max_rounds=2, clients_per_round=4, **kwargs)
    run.fit(seeded(), data())
    found: dict[str, float] = json.loads(path.read_text())
    return found


def test_two_processes_measure_what_one_does(tmp_path: Path) -> None:
    alone = measured(tmp_path / "alone.json")
    assert {name.split("/")[0] for name in alone} == {*FAMILIES, "client"}
    together = measured(tmp_path / "together.json", strategy="clients_fork", devices=2)
    assert together == {name: pytest.approx(value, rel=1e-4, abs=1e-6) for name, value in alone.items()}
