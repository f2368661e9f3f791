"""Monitored metrics that are never logged: the error names them, after a complete and saved round."""

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint

from lightning_fed import FederatedError
from lightning_fed.cli.main import main
from tests.helpers.command_line import one_stage
from tests.helpers.training import Net, data, fit, parameters, rounds_in, seeded, trainer


class Plateau(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "val_los"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def keep(folder: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, save_last=True, **options)


CASES: dict[str, tuple[Any, Any, int]] = {
    "EarlyStopping": (Net, lambda folder: [EarlyStopping("val_los"), keep(folder)], 1),
    "EarlyStopping after validation": (
        Net, lambda folder: [EarlyStopping("val_los", check_on_train_epoch_end=False), keep(folder)], 1
    ),
    "ModelCheckpoint": (Net, lambda folder: [keep(folder, monitor="val_los")], 1),
    "ModelCheckpoint without last": (Net, lambda folder: [ModelCheckpoint(folder, monitor="val_los")], 1),
    "another ModelCheckpoint": (Net, lambda folder: [keep(folder), ModelCheckpoint(folder, monitor="val_los")], 1),
    "ReduceLROnPlateau": (Plateau, lambda folder: [keep(folder)], 1),
    "EarlyStopping every second round": (Net, lambda folder: [EarlyStopping("val_los"), keep(folder)], 2),
}  # fmt: skip


@cache
def straight() -> torch.Tensor:
    return fit(seeded())


@pytest.mark.parametrize("name", CASES)
def test_missing_metric_raises_after_the_round_is_saved(name: str, tmp_path: Path) -> None:
    make, callbacks, every = CASES[name]
    options: dict[str, Any] = {"enable_checkpointing": True, "check_val_every_n_epoch": every}
    who = "ReduceLROnPlateau" if make is Plateau else name.removeprefix("another ").split()[0]
    says = rf"{who} follows the metric 'val_los', which was not.*'val_loss'\?.*train_loss, val_acc, val_loss"
    given = callbacks(tmp_path)
    with pytest.raises(FederatedError, match=says):
        fit(seeded(make), callbacks=given, **options)
    assert rounds_in(tmp_path / "last.ckpt") == every
    assert all("_validate_condition_metric" not in vars(callback) for callback in given)
    if make is Net:  # with the right name, the run resumes to the same result
        resumed = seeded()
        fit(resumed, ckpt_path=tmp_path / "last.ckpt", callbacks=[EarlyStopping("val_loss", patience=9)])
        assert torch.equal(parameters(resumed), straight())


def test_unknown_validation_metric_warns_before_the_run() -> None:
    class Stop(pl.Callback):
        def on_train_start(self, *_: Any) -> None:
            raise KeyError

    for monitor, warns in (("val_los", True), ("val_loss", False), ("train_loss", False), ("client/loss", False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(KeyError):
                fit(callbacks=[EarlyStopping(monitor), Stop()])
        told = [str(w.message) for w in caught if "EarlyStopping follows" in str(w.message)]
        assert bool(told) == warns
        assert all("validation logs 'val_loss'" in text for text in told)


def test_optional_metric_does_not_stop_the_run(tmp_path: Path) -> None:
    fit(callbacks=[EarlyStopping("val_los", strict=False)], max_rounds=2)
    stop = EarlyStopping("client/loss", patience=9)
    fit(callbacks=[stop, keep(tmp_path, monitor="train_loss", mode="min")], enable_checkpointing=True)
    assert stop.best_score.isfinite()


def test_callback_is_restored_after_the_run() -> None:
    callback = EarlyStopping("val_los")
    with pytest.raises(FederatedError):
        fit(callbacks=[callback])
    with pytest.raises(RuntimeError, match="which is not available"):
        callback._validate_condition_metric({})


def test_command_line_exits_with_only_the_error_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    args = ["--trainer.max_rounds", "2", "--trainer.local_epochs", "1", "--trainer.enable_progress_bar", "false"]
    args += ["--trainer.callbacks", "EarlyStopping", "--trainer.callbacks.monitor", "val_acc", "--data.batch_size", "4"]
    project = ["--model", f"{__name__}.Unlogged", "--data", f"{__name__}.Data"]
    with one_stage("fit"), pytest.raises(SystemExit, match="lightning-fed: EarlyStopping follows the metric 'val_acc'"):
        main(["fit", *project, *args])


class Unlogged(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log nothing."""


def Data(batch_size: int = 4) -> pl.LightningDataModule:  # noqa: N802
    return data(batch_size=batch_size)


def test_manual_save_after_the_error_holds_the_same_round(tmp_path: Path) -> None:
    t = trainer(callbacks=[EarlyStopping("val_los"), keep(tmp_path)], enable_checkpointing=True)
    with pytest.raises(FederatedError, match="val_los"):
        t.fit(seeded(), data())
    t.save_checkpoint(tmp_path / "by_hand.ckpt")
    assert rounds_in(tmp_path / "by_hand.ckpt") == 1
