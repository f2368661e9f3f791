"""Trainer arguments have the meaning that Lightning users expect, counted in rounds."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from lightning_fed import FederatedCallback, FederatedError
from lightning_fed.algorithms import FedAvg
from tests.helpers.training import QUIET, data, fit, parameters, seeded, trainer


@pytest.fixture(scope="module")
def plain() -> torch.Tensor:
    return fit()


@pytest.mark.parametrize(
    "argument",
    [
        {"deterministic": True},
        {"detect_anomaly": True},
        {"inference_mode": False},
        {"reload_dataloaders_every_n_epochs": 1},
        {"sync_batchnorm": True},
        {"limit_val_batches": 1},
        {"num_sanity_val_steps": 0},
        {"num_sanity_val_steps": -1},
        {"log_every_n_steps": 1},
        {"use_distributed_sampler": False},
        {"enable_autolog_hparams": False},
        {"min_epochs": 2},
        {"max_time": "00:01:00:00"},
    ],
    ids=str,
)
def test_arguments_that_do_not_affect_parameters(argument: dict[str, Any], plain: torch.Tensor) -> None:
    assert torch.equal(fit(**argument), plain)


class Seen(FederatedCallback):
    """Keeps the batches of local steps, and the numbers of steps."""

    def __init__(self) -> None:
        self.batches: list[torch.Tensor] = []
        self.steps: list[dict[Any, int]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch[0])

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        self.steps.append(dict(round_report.steps))


def test_overfit_batches_trains_on_the_same_first_batches() -> None:
    seen, datamodule = Seen(), data(sizes=(13,))
    fit(datamodule=datamodule, callbacks=seen, clients_per_round=1, overfit_batches=2, max_rounds=2)
    x = datamodule.client_dataset(0).tensors[0]
    assert len(seen.batches) == 4
    assert all(torch.equal(b, x[4 * (i % 2) : 4 * (i % 2) + 4]) for i, b in enumerate(seen.batches))


def test_fit_accepts_model_and_datamodule_as_keywords() -> None:
    run, model = trainer(algorithm=FedAvg()), seeded()
    run.fit(model=model, datamodule=data())
    assert torch.equal(parameters(model), fit(algorithm=FedAvg()))


def test_parameters_own_their_memory_after_fit() -> None:
    model = seeded()
    fit(model)
    assert all(p.untyped_storage().size() == p.numel() * p.element_size() for p in model.parameters())
    again = pl.Trainer(**QUIET, max_epochs=1)
    again.fit(model, torch.utils.data.DataLoader(data().client_dataset(0), batch_size=4))


def test_parameter_on_the_meta_device_is_rejected() -> None:
    model = seeded()
    model.head = torch.nn.Linear(8, 3, device="meta")
    with pytest.raises(FederatedError, match=r"Net.head.weight is on the device 'meta' and has no numbers"):
        fit(model)
