"""Resuming a run with other settings raises or warns. No setting changes silently."""

import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import TensorDataset

from lightning_fed import FederatedError
from lightning_fed.algorithms import FedAvg, FedDane, Scaffold
from lightning_fed.data import BalancedDirichlet, Digits, FeatureShift, FederatedDataModule, Iid, RandomCrop, Shrink
from lightning_fed.models import MLPClassifier
from lightning_fed.server import FedAdam, UniformSampler
from tests.helpers.engines import Ordinary
from tests.helpers.training import data, trainer

SGD = partial(torch.optim.SGD, lr=0.1)
ADAM = partial(torch.optim.Adam, lr=0.01)


class Scheduled(Ordinary):
    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Slower(Ordinary):
    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Cycling(Ordinary):
    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters(), momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3)]


class Plateau(Ordinary):
    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


def told(path: Path, first: dict[str, Any], then: dict[str, Any]) -> list[str]:
    """Run a round, resume with other settings, and return the warnings about the checkpoint."""
    whole: dict[str, Any] = {"module": Ordinary, "optimizer": SGD, "sizes": (13, 8, 21, 5, 16, 9), "batch_size": 4}

    def start(rounds: int, ckpt_path: Path | None, **settings: Any) -> Any:
        chosen = {name: settings.pop(name) for name in whole}
        torch.manual_seed(0)
        t = trainer(max_rounds=rounds, **settings)
        datamodule = data(chosen["sizes"], chosen["batch_size"])
        t.fit(chosen["module"](chosen["optimizer"]), datamodule, ckpt_path=ckpt_path, weights_only=False)
        return t

    start(1, None, **{**whole, **first}).save_checkpoint(path / "half.ckpt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start(2, path / "half.ckpt", **{**whole, **first, **then})
    return [
        str(w.message) for w in caught if "checkpoint" in str(w.message).lower() and "dirpath" not in str(w.message)
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"module": Scheduled},
        {"module": Plateau},
        {"module": Cycling},
        {"algorithm": Scaffold()},
        {
            "server_optimizer": partial(FedAdam, lr=0.1),
            "server_lr_scheduler": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5),
        },
        {"sampler": lambda seed, round, population: population[:2]},
    ],
)
def test_unchanged_settings_cause_no_warning(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert told(tmp_path, settings, {}) == []


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ({}, {"optimizer": partial(SGD, lr=5.0)}, "local optimizer continues with .*lr=0.1 (this run has 5.0)"),
        (
            {},
            {"optimizer": partial(SGD, momentum=0.9)},
            "local optimizer continues with .*momentum=0 (this run has 0.9)",
        ),
        ({"module": Scheduled}, {"optimizer": partial(SGD, lr=5.0)}, "lr=0.1 (this run has 5.0)"),
        (
            {"server_optimizer": partial(FedAdam, lr=0.1)},
            {"server_optimizer": partial(FedAdam, lr=0.01)},
            "server's optimizer continues with the checkpoint's lr=0.1 (this run has 0.01)",
        ),
        (
            {"module": Scheduled},
            {"module": Slower},
            "ExponentialLR continues with the checkpoint's gamma=0.5 (this run has 0.9)",
        ),
        (
            {"server_lr_scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1)},
            {"server_lr_scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=2)},
            "StepLR continues with the checkpoint's step_size=1 (this run has 2)",
        ),
        ({}, {"local_epochs": 3}, "written with local_epochs=1 (this run has 3). The run continues with this run's"),
        ({}, {"clients_per_round": 2}, "sampler=UniformSampler(3) (this run has UniformSampler(2))"),
        (
            {"algorithm": FedDane(0.1)},
            {"gradient_sampler": UniformSampler(2)},
            "gradient_sampler=the sampler (this run has UniformSampler(2))",
        ),
        ({}, {"batch_size": 8}, "batch_size=4 (this run has 8)"),
        ({}, {"weighting": "uniform"}, "weighting='examples' (this run has 'uniform')"),
        ({}, {"buffers": "server"}, "buffers='average' (this run has 'server')"),
        ({}, {"local_optimizer_state": "keep"}, "local_optimizer_state='reset' (this run has 'keep')"),
        (
            {"gradient_clip_val": 1.0},
            {"gradient_clip_algorithm": "value"},
            "gradient_clip_algorithm='norm' (this run has 'value')",
        ),
        (
            {"gradient_clip_val": 1.0, "gradient_clip_on": "corrected"},
            {"gradient_clip_val": 2.0},
            "gradient_clip_val=1.0 (this run has 2.0)",
        ),
        ({}, {"accumulate_grad_batches": 2}, "accumulate_grad_batches=1 (this run has 2)"),
        ({}, {"precision": "bf16-mixed"}, "precision='32-true' (this run has 'bf16-mixed')"),
        ({}, {"sizes": (13, 8, 21, 5, 16, 8)}, "other numbers of examples per client. The run continues"),
    ],
)
def test_changed_settings_warn(tmp_path: Path, first: Any, then: Any, message: str) -> None:
    (text,) = told(tmp_path, first, then)
    before, _, after = message.partition(".*")
    assert before in text
    assert after in text


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ({}, {"optimizer": ADAM}, "checkpoint's local optimizer is SGD, this run's is Adam"),
        ({"optimizer": ADAM}, {"optimizer": SGD}, "checkpoint's local optimizer is Adam, this run's is SGD"),
        ({"module": Scheduled}, {"module": Plateau}, "schedules: ExponentialLR. This run's: ReduceLROnPlateau"),
        ({}, {"module": Scheduled}, "schedules: none. This run's: ExponentialLR"),
        ({"algorithm": Scaffold()}, {"sizes": (13, 8, 21, 5, 16, 8)}, "what its clients keep belongs to their data"),
        ({"algorithm": FedAvg()}, {"algorithm": Scaffold()}, "method is 'FedAvg', this run's is 'Scaffold'"),
    ],
)
def test_settings_incompatible_with_resuming_are_rejected(tmp_path: Path, first: Any, then: Any, message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        told(tmp_path, first, then)


@pytest.mark.parametrize(
    "then",
    [
        BalancedDirichlet(4, 0.3, seed=1),
        lambda labels: [part.flip(0) for part in BalancedDirichlet(4, 0.3)(labels)],
        FeatureShift(BalancedDirichlet(4, 0.3), noise=0.1),
    ],
)
def test_different_split_of_equal_sizes_warns_or_is_rejected(tmp_path: Path, then: Any) -> None:
    def run(algorithm: Any, partition: Any, **fit: Any) -> Any:
        t = trainer(max_rounds=1 + len(fit), algorithm=algorithm, clients_per_round=2)
        t.fit(MLPClassifier(), Digits(partition=partition), **fit)
        return t

    for algorithm in (FedAvg(), Scaffold()):
        path = tmp_path / f"{type(algorithm).__name__}.ckpt"
        run(algorithm, BalancedDirichlet(4, 0.3)).save_checkpoint(path)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(algorithm, BalancedDirichlet(4, 0.3), ckpt_path=path)
        assert not any("split" in str(w.message) for w in caught)
    with pytest.warns(UserWarning, match="written with another split of the examples. The run continues with this"):
        run(FedAvg(), then, ckpt_path=tmp_path / "FedAvg.ckpt")
    with pytest.raises(FederatedError, match="another split of the examples, and what its clients keep belongs to"):
        run(Scaffold(), then, ckpt_path=tmp_path / "Scaffold.ckpt")


class MeanClassifier(pl.LightningModule):
    """A classifier of the mean pixel, for images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 10)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.nn.functional.cross_entropy(self.layer(batch[0].flatten(1).mean(1, keepdim=True)), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def half(batch: Any) -> Any:
    return [batch[0] / 2, *batch[1:]]


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ({"transform": Shrink(2)}, {"transform": Shrink(4)}, r"batch_transform=Shrink\(factor=2\) \(this run has Shr"),
        ({"augment": RandomCrop(1)}, {}, r"batch_augment=RandomCrop\(padding=1\) \(this run has None\)"),
        ({}, {"transform": half}, r"batch_transform=None \(this run has .*test_other_settings.half\)"),
        ({"transform": half}, {"transform": half}, None),
    ],
)
def test_different_batch_functions_warn(tmp_path: Path, first: Any, then: Any, message: str | None) -> None:
    def run(options: Any, **fit: Any) -> Any:
        images = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        train = TensorDataset(images, torch.arange(40) % 10)
        t = trainer(max_rounds=1 + len(fit), clients_per_round=2)
        t.fit(MeanClassifier(), FederatedDataModule(train=train, partition=Iid(4), **options), **fit)
        return t

    run(first).save_checkpoint(tmp_path / "half.ckpt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(then, ckpt_path=tmp_path / "half.ckpt")
    found = [str(w.message) for w in caught if "The checkpoint was written" in str(w.message)]
    assert len(found) == (message is not None)
    assert message is None or re.search(message, found[0])


def test_different_environment_seed_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    assert told(tmp_path, {"seed": 0}, {"seed": None}) == [
        "The run continues with the checkpoint's seed 0, not with 5."
    ]
