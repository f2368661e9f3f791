"""The summary at the end of a run."""

import ast
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_fed import FederatedDataModule
from lightning_fed.callbacks import RunSummary, TargetMetric
from tests.helpers.training import Net, classification, clients, data, fit, seeded, trainer


@pytest.mark.parametrize(
    ("monitored", "names_a_best"), [({}, False), ({"monitor": "val_acc", "mode": "max"}, True)], ids=["none", "val_acc"]
)
def test_best_checkpoint_is_shown_only_if_a_metric_is_monitored(
    monitored: dict[str, Any], names_a_best: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(callbacks=[RunSummary(), ModelCheckpoint(**monitored)], enable_checkpointing=True, max_rounds=2)
    shown = capsys.readouterr().out
    assert ("best checkpoint" in shown) == names_a_best
    assert "last checkpoint" in shown
    assert "resume" in shown


def test_commands_quote_their_paths(tmp_path: Path) -> None:
    folder = tmp_path / """it's "here" \\v"""
    summary, saving = RunSummary(), ModelCheckpoint(folder)
    more: dict[str, Any] = {"enable_checkpointing": True, "logger": TensorBoardLogger(folder)}
    run = trainer(callbacks=[summary, saving], max_rounds=1, **more)
    run.fit(seeded(), data())
    shown = dict(summary._paths(run, None))
    call = ast.parse(shown["resume (round 1)"], mode="eval").body
    assert isinstance(call, ast.Call)
    saved = Path(saving.best_model_path).relative_to(Path.cwd())
    assert ast.literal_eval(call.keywords[0].value) == str(saved)
    assert shlex.split(shown["watch"])[2:] == [str(Path(folder.name) / "lightning_logs")]
    summary.resume_with, summary.quote = "fit {path}", shlex.quote
    assert shlex.split(dict(summary._paths(run, None))["resume (round 1)"]) == ["fit", str(saved)]


@pytest.mark.parametrize("validated", [True, False])
def test_run_without_validation_shows_the_training_loss(validated: bool, capsys: pytest.CaptureFixture[str]) -> None:
    data = FederatedDataModule(clients=clients(), val=clients()[0] if validated else None)
    fit(None, data, callbacks=RunSummary(), max_rounds=1)
    shown = capsys.readouterr().out
    assert ("client/loss" in shown) != validated
    assert ("val_loss" in shown) == validated


def scalars(logger: TensorBoardLogger, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(logger.log_dir, size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)] if tag in events.Tags()["scalars"] else []


def scores(logger: TensorBoardLogger) -> list[tuple[int, float]]:
    return [(step, value) for step, value in scalars(logger, "hp_metric") if step]  # step 0 has Lightning's -1


@pytest.mark.parametrize(("monitor", "mode", "best"), [("val_loss", "min", min), ("val_acc", "max", max)])
def test_tensorboard_scores_runs_by_the_best_monitored_value(
    monitor: str, mode: Any, best: Any, tmp_path: Path
) -> None:
    logger, saving = TensorBoardLogger(tmp_path), ModelCheckpoint(tmp_path / "saved", monitor=monitor, mode=mode)
    fit(model=seeded(lr=1.0), callbacks=saving, enable_checkpointing=True, logger=logger, max_rounds=5)
    values = [value for _, value in scalars(logger, monitor)]
    assert values[-1] != best(values)  # otherwise the test could not distinguish them
    assert scores(logger) == [(5, pytest.approx(best(values)))]


def test_metrics_of_several_loaders_use_their_full_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Several(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx)

    name, logger = "val_loss/dataloader_idx_1", TensorBoardLogger(tmp_path)
    run = trainer(
        callbacks=ModelCheckpoint(tmp_path / "saved", monitor=name, mode="min"),
        enable_checkpointing=True,
        logger=logger,
        max_rounds=4,
    )
    run.fit(seeded(Several, lr=1.0), data(val=[classification(12, 77), classification(9, 78)]))  # type: ignore[arg-type]
    values = [value for _, value in scalars(logger, name)]
    assert values[-1] != min(values)
    assert scores(logger) == [(4, pytest.approx(min(values)))]
    shown = capsys.readouterr().out
    assert f"{values[-1]:.4f} (best {min(values):.4f})" in shown
    assert "val_acc/dataloader_idx_0" in shown
    assert "client/loss" not in shown


@pytest.mark.parametrize("name", ["client/loss", "late"])
def test_tensorboard_scores_runs_by_a_non_validation_monitor(name: str, tmp_path: Path) -> None:
    class Late(Net):
        def on_train_epoch_end(self) -> None:  # rounds 1 to 4
            self.log("late", float(self.trainer.fit_loop.round))

    logger = TensorBoardLogger(tmp_path / "logs")
    saving = [
        ModelCheckpoint(tmp_path / "last", filename="last"),
        ModelCheckpoint(tmp_path / "best", monitor=name, mode="max"),
    ]
    fit(seeded(Late), callbacks=saving, enable_checkpointing=True, logger=logger, max_rounds=4)
    values = [value for _, value in scalars(logger, name)]
    assert len(values) == 4
    assert scores(logger) == [(4, pytest.approx(max(values)))]


@pytest.mark.parametrize("at", [1, 2])
def test_nan_is_not_the_best_value(at: int, tmp_path: Path) -> None:
    class Odd(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            done = self.trainer.fit_loop.round
            self.log("odd", math.nan if done == at else float(done))

    logger, saving = TensorBoardLogger(tmp_path), ModelCheckpoint(tmp_path / "saved", monitor="odd")
    fit(seeded(Odd), callbacks=saving, enable_checkpointing=True, logger=logger, max_rounds=3)
    assert scores(logger) == [(3, 2.0 if at == 1 else 1.0)]


def test_tensorboard_scores_unmonitored_runs_by_the_last_metric(tmp_path: Path) -> None:
    validated, trained = TensorBoardLogger(tmp_path / "validated"), TensorBoardLogger(tmp_path / "trained")
    fit(logger=validated, max_rounds=2)
    assert scores(validated) == [scalars(validated, "val_acc")[-1]]
    fit(None, FederatedDataModule(clients=clients()), logger=trained, max_rounds=2)
    assert scores(trained) == [scalars(trained, "client/loss")[-1]]


def test_tensorboard_keeps_scores_set_by_others(tmp_path: Path) -> None:
    target, unwanted = TensorBoardLogger(tmp_path / "a"), TensorBoardLogger(tmp_path / "b", default_hp_metric=False)
    fit(logger=target, max_rounds=2, callbacks=TargetMetric("val_acc", 0.0))
    assert scores(target) == [(1, 1.0)]
    fit(logger=unwanted, max_rounds=2)
    assert scores(unwanted) == []


def test_resuming_a_finished_run_does_not_log_its_score_twice(tmp_path: Path) -> None:
    def run(**options: Any) -> list[tuple[int, float]]:
        logger = TensorBoardLogger(tmp_path, name="", version="run")
        once = trainer(logger=logger, max_rounds=2)
        once.fit(seeded(), data(), **options)
        once.save_checkpoint(tmp_path / "last.ckpt")
        return scores(logger)

    assert [step for step, _ in run()] == [2]
    assert [step for step, _ in run(ckpt_path=tmp_path / "last.ckpt")] == [2]
