"""Options that cannot work in rounds are refused by name before the first one, with the reason and the remedy."""

import re
from datetime import timedelta
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import (
    BatchSizeFinder,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch.utils.data import DataLoader

from lightning_fed import FederatedDataModule, FederatedError, FederatedTrainer
from lightning_fed.algorithms import FedAvg, FedDane, Mime, Scaffold, ServerOnly, SGDm
from lightning_fed.callbacks import PersonalizedAccuracy
from lightning_fed.server import UniformSampler
from tests.helpers.ids import spelled
from tests.helpers.training import QUIET, Net, classification, data, fit, seeded, trainer


def optimizing(make: Any) -> pl.LightningModule:
    class Custom(Net):
        def configure_optimizers(self) -> Any:
            return make(self)

    return seeded(Custom)


def per_step(module: Net) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}]


def mixed(module: Net) -> Any:
    module.head.double()
    return torch.optim.SGD(module.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda m: [torch.optim.SGD(m.body.parameters(), 0.1), torch.optim.SGD(m.head.parameters(), 0.1)],
            "several optimizers, which only a module with manual optimization can step.* Use parameter groups",
        ),
        (
            lambda m: torch.optim.LBFGS(m.parameters()),
            r"\.configure_optimizers\(\): the local optimizer LBFGS is not supported: it evaluates the closure",
        ),
        (lambda m: torch.optim.Rprop(m.parameters()), "Rprop is not supported"),
        (lambda m: torch.optim.ASGD(m.parameters()), "ASGD is not supported"),
        (lambda m: torch.optim.SGD(m.parameters(), 0.1, maximize=True), "maximize=True.*negate the loss"),
        (lambda m: torch.optim.SGD([p.requires_grad_(False) for p in m.parameters()], 0.1), "no trainable parameter"),
        (
            lambda m: torch.optim.SGD([*m.parameters(), torch.nn.Parameter(torch.zeros(2))], 0.1),
            "1 parameters that are not the module's own",
        ),
        (per_step, "StepLR has interval='step'.*interval='epoch'"),
        (mixed, "must share one dtype and one device, found: 'body.0.weight' is torch.float32"),
        (lambda m: None, "returned None"),
    ],
)
def test_unsupported_optimizers_are_rejected(make: Any, message: str) -> None:
    with pytest.raises((FederatedError, pl.utilities.exceptions.MisconfigurationException), match=message) as error:
        fit(optimizing(make), num_sanity_val_steps=0)
    assert not isinstance(error.value, RuntimeError)


@pytest.mark.parametrize(
    "callback",
    [
        StochasticWeightAveraging(swa_lrs=0.1),
        WeightAveraging(),
        EMAWeightAveraging(),
        BatchSizeFinder(),
        LearningRateFinder(),
    ],
    ids=lambda c: type(c).__name__,
)
def test_callbacks_that_edit_training_per_batch_are_rejected(callback: pl.Callback) -> None:
    with pytest.raises(FederatedError, match=f"The callback {type(callback).__name__} is not supported: it .*Instead"):
        fit(callbacks=callback)


ALL = UniformSampler(1.0)
NO_WORK: dict[str, Any] = {"algorithm": ServerOnly(), "local_epochs": None}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": "FedAvg"}, "algorithm must be an Algorithm such as FedAvg"),
        ({"algorithm": FedAvg}, re.escape("write FedAvg()")),
        ({"engine": "quantum"}, r"engine='quantum'\): engine must be 'sequential' or 'vectorized' or 'auto'"),
        ({"local_epochs": None}, "FedAvg needs local work: pass local_epochs"),
        ({"local_steps": 3}, "local_epochs or local_steps, not both"),
        ({"local_epochs": 0}, r"local_epochs=0\): local_epochs must be an integer of at least 1"),
        ({"local_epochs": True}, r"local_epochs=True\): local_epochs must be an integer of at least 1"),
        (
            {"local_epochs": None, "local_steps": 2.5},
            r"local_steps=2.5\): local_steps must be an integer of at least 1",
        ),
        ({"algorithm": ServerOnly()}, "local_epochs=1 does not apply to ServerOnly"),
        ({"clients_per_round": 0}, "clients_per_round must be at least 1 client, and fewer than"),
        ({"clients_per_round": 1.5}, r"must lie in \(0, 1\], found 1.5"),
        ({"clients_per_round": float("nan")}, r"must lie in \(0, 1\], found nan"),
        ({"clients_per_round": "3"}, "must be an int or a float, found '3'"),
        ({"clients_per_round": 2, "sampler": lambda s, r: [0]}, "Both sampler=.* and clients_per_round=2 were given"),
        ({"sampler": 3}, "sampler must be callable, found 3"),
        ({"server_optimizer": 0.1}, "server_optimizer must be callable, found 0.1"),
        ({"server_optimizer": "adam"}, r"found 'adam'. Write functools.partial\(FedAdam, lr=0.1\)"),
        (
            {"server_optimizer": torch.optim.SGD([torch.zeros(1)], lr=1.0)},
            "server_optimizer must be callable, found an instance of SGD. Write functools.partial",
        ),
        ({"strategy": "client"}, "Did you mean strategy='clients'. You selected an invalid strategy name"),
        ({"strategy": "clients_frok"}, "Did you mean strategy='clients_fork'. "),
        ({"strategy": "xyz"}, "refuses its arguments. You selected an invalid strategy name"),
        ({"algorithm": Scaffold(), "weighting": "examples"}, "weighting='examples' does not apply to Scaffold"),
        ({"weighting": "steps", **NO_WORK}, "weighting='steps' does not apply to ServerOnly, whose .*Set 'examples'"),
        ({"local_optimizer_state": "keep", **NO_WORK}, "'keep' does not apply to ServerOnly.*Leave it at 'reset'"),
        ({"gradient_clip_val": 1.0, **NO_WORK}, "gradient_clip_val=1.0 does not apply to ServerOnly.*Leave it unset"),
        ({"gradient_clip_val": 1.0, "gradient_clip_on": "corrected", **NO_WORK}, "gradient_clip_val=1.0 does not"),
        ({"accumulate_grad_batches": 2, **NO_WORK}, "accumulate_grad_batches=2 does not apply to ServerOnly"),
        ({"limit_train_batches": 1, **NO_WORK}, "limit_train_batches=1 does not apply to ServerOnly"),
        ({"limit_train_batches": 0.5, **NO_WORK}, "limit_train_batches=0.5 does not apply to ServerOnly"),
        ({"overfit_batches": 2, **NO_WORK}, "overfit_batches=2 does not apply to ServerOnly"),
        (
            {"callbacks": GradientAccumulationScheduler({1: 2}), **NO_WORK},
            "GradientAccumulationScheduler does not apply to ServerOnly.*Remove it",
        ),
        ({"gradient_clip_on": "corrected"}, "gradient_clip_on='corrected' is of no use without gradient_clip_val"),
        ({"gradient_sampler": ALL}, r"gradient_sampler=Uniform.* does not apply to FedAvg\(.* Leave it unset\.$"),
        ({"gradient_sampler": ALL, "algorithm": Mime()}, r"gradient_sampler=.* apply to Mime\(.*Leave it unset\.$"),
        (
            {"gradient_sampler": ALL, "algorithm": FedDane(0.1, grad_cohort="same")},
            "gradient_sampler=.* does not apply to FedDane.*Leave it unset, or choose grad_cohort='own'",
        ),
        *(
            ({"buffers": value}, rf"buffers={value!r}\): buffers must be 'average' or 'server' or 'local'")
            for value in ("mean", "", None, "Average")
        ),
        ({"seed": -1}, r"seed=-1\): seed must be an integer of at least 0"),
        ({"strategy": "fsdp"}, "The strategy fsdp is not supported: it shards.*strategy='clients'.*strategy='ddp'"),
        ({"max_rounds": -2}, "max_rounds must be an int >= 0, or -1 for no limit, found -2"),
        ({"max_rounds": 2, "max_epochs": 3}, "max_rounds=2 and max_epochs=3 differ"),
        ({"max_steps": 10, **NO_WORK}, "max_steps=10 does not apply to ServerOnly"),
        ({"min_steps": 10, **NO_WORK}, "min_steps=10 does not apply to ServerOnly"),
    ],
    ids=spelled,
)
def test_invalid_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        FederatedTrainer(**{**QUIET, "local_epochs": 1, **settings})


@pytest.mark.parametrize(
    "settings",
    [
        {"limit_train_batches": None, "gradient_clip_val": None, "accumulate_grad_batches": 1, **NO_WORK},
        {"limit_train_batches": 1.0, "gradient_clip_val": 0, "overfit_batches": 0.0, **NO_WORK},
        {"limit_train_batches": 0, "callbacks": GradientAccumulationScheduler({1: 1}), **NO_WORK},
        {"fast_dev_run": True, "weighting": "uniform", "local_optimizer_state": "reset", **NO_WORK},
        {"gradient_clip_val": 1.0, "callbacks": PersonalizedAccuracy(local_steps=1), **NO_WORK},
        {"gradient_clip_val": 0.0, "gradient_clip_on": "corrected"},
        {"gradient_sampler": ALL, "algorithm": FedDane(0.1)},
    ],
    ids=spelled,
)
def test_neutral_or_supported_options_are_accepted(settings: dict[str, Any]) -> None:
    FederatedTrainer(**{**QUIET, "local_epochs": 1, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weighting": "sizes"}, "weighting must be one of .*found 'sizes'"),
        ({"weighting": lambda i, n, k: -1.0}, "finite weights >= 0"),
        ({"sampler": lambda seed, round: ["zoe"]}, "There is no client 'zoe'"),
        ({"sampler": lambda seed, round: 3}, "must return a list of client ids, found 3 in round 0"),
        ({"server_optimizer": lambda params: 3}, "must return a torch optimizer, found 3"),
        ({"server_optimizer": lambda params: torch.optim.LBFGS(params)}, "server_optimizer LBFGS is not supported"),
        ({"val_check_interval": 0.5}, "val_check_interval=0.5 .*check_val_every_n_epoch, counted in rounds"),
    ],
    ids=spelled,
)
def test_invalid_settings_are_rejected_at_fit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        fit(**settings)


def test_mime_base_rejects_a_preconditioning_local_optimizer() -> None:
    with pytest.raises(FederatedError, match=r"Mime\(base=SGDm\) preconditions .* returned SGD.*drop `base`"):
        fit(seeded(momentum=0.9), algorithm=Mime(base=SGDm()))


def test_non_federated_data_is_rejected() -> None:
    with pytest.raises(FederatedError, match=r"found a DataLoader.*from_loader\(loader, partition="):
        trainer().fit(seeded(), DataLoader(classification(8, 0)))
    with pytest.raises(FederatedError, match="needs a FederatedDataModule, found a LightningDataModule"):
        trainer().fit(seeded(), pl.LightningDataModule())
    with pytest.raises(FederatedError, match=r"val_dataloaders=.*FederatedDataModule\(val="):
        trainer().fit(seeded(), data(), DataLoader(classification(8, 0)))


def test_overriding_train_dataloader_is_rejected() -> None:
    class Central(FederatedDataModule):
        def train_dataloader(self) -> Any:
            return DataLoader(classification(8, 0))

    with pytest.raises(FederatedError, match=r"Central overrides train_dataloader.* Override client_dataset"):
        fit(datamodule=Central(clients=[classification(8, 0)]), clients_per_round=1)


def test_uninitialized_lazy_layers_are_rejected() -> None:
    class Lazy(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.LazyLinear(3)

    with pytest.raises(FederatedError, match=r"Lazy\.head\.weight has no shape yet.*run an example through"):
        fit(Lazy(), num_sanity_val_steps=0)
    model = seeded(Lazy)
    model(torch.zeros(1, 6))
    fit(model)


@pytest.mark.parametrize("interval", [timedelta(0), timedelta(minutes=1)])
def test_timed_checkpoints_are_rejected_with_several_processes(interval: timedelta) -> None:
    saver = ModelCheckpoint(train_time_interval=interval)
    several = trainer(callbacks=saver, enable_checkpointing=True, accelerator="cpu", devices=2, strategy="clients_fork")
    with pytest.raises(
        FederatedError, match=r"ModelCheckpoint\(train_time_interval=.*every_n_epochs, or train in one process"
    ):
        several.fit(seeded(), data())


def test_timed_checkpoints_are_saved_in_one_process(tmp_path: Any) -> None:
    saver = ModelCheckpoint(tmp_path, train_time_interval=timedelta(0), save_top_k=-1)
    fit(callbacks=saver, enable_checkpointing=True, max_rounds=3)
    assert sorted(file.stem for file in tmp_path.glob("*.ckpt")) == ["epoch=1-step=1", "epoch=2-step=2"]


def test_checkpoint_of_another_model_is_rejected(tmp_path: Any) -> None:
    class Wider(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(8, 7)

    run = trainer()
    run.fit(seeded(), data())
    run.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(FederatedError, match=r"'head.weight' has shape \(3, 8\) there and \(7, 8\) in Wider"):
        fit(Wider(), ckpt_path=tmp_path / "a.ckpt")


@pytest.mark.parametrize("name", ["max_round", "rounds"])
def test_misspelled_argument_is_rejected_first(name: str) -> None:
    with pytest.raises(FederatedError, match=f"no argument '{name}'. Did you mean max_rounds?"):
        FederatedTrainer(**{name: 3})
