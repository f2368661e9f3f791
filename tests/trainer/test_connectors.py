"""Checkpoints and logs of a trainer, whose epochs are rounds."""

import csv
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, ThroughputMonitor
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger

from lightning_fed import ClientError, FederatedCallback, FederatedError
from lightning_fed.algorithms import Scaffold
from tests.helpers.training import Net, data, fit, parameters, seeded, trainer


@pytest.mark.parametrize("every", [1, 2, 3])
def test_validation_and_checkpoints_run_every_n_rounds(every: int, tmp_path: Any) -> None:
    class Validations(pl.Callback):
        rounds: list[int]

        def on_train_start(self, *_: Any) -> None:
            self.rounds = []

        def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if not trainer.sanity_checking:
                self.rounds.append(trainer.global_step)

    validations = Validations()
    keep = ModelCheckpoint(tmp_path, "{epoch}-{step}", every_n_epochs=every, save_top_k=-1)
    fit(max_rounds=6, check_val_every_n_epoch=every, callbacks=[validations, keep], enable_checkpointing=True)
    assert validations.rounds == list(range(every, 7, every))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"epoch={r - 1}-step={r}.ckpt" for r in range(every, 7, every)}


def test_test_stage_uses_the_server_model() -> None:
    class Staged(Net):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.validation_step(batch, batch_idx)

    model, datamodule = seeded(Staged), data()
    datamodule.test = datamodule.val
    run = trainer(algorithm=Scaffold(), max_rounds=2)
    run.fit(model, datamodule)
    (tested,) = run.test(model, datamodule, verbose=False)
    assert tested["val_loss"] == pytest.approx(float(run.callback_metrics["val_loss"]))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint after two rounds."""
    path = tmp_path_factory.mktemp("saved") / "two.ckpt"
    run = trainer(algorithm=Scaffold(), max_rounds=2)
    run.fit(seeded(), data())
    run.save_checkpoint(path)
    return path


def changed(saved: Path, path: Path, change: Any) -> Path:
    """Write a checkpoint after a function has changed it."""
    checkpoint = torch.load(saved, weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, path)
    return path


@pytest.mark.parametrize(
    ("format", "message"), [(99, "a newer version.*Install that version"), (2, "an older version.*Finish the run with")]
)
def test_checkpoint_of_another_format_is_rejected(format: int, message: str, saved: Path, tmp_path: Path) -> None:
    def other(checkpoint: Any) -> None:
        checkpoint["loops"]["fit_loop"]["state_dict"]["format"] = format

    path = changed(saved, tmp_path / "other.ckpt", other)
    with pytest.raises(FederatedError, match=rf"other\.ckpt was written by {message}"):
        trainer(algorithm=Scaffold()).fit(seeded(), data(), ckpt_path=path)


def test_weights_of_another_shape_are_rejected(saved: Path, tmp_path: Path) -> None:
    def other(checkpoint: Any) -> None:
        checkpoint["state_dict"]["head.bias"] = torch.zeros(5)

    path = changed(saved, tmp_path / "other.ckpt", other)
    with pytest.raises(FederatedError, match=r"other model: 'head.bias' has shape \(5,\) there and \(3,\) in Net"):
        trainer(algorithm=Scaffold()).fit(seeded(), data(), ckpt_path=path)


def test_checkpoint_without_a_federated_run_loads_only_weights(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = changed(saved, tmp_path / "other.ckpt", lambda checkpoint: checkpoint["loops"].clear())
    run, model = trainer(algorithm=Scaffold(), max_rounds=1), seeded(lr=0.0)
    with caplog.at_level("INFO"):
        run.fit(model, data(), ckpt_path=path)
    assert "holds no federated run: training starts at round 0 from its weights" in caplog.text
    assert run.fit_loop.round == 1
    weights = torch.load(saved, weights_only=True)["state_dict"]
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_mid_round_checkpoint_holds_the_state_of_the_round_start(tmp_path: Path) -> None:
    class Saves(FederatedCallback):
        def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.fit_loop.round}.ckpt")

    run = trainer(callbacks=Saves(), max_rounds=2)
    run.fit(seeded(), data())
    middle = torch.load(tmp_path / "1.ckpt", weights_only=True)
    state = middle["loops"]["fit_loop"]["state_dict"]
    assert (state["round"], middle["epoch"], middle["global_step"]) == (1, 1, 1)
    weights = torch.cat([middle["state_dict"][name].reshape(-1) for name, _ in run.lightning_module.named_parameters()])
    assert torch.equal(weights, state["step"]["x"])
    resumed = trainer(max_rounds=2)
    resumed.fit(model := seeded(), data(), ckpt_path=tmp_path / "1.ckpt")
    assert torch.equal(parameters(model), parameters(run.lightning_module))


def test_run_ended_by_early_stopping_stays_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def stopping() -> EarlyStopping:
        return EarlyStopping("val_loss", patience=1, mode="max")

    run = trainer(callbacks=stopping(), max_rounds=9)
    run.fit(seeded(), data())
    assert 0 < (rounds := run.fit_loop.round) < 9
    run.save_checkpoint(tmp_path / "ended.ckpt")
    resumed = trainer(callbacks=stopping(), max_rounds=9)
    with caplog.at_level("INFO"):
        resumed.fit(seeded(), data(), ckpt_path=tmp_path / "ended.ckpt")
    assert resumed.fit_loop.round == rounds
    assert "EarlyStopping(monitor='val_loss') had ended this run" in caplog.text


def test_missing_last_checkpoint_is_rejected() -> None:
    with pytest.raises(FederatedError, match=r"FederatedTrainer.validate\(ckpt_path='last'\) found no checkpoint"):
        trainer().validate(seeded(), data(), ckpt_path="last")


@pytest.mark.parametrize("accumulated", [1, 2])
def test_per_batch_callbacks_log_the_first_step_every_n_rounds(accumulated: int, tmp_path: Path) -> None:
    rates = LearningRateMonitor("step")
    throughput = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)
    options: dict[str, Any] = {"logger": CSVLogger(tmp_path), "callbacks": [rates, throughput], "max_rounds": 4}
    fit(**options, accumulate_grad_batches=accumulated, log_every_n_steps=2)
    assert [len(values) for values in rates.lrs.values()] == [2, 2]
    with (next(tmp_path.rglob("metrics.csv"))).open() as file:
        steps = [row["step"] for row in csv.DictReader(file) if row["train/batches"]]
    assert steps == ["1", "3"]


class Noted(FederatedCallback):
    """Writes its own file as a round starts, and rejects the run or fails a client."""

    def __init__(self, notes: bool, fails: str) -> None:
        self.notes, self.fails = notes, fails

    def on_round_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.notes:
            Path(str(trainer.log_dir), "notes.txt").write_text("mine")
        if self.fails == "refused":
            raise FederatedError("no")

    def on_client_start(self, *_: Any) -> None:
        if self.fails == "client":
            raise ClientError("no")


@pytest.mark.parametrize(
    ("notes", "fails", "stays"), [(False, "refused", 0), (True, "refused", 1), (False, "client", 1)]
)
def test_rejected_run_removes_its_log_but_no_user_files(notes: bool, fails: str, stays: int, tmp_path: Path) -> None:
    run = trainer(callbacks=Noted(notes, fails), logger=True, default_root_dir=tmp_path, max_rounds=1)
    with pytest.raises(FederatedError):
        run.fit(seeded(), data())
    assert len([*tmp_path.rglob("version_0_FedAvg")]) == stays
    assert len([*tmp_path.rglob("notes.txt")]) == notes
    assert len([*tmp_path.iterdir()]) == stays


@pytest.mark.parametrize("name", ["lightning_logs", ""])
def test_immediately_rejected_run_creates_and_removes_no_folder(name: str, tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path / "logs", name=name)
    Path(logger.save_dir).mkdir()
    with pytest.raises(FederatedError, match="There is no checkpoint"):
        trainer(logger=logger).fit(seeded(), data(), ckpt_path=tmp_path / "none.ckpt")
    assert [path.name for path in tmp_path.rglob("*")] == ["logs"]


def test_logger_of_a_rejected_run_is_reusable(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    with pytest.raises(FederatedError):
        trainer(callbacks=Noted(False, "refused"), logger=logger, max_rounds=1).fit(seeded(), data())
    trainer(logger=logger, max_rounds=1).fit(seeded(), data())
    assert Path(logger.log_dir, "metrics.csv").is_file()
