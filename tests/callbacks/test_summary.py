"""What is printed at the end of a run."""

from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_fed import FederatedDataModule
from lightning_fed.callbacks import RunSummary, TargetMetric
from tests.helpers.training import clients, data, fit, seeded, trainer


@pytest.mark.parametrize(
    ("monitored", "names_a_best"), [({}, False), ({"monitor": "val_acc", "mode": "max"}, True)], ids=["none", "val_acc"]
)
def test_a_checkpoint_is_the_best_only_where_something_says_what_is_best(
    monitored: dict[str, Any], names_a_best: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(callbacks=[RunSummary(), ModelCheckpoint(**monitored)], enable_checkpointing=True, max_rounds=2)
    shown = capsys.readouterr().out
    assert ("best checkpoint" in shown) == names_a_best
    assert "last checkpoint" in shown
    assert "resume" in shown


@pytest.mark.parametrize("validated", [True, False])
def test_a_run_without_validation_shows_the_training_loss(validated: bool, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_tensorboard_compares_runs_by_the_best_of_what_is_monitored(
    monitor: str, mode: Any, best: Any, tmp_path: Path
) -> None:
    logger, saving = TensorBoardLogger(tmp_path), ModelCheckpoint(tmp_path / "saved", monitor=monitor, mode=mode)
    fit(model=seeded(lr=1.0), callbacks=saving, enable_checkpointing=True, logger=logger, max_rounds=5)
    values = [value for _, value in scalars(logger, monitor)]
    assert values[-1] != best(values)  # or the test could not tell the best from the last
    assert scores(logger) == [(5, pytest.approx(best(values)))]


def test_tensorboard_compares_runs_by_the_last_metric_where_none_is_monitored(tmp_path: Path) -> None:
    validated, trained = TensorBoardLogger(tmp_path / "validated"), TensorBoardLogger(tmp_path / "trained")
    fit(logger=validated, max_rounds=2)
    assert scores(validated) == [scalars(validated, "val_acc")[-1]]
    fit(None, FederatedDataModule(clients=clients()), logger=trained, max_rounds=2)
    assert scores(trained) == [scalars(trained, "client/loss")[-1]]


def test_tensorboard_keeps_the_number_of_others(tmp_path: Path) -> None:
    target, unwanted = TensorBoardLogger(tmp_path / "a"), TensorBoardLogger(tmp_path / "b", default_hp_metric=False)
    fit(logger=target, max_rounds=2, callbacks=TargetMetric("val_acc", 0.0))
    assert scores(target) == [(1, 1.0)]
    fit(logger=unwanted, max_rounds=2)
    assert scores(unwanted) == []


def test_a_resumed_run_that_had_ended_is_not_shown_twice(tmp_path: Path) -> None:
    def run(**options: Any) -> list[tuple[int, float]]:
        logger = TensorBoardLogger(tmp_path, name="", version="run")
        once = trainer(logger=logger, max_rounds=2)
        once.fit(seeded(), data(), **options)
        once.save_checkpoint(tmp_path / "last.ckpt")
        return scores(logger)

    assert [step for step, _ in run()] == [2]
    assert [step for step, _ in run(ckpt_path=tmp_path / "last.ckpt")] == [2]
