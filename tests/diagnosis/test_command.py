"""``lightning-fed diagnose`` as a user types it: what it says of configurations with one thing wrong."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from lightning_fed.algorithms import Algorithm, FedAvg
from lightning_fed.cli import main
from lightning_fed.core.rounds import Step
from lightning_fed.data import Digits
from lightning_fed.experiments.overrides import overlay

BASE: dict[str, Any] = {
    "seed_everything": 0,
    "model": {
        "class_path": "lightning_fed.models.MLPClassifier",
        "init_args": {"in_features": 64, "num_classes": 10, "hidden": [], "lr": 0.1},
    },
    "data": {
        "class_path": "lightning_fed.data.Digits",
        "init_args": {"num_clients": 6, "alpha": 100.0, "batch_size": 32},
    },
    "trainer": {"algorithm": "FedAvg", "max_rounds": 20, "local_steps": 4},
}


class Uphill(FedAvg):
    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        return -g


class Unknown(Algorithm):
    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        return -g


class Rare(Digits):
    """Hardly any class but 0 and 1."""

    def setup(self, stage: str) -> None:
        super().setup(stage)


@pytest.fixture(autouse=True)
def _own_classes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(Uphill=Uphill, Unknown=Unknown))


def diagnose(*args: str, rounds: int = 2, **overrides: Any) -> dict[str, Any]:
    """Return the JSON report of a configuration."""
    path = Path("config.yaml")
    path.write_text(yaml.safe_dump(overlay(BASE, {key.replace("__", "."): v for key, v in overrides.items()})))
    main(["diagnose", "--config", str(path), "--rounds", str(rounds), "--hessian_clients", "3", "--out", "r.json", *args])
    return dict(json.loads(Path("r.json").read_text()))


def causes(report: dict[str, Any]) -> dict[str, str]:
    """Return the evidence of each verdict by its cause, best first."""
    return {verdict["cause"]: verdict["evidence"] for verdict in report["verdicts"]}


def test_nothing_stands_out_of_a_sound_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    report = diagnose()
    assert causes(report).keys() <= {"nothing stands out", "the step size is rather small"}
    assert report["check"]["outcome"] == "agrees"
    assert [trial["factor"] for trial in report["trials"]] == [0.1, 0.3, 1.0, 3.0, 10.0]
    assert [trial["rate"] for trial in report["trials"]] == pytest.approx([0.01, 0.03, 0.1, 0.3, 1.0])
    assert len({trial["losses"][0] for trial in report["trials"]}) == 1
    assert all(len(trial["losses"]) == 3 for trial in report["trials"])
    assert report["measured"]["clients"] == 6
    out = capsys.readouterr().out
    for part in ("The run", "What the clients are like", "What the theory suggests", "Self-check", "Verdicts"):
        assert part in out
    assert sorted(path.name for path in Path().iterdir()) == ["config.yaml", "r.json"]


def test_a_step_size_that_is_too_large_is_named() -> None:
    report = diagnose(model__init_args__lr=20.0)
    assert next(iter(causes(report))) == "the step size is too large"
    assert "nothing stands out" not in causes(report)


def test_a_step_size_at_which_training_diverges_is_named() -> None:
    report = diagnose(model__init_args__lr=1e3, trainer__local_steps=30, data__init_args__batch_size=8)
    assert {"the step size is too large", "no step size helps"} & causes(report).keys()


def test_drift_is_named_and_its_cure_makes_it_go() -> None:
    apart = {"data__init_args__alpha": 0.02, "trainer__local_steps": 100, "model__init_args__lr": 0.2}
    report = diagnose(**apart)
    assert causes(report)["clients drift"] == "likely"
    assert "the step size is too large" not in causes(report)
    assert "the classes are imbalanced among the clients" in causes(report)
    cured = diagnose(trainer__algorithm="Scaffold", **apart)
    assert "clients drift" not in causes(cured)
    assert cured["measured"]["drift"] == report["measured"]["drift"]


def test_imbalanced_classes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Digits._load if hasattr(Digits, "_load") else None
    assert load is not None


@pytest.mark.parametrize(("method", "evidence"), [("mine.Uphill", "certain"), ("mine.Unknown", "likely")])
def test_a_reversed_sign_is_a_fault(method: str, evidence: str) -> None:
    report = diagnose(trainer__algorithm={"class_path": method})
    assert next(iter(causes(report).items())) == ("there is a fault", evidence)
    assert method.partition(".")[2] in report["verdicts"][0]["text"]
