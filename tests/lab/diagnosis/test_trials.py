"""Rounds at several step sizes, from any start, without side effects."""

from pathlib import Path

import pytest
import yaml

from lightning_fed import FederatedTrainer
from lightning_fed.callbacks import FederatedCallback
from lightning_fed.cli.main import main
from lightning_fed.data import Quadratics
from lightning_fed.lab.diagnosis.trials import Trial, read_config
from lightning_fed.lab.overlays import overlay
from lightning_fed.models import Quadratic
from tests.helpers.diagnosis import BASE, diagnose

A, RATE, STEPS = (3.0, 1.0), 0.05, 4


def test_measuring_does_not_affect_the_run() -> None:
    def end(*callbacks: FederatedCallback) -> float:
        model = Quadratic(lr=RATE)
        trainer = FederatedTrainer(
            max_rounds=2, local_steps=3, clients_per_round=1, callbacks=list(callbacks), logger=False, seed=0,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        )  # fmt: skip
        trainer.fit(model, Quadratics(a=A, rows=4, noise=2.0, batch_size=1))
        return float(model.x.detach())

    assert end(Trial(1.0, 2, 2, 2, "uniform")) == end()


def test_configuration_is_read_like_that_of_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    base, trainer = dict(BASE), dict(BASE["trainer"])
    of_sgd = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.25}}
    Path("trainer.yaml").write_text(yaml.safe_dump(trainer))
    Path("base.yaml").write_text(yaml.safe_dump({**base, "trainer": "trainer.yaml", "optimizer": of_sgd}))
    Path("adam.yaml").write_text("optimizer: {class_path: torch.optim.Adam}\nckpt_path: null\n")
    monkeypatch.setenv("PL_TRAINER_GRADIENT_CLIP_VAL", "0.5")
    config, _ = read_config(["base.yaml", "adam.yaml"], ["--trainer.max_rounds", "7"])
    assert config["optimizer"]["class_path"] == "torch.optim.Adam"
    assert config["optimizer"]["init_args"]["lr"] == 0.25  # which both classes have
    assert config["trainer"]["gradient_clip_val"] == 0.5
    assert config["trainer"]["max_rounds"] == 7
    assert config["trainer"]["local_steps"] == trainer["local_steps"]


@pytest.mark.thorough
def test_diagnosis_starts_from_a_checkpoint_of_a_finished_run() -> None:
    path = Path("config.yaml")
    path.write_text(yaml.safe_dump(overlay(BASE, {"trainer.max_rounds": 3, "trainer.algorithm": "Scaffold"})))
    main(["fit", "--config", str(path), "--trainer.logger", "false", "--trainer.enable_progress_bar", "false"])
    checkpoint = str(next(Path("checkpoints").glob("*.ckpt")))
    before = {file: file.read_bytes() for file in Path("checkpoints").rglob("*") if file.is_file()}
    given = {"trainer__max_rounds": 3, "trainer__algorithm": "Scaffold"}
    report = diagnose("--ckpt_path", checkpoint, **given)
    assert report["measured"]["round"] == 3
    assert report["measured"]["loss"] < 2.2 < diagnose(**given)["measured"]["loss"]
    assert report["theory"]["T"] == 3.0  # none is left
    assert [trial["rate"] for trial in report["trials"]] == pytest.approx([0.01, 0.03, 0.1, 0.3, 1.0])
    assert all(len(trial["losses"]) == 3 for trial in report["trials"])
    assert diagnose("--ckpt_path", "last", "--clients", "2", **given)["measured"]["round"] == 3
    assert before == {file: file.read_bytes() for file in Path("checkpoints").rglob("*") if file.is_file()}


@pytest.mark.thorough
def test_schedules_scale_with_the_step_size() -> None:
    schedule = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 1, "gamma": 0.0}}
    optimizer = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}
    report = diagnose(rounds=3, optimizer=optimizer, lr_scheduler=schedule)
    for trial in report["trials"]:
        assert trial["losses"][0] != trial["losses"][1] == trial["losses"][2] == trial["losses"][3]
    warm = "torch.optim.lr_scheduler.CosineAnnealingWarmRestarts"  # back at its base rate in every round
    schedule = {"class_path": warm, "init_args": {"T_0": 1}}
    steady = diagnose(optimizer=optimizer, lr_scheduler=schedule)
    assert [trial["losses"] for trial in steady["trials"]] == [trial["losses"] for trial in diagnose()["trials"]]


@pytest.mark.thorough
def test_server_only_method_is_tried_at_its_own_rates() -> None:
    report = diagnose(trainer__algorithm="ServerOnly", trainer__local_steps=None)
    assert [trial["rate"] for trial in report["trials"]] == pytest.approx([0.1, 0.3, 1.0, 3.0, 10.0])
    assert len({trial["losses"][-1] for trial in report["trials"]}) == 5
    assert report["check"]["outcome"] == "agrees"


@pytest.mark.thorough
def test_observing_callbacks_are_skipped_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    watchers = [{"class_path": "ModelCheckpoint"}, {"class_path": "EarlyStopping", "init_args": {"monitor": "val_acc"}}]
    diagnose(trainer__callbacks=watchers, trainer__check_val_every_n_epoch=1)
    assert "left out, since they only monitor or stop a run: ModelCheckpoint, EarlyStopping" in capsys.readouterr().out
