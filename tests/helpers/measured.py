"""Diagnosis's measurement of the clients of a small run."""

from typing import Any

from lightning_fed import FederatedDataModule, FederatedTrainer
from lightning_fed.algorithms import FedAvg
from lightning_fed.data import Quadratics
from lightning_fed.lab.diagnosis.measurement import Measured
from lightning_fed.lab.diagnosis.trials import Trial
from lightning_fed.models import Quadratic

A, RATE, STEPS = (3.0, 1.0), 0.05, 4


def measured(model: Any, data: FederatedDataModule, clients: int = 30, few: int = 8, **options: Any) -> Measured:
    trial = Trial(1.0, 1, clients, few, "uniform")
    options = {"algorithm": FedAvg(), "local_steps": STEPS, "precision": "64-true", **options}
    trainer = FederatedTrainer(
        max_rounds=10, callbacks=[trial], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu", limit_val_batches=0, seed=0, **options,
    )  # fmt: skip
    trainer.fit(model, data)
    assert trainer.fit_loop.round == 1
    assert trial.found is not None
    return trial.found


def of_quadratics(x0: float = 1.0, G: float = 10.0, **options: Any) -> Measured:  # noqa: N803
    data = Quadratics(a=A, G=G, rows=4, noise=2.0, batch_size=1)
    return measured(Quadratic(x0=x0, lr=RATE), data, **options)
