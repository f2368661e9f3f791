"""Rounds and bytes to a target."""

import csv
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_fed import FederatedError
from lightning_fed.callbacks import ClientAccuracy, TargetMetric
from lightning_fed.data import Quadratics
from lightning_fed.models import Quadratic
from tests.helpers.selection import few
from tests.helpers.training import data, fit, seeded, trainer

PROBLEM = {"clients_per_round": 1.0, "local_steps": 1}


def model() -> Quadratic:
    """Halves its distance from the optimum in every round, from 8."""
    return Quadratic(x0=8.0, lr=0.5, optimum=0.0)


def problem() -> Quadratics:
    return Quadratics(a=(1.0, 1.0), G=1.0)


def test_first_round_at_the_target_counts_all_bytes_so_far(tmp_path: Path) -> None:
    callback, logger = TargetMetric("val_distance", 1.0, mode="min"), CSVLogger(tmp_path)
    trainer(callbacks=callback, max_rounds=6, logger=logger, **PROBLEM).fit(model(), problem())
    assert callback.reached == {"rounds": 3, "bytes_up": 3 * 2 * 8, "bytes_down": 3 * 2 * 8}
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["target/rounds"]]
    assert [(row["step"], float(row["target/rounds"])) for row in rows] == [("3", 3.0)]
    assert float(rows[0]["target/bytes_up"]) == 48


def test_new_run_resets_the_target_and_a_second_fit_does_not() -> None:
    callback = TargetMetric("val_distance", 1.0, mode="min")
    for start, rounds in ((8.0, 3), (2.0, 1)):
        run, net = trainer(callbacks=callback, max_rounds=3, **PROBLEM), Quadratic(x0=start, lr=0.5, optimum=0.0)
        run.fit(net, problem())
        assert (callback.reached or {})["rounds"] == rounds
    run.max_rounds = 4
    run.fit(net, problem())
    assert (callback.reached or {})["rounds"] == 1


def test_float32_metric_reaches_a_target_it_rounds() -> None:
    class Model(Quadratic):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_acc", torch.tensor(0.9 if self.current_epoch else 0.5))

    callback = TargetMetric("val_acc", 0.9)
    trainer(callbacks=callback, max_rounds=3, **PROBLEM).fit(Model(x0=8.0, lr=0.5), problem())
    assert (callback.reached or {}).get("rounds") == 2


@pytest.mark.parametrize(("mode", "target", "rounds"), [("max", 0.5, 1), ("min", 0.5, 4), ("max", 9.0, None)])
def test_mode_sets_the_direction_of_the_target(mode: Any, target: float, rounds: int | None) -> None:
    callback = TargetMetric("val_distance", target, mode=mode)
    trainer(callbacks=callback, max_rounds=6, **PROBLEM).fit(model(), problem())
    assert (callback.reached or {}).get("rounds") == rounds


def test_only_validated_rounds_can_reach_the_target() -> None:
    callback = TargetMetric("val_distance", 1.0, mode="min")
    trainer(callbacks=callback, max_rounds=6, check_val_every_n_epoch=2, **PROBLEM).fit(model(), problem())
    assert callback.reached is not None
    assert callback.reached["rounds"] == 4


@pytest.mark.parametrize("logs", ["module", "callback"])
def test_metric_counts_in_its_round_even_from_the_last_hook(logs: str, tmp_path: Path) -> None:
    class Late(Quadratic):
        def on_train_epoch_end(self) -> None:
            self.log("late", float(self.trainer.fit_loop.round))

    class Logs(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.log("late", float(trainer.fit_loop.round))

    last, earlier = TargetMetric("late", 3.0), TargetMetric("late", 2.0)
    saving = ModelCheckpoint(tmp_path, save_last=True, save_on_train_epoch_end=True)
    callbacks = [last, earlier, saving, *([Logs()] if logs == "callback" else [])]
    module = Late if logs == "module" else Quadratic
    run = trainer(callbacks=callbacks, max_rounds=3, enable_checkpointing=True, **PROBLEM)
    run.fit(module(x0=8.0, lr=0.5, optimum=0.0), problem())
    assert last.reached is not None
    assert earlier.reached is not None
    assert (last.reached["rounds"], earlier.reached["rounds"]) == (3, 2)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]
    assert saved[last.state_key]["reached"] == last.reached


RESUMED = [  # checkpoints come after the round, after validation
    pytest.param(every, reached, rounds, id=f"{every}-{rounds}")
    for every, reached in ((1, 3), (2, 4))
    for rounds in (2, 3, 4)
]


@pytest.mark.parametrize(("every", "reached", "rounds"), few(RESUMED, ["1-2", "1-3", "2-4"]))
def test_resumed_run_reaches_the_target_in_the_same_round(
    every: int, reached: int, rounds: int, tmp_path: Path
) -> None:
    saving = ModelCheckpoint(tmp_path, save_last=True)
    options: Any = {"enable_checkpointing": True, "check_val_every_n_epoch": every, **PROBLEM}
    first, again = (TargetMetric("val_distance", 1.0, mode="min") for _ in range(2))
    trainer(callbacks=[first, saving], max_rounds=rounds, **options).fit(model(), problem())
    options["enable_checkpointing"] = False
    trainer(callbacks=again, max_rounds=6, **options).fit(model(), problem(), ckpt_path=tmp_path / "last.ckpt")
    assert again.reached == {"rounds": reached, "bytes_up": 16 * reached, "bytes_down": 16 * reached}


def test_sanity_check_does_not_reach_the_target() -> None:
    callback = TargetMetric("val_distance", 10.0, mode="min")
    trainer(callbacks=callback, max_rounds=1, num_sanity_val_steps=1, **PROBLEM).fit(model(), problem())
    assert callback.reached is not None
    assert callback.reached["rounds"] == 1


def test_metrics_of_other_callbacks_can_be_targets() -> None:
    targets = [TargetMetric("clients_train/val_acc/worst_10", 0.0), TargetMetric("client/loss", 100.0, mode="min")]
    fit(callbacks=[*targets, ClientAccuracy(every_n_rounds=2, on="train")], max_rounds=3)
    assert [t.reached and t.reached["rounds"] for t in targets] == [2, 1]


def test_tensorboard_shows_the_target_with_the_hyperparameters(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    callback = TargetMetric("val_distance", 1.0, mode="min")
    trainer(callbacks=callback, max_rounds=4, logger=logger, **PROBLEM).fit(model(), problem())
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("target/rounds")] == [(3, 3.0)]
    *before, reached = [e.value for e in events.Scalars("hp_metric")]
    assert (set(before), reached) == ({-1.0}, 3.0)


def test_end_of_fit_logs_the_cost_of_the_target(caplog: pytest.LogCaptureFixture) -> None:
    run = partial(trainer, max_rounds=4, **PROBLEM)
    with caplog.at_level(logging.INFO):
        run(callbacks=TargetMetric("val_distance", 1.0, mode="min")).fit(model(), problem())
        run(callbacks=TargetMetric("val_distance", 0.1, mode="min")).fit(model(), problem())
    assert "val_distance <= 1 took 3 rounds, 48 bytes up and 48 bytes down" in caplog.text
    assert "val_distance <= 0.1 was not reached in 4 rounds" in caplog.text
    with pytest.warns(UserWarning, match=r"'val_auc' was never logged; there is .*val_acc"):
        fit(seeded(), data(), callbacks=TargetMetric("val_auc", 1.0), max_rounds=1)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [({"target": 1.0, "mode": "up"}, "mode"), ({"target": float("nan")}, "target"), ({"target": "0.9"}, "target")],
)
def test_out_of_range_arguments_are_rejected(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(FederatedError, match=words):
        TargetMetric("val_acc", **kwargs)
