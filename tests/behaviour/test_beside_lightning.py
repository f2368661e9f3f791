"""Compare Lightning's own Trainer with a federated one that has a single client.

``pytest tests/behaviour/test_beside_lightning.py -m "" -s`` prints the table of intended differences.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
)
from pytorch_lightning.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_fed import FederatedDataModule, FederatedError, FederatedTrainer
from tests.helpers.training import QUIET, Net, classification, parameters, same, seeded

TRAIN, VAL = classification(18, 0), classification(40, 77)  # five batches: four of four examples and one of two

Run = Callable[..., pl.Trainer]


class Logs(Net):
    """Logs everywhere and halves its rate every epoch. It has no dropout, since the trainers draw different masks."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0, momentum=0.0)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("of_epoch", loss, on_step=False, on_epoch=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("at_end", float(self.current_epoch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "name": "rate"}]


class PerStep(Logs):
    def configure_optimizers(self) -> Any:
        optimizers, (config,) = super().configure_optimizers()
        return optimizers, [{**config, "interval": "step"}]


class Manual(Logs):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def plain(model: type[Logs] = Logs, **options: Any) -> pl.Trainer:
    """Return Lightning's trainer after a fit."""
    ckpt_path = options.pop("ckpt_path", None)
    trainer = pl.Trainer(**{**QUIET, "max_epochs": 3, **options})
    trainer.fit(seeded(model), DataLoader(TRAIN, batch_size=4), DataLoader(VAL, batch_size=256), ckpt_path=ckpt_path)
    return trainer


def federated(model: type[Logs] = Logs, **options: Any) -> pl.Trainer:
    """Return the federated trainer after a fit of a single client."""
    ckpt_path = options.pop("ckpt_path", None)
    trainer = FederatedTrainer(**{**QUIET, "max_epochs": 3, "local_epochs": 1, "seed": 0, **options})
    data = FederatedDataModule(clients=[TRAIN], val=VAL, batch_size=4, shuffle=False)
    trainer.fit(seeded(model), data, ckpt_path=ckpt_path)
    return trainer


def model_of(trainer: pl.Trainer) -> list[float]:
    """Return the fitted parameters, rounded to the digits in which both orders of summation agree."""
    return [round(float(value), 5) for value in parameters(trainer.lightning_module)]


def after(**options: Any) -> Callable[[Run, Path], Any]:
    """Return a function that observes the epoch and the model after a run with some options."""

    def observe(run: Run, folder: Path) -> Any:
        trainer = run(**options)
        return trainer.current_epoch, model_of(trainer)

    return observe


def hooks(run: Run, folder: Path, wanted: Callable[[str], bool]) -> list[str]:
    """Return the callback hooks of a fit in the order of their calls."""
    seen: list[str] = []
    names = [name for name in vars(pl.Callback) if name.startswith("on_") and "checkpoint" not in name and wanted(name)]
    run(
        max_epochs=1,
        callbacks=LambdaCallback(**{name: lambda *_, name=name, **__: seen.append(name) for name in names}),
        num_sanity_val_steps=0,
    )
    return seen


def metrics(run: Run, folder: Path, *names: str) -> dict[str, float]:
    logged = run().callback_metrics
    return {name: round(float(logged[name]), 5) for name in names}


def axis(run: Run, folder: Path) -> list[int]:
    logger = CSVLogger(folder)
    run(logger=logger, log_every_n_steps=1)
    lines = [line.split(",") for line in (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()]
    column, step = lines[0].index("of_epoch"), lines[0].index("step")
    return [int(line[step]) for line in lines[1:] if line[column]]


def files(run: Run, folder: Path, **options: Any) -> list[str]:
    run(callbacks=ModelCheckpoint(folder, save_top_k=-1, **options), enable_checkpointing=True)
    return sorted(path.name for path in folder.glob("*.ckpt"))


def resumed(run: Run, folder: Path) -> list[float]:
    run(callbacks=ModelCheckpoint(folder, filename="a"), enable_checkpointing=True, max_epochs=1)
    return model_of(run(ckpt_path=folder / "a.ckpt"))


def early_stop(run: Run, folder: Path) -> int:
    stopper = EarlyStopping("val_loss", mode="max", patience=1)
    return int(run(callbacks=stopper, max_epochs=9).current_epoch)


def rates(run: Run, folder: Path) -> dict[str, list[float]]:
    monitor = LearningRateMonitor("epoch")
    run(callbacks=monitor, logger=CSVLogger(folder))
    return {name: [round(float(rate), 6) for rate in values] for name, values in monitor.lrs.items()}


def validations(run: Run, folder: Path, **options: Any) -> list[int]:
    seen: list[int] = []
    run(callbacks=LambdaCallback(on_validation_start=lambda t, _: seen.append(t.current_epoch)), **options)
    return seen


class _Stops(pl.Callback):
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.should_stop = True


BEHAVIOURS: Mapping[str, Callable[[Run, Path], Any]] = {
    "the trained model": after(),
    "hooks of a fit, an epoch, a batch": lambda r, f: hooks(r, f, lambda name: "batch" not in name or "train" in name),
    "hooks between batch and step": lambda r, f: hooks(r, f, lambda n: "before" in n or "after" in n),
    "hooks of validation": lambda r, f: hooks(r, f, lambda name: "validation" in name),
    "metric: validation": lambda r, f: metrics(r, f, "val_loss", "val_acc"),
    "metric: mean and maximum of an epoch": lambda r, f: metrics(r, f, "of_epoch", "largest"),
    "metric: at the end of an epoch": lambda r, f: metrics(r, f, "at_end"),
    "metric: training_step without flags": lambda r, f: metrics(r, f, "train_loss"),
    "logger: step of an epoch's metric": axis,
    "trainer.global_step": lambda r, f: r().global_step,
    "trainer.estimated_stepping_batches": lambda r, f: r().estimated_stepping_batches,
    "ModelCheckpoint: file names": files,
    "ModelCheckpoint(every_n_epochs=2): files": lambda r, f: [n[:7] for n in files(r, f, every_n_epochs=2)],
    "ckpt_path resumes": resumed,
    "EarlyStopping": early_stop,
    "LearningRateMonitor": rates,
    "GradientAccumulationScheduler": after(callbacks=GradientAccumulationScheduler({1: 2})),
    "limit_train_batches=2": after(limit_train_batches=2),
    "limit_train_batches=0": after(limit_train_batches=0),
    "overfit_batches=1": after(overfit_batches=1),
    "accumulate_grad_batches=2": after(accumulate_grad_batches=2),
    "gradient_clip_val=0.1": after(gradient_clip_val=0.1),
    "gradient_clip_algorithm='value'": after(gradient_clip_val=0.01, gradient_clip_algorithm="value"),
    "precision='64-true'": lambda r, f: str(next(r(precision="64-true").lightning_module.parameters()).dtype),
    "precision='bf16-mixed'": after(precision="bf16-mixed"),
    "fast_dev_run=True": after(fast_dev_run=True),
    "check_val_every_n_epoch=2": lambda r, f: validations(r, f, check_val_every_n_epoch=2, num_sanity_val_steps=0),
    "num_sanity_val_steps=1": lambda r, f: validations(r, f, num_sanity_val_steps=1),
    "val_check_interval=0.4": lambda r, f: validations(r, f, val_check_interval=0.4, num_sanity_val_steps=0),
    "a scheduler with interval='step'": lambda r, f: model_of(r(model=PerStep)),
    "manual optimization": lambda r, f: model_of(r(model=Manual)),
    "limit_val_batches=0": lambda r, f: validations(r, f, limit_val_batches=0),
    "min_epochs=2": lambda r, f: r(callbacks=_Stops(), min_epochs=2).current_epoch,
    "min_steps=0": lambda r, f: r(callbacks=_Stops(), min_steps=0).current_epoch,
    "max_steps=10, a whole number of epochs": after(max_steps=10, max_epochs=-1),
    "max_steps=7, in the middle of an epoch": after(max_steps=7, max_epochs=-1),
    "max_epochs=0": after(max_epochs=0),
}

MEANT: Mapping[str, str] = {
    "metric: training_step without flags": "the mean of the round, not the last batch's value: a round is the axis",
    "logger: step of an epoch's metric": "completed rounds, since local steps belong to clients",
    "trainer.global_step": "completed rounds",
    "trainer.estimated_stepping_batches": "the rounds, in which a schedule is stepped once",
    "ModelCheckpoint: file names": "step is the completed rounds",
    "val_check_interval=0.4": "refused: within a round there is no server model to validate",
    "a scheduler with interval='step'": "refused: local_schedule must say what it counts",
    "manual optimization": "refused: no correction could come between backward and step",
    "max_steps=7, in the middle of an epoch": "looked at after a round, which is finished",
}

QUICK = (
    "the trained model",
    "hooks of a fit, an epoch, a batch",
    "metric: mean and maximum of an epoch",
    "metric: training_step without flags",
    "trainer.global_step",
    "val_check_interval=0.4",
)


def observed(name: str, run: Run, folder: Path) -> Any:
    """Return the observation of a behaviour, or "refused"."""
    try:
        return BEHAVIOURS[name](run, folder)
    except FederatedError:
        return "refused"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("names", [QUICK, pytest.param(tuple(BEHAVIOURS), marks=pytest.mark.thorough)], ids=len)
def test_only_intended_differences_from_lightning_exist(names: tuple[str, ...], tmp_path: Path) -> None:
    found = {}
    for i, name in enumerate(names):
        there, here = (observed(name, run, tmp_path / f"{i}-{run.__name__}") for run in (plain, federated))
        if there != here:
            found[name] = (there, here)
    print(f"\n{'behaviour':40} | {'Trainer':30} | {'FederatedTrainer':30} | why")
    for name, (there, here) in found.items():
        print(f"{name:40} | {there!s:30.30} | {here!s:30.30} | {MEANT.get(name, 'NOT MEANT')}")
    wrong = found.keys() ^ (MEANT.keys() & set(names))
    assert not wrong, {name: found.get(name, "no difference") for name in wrong}


class Smooth(Net):
    def __init__(self) -> None:
        super().__init__(dropout=0.0, momentum=0.0)


class Longer:
    """A loader that yields more batches than its length."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        for batch in DataLoader(TRAIN, batch_size=4):
            self.asked += 1
            yield batch


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_loader_longer_than_its_length_is_cut_off(engine: str) -> None:
    loaders = Longer(), Longer()
    beside = pl.Trainer(**{**QUIET, "max_epochs": 2})
    beside.fit(seeded(Smooth), loaders[0])

    class Own(FederatedDataModule):
        client_ids = ("ann",)

        def client_dataloader(self, client_id: Any, generator: torch.Generator) -> Any:
            return loaders[1]

        def client_size(self, client_id: Any) -> int:
            return len(TRAIN)

    trainer = FederatedTrainer(**{**QUIET, "max_epochs": 2, "local_epochs": 1, "engine": engine})
    trainer.fit(seeded(Smooth), Own())
    assert loaders[0].asked == 2 * len(loaders[0]) < 2 * len(DataLoader(TRAIN, batch_size=4))
    assert loaders[1].asked - loaders[0].asked in (0, 1, 2)  # an engine tries batches before the first round
    assert model_of(trainer) == model_of(beside)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("fails", [False, True])
def test_all_loaders_are_closed_after_fit(engine: str, fails: bool) -> None:
    """Check that loaders are closed: their workers would run until the trainer is garbage-collected."""
    is_open: list[bool] = []

    class Loader(Longer):
        def __iter__(self) -> Iterator[Any]:
            number = len(is_open)
            is_open.append(True)
            try:
                yield from super().__iter__()
            finally:
                is_open[number] = False

    class Own(FederatedDataModule):
        client_ids = ("ann", "bob")

        def client_dataloader(self, client_id: Any, generator: torch.Generator) -> Any:
            return Loader()

        def client_size(self, client_id: Any) -> int:
            return len(TRAIN)

    class Fails(Smooth):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if fails and self.trainer.current_epoch == 1:
                raise ValueError("no more")
            return super().training_step(batch, batch_idx)

    trainer = FederatedTrainer(**{**QUIET, "max_epochs": 2, "local_epochs": 1, "engine": engine})
    with pytest.raises(FederatedError, match="no more") if fails else nullcontext():
        trainer.fit(seeded(Fails), Own())
    assert len(is_open) >= 3
    assert not any(is_open)


class ScalesByLoss(torch.optim.SGD):
    """Takes steps in proportion to the loss, which Lightning's closure returns."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        assert closure is not None
        with torch.enable_grad():
            loss = closure()
        for p in self.param_groups[0]["params"]:
            p.sub_(0.1 * loss * p.grad)
        return loss


class ScaledByLoss(Logs):
    def configure_optimizers(self) -> Any:
        return ScalesByLoss(self.parameters(), lr=0.1)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_optimizer_that_reads_the_loss_matches_lightning(clip: float | None) -> None:
    options = {"max_epochs": 1, "gradient_clip_val": clip}
    ours, theirs = (run(ScaledByLoss, **options).lightning_module for run in (federated, plain))
    assert same(parameters(ours), parameters(theirs))
