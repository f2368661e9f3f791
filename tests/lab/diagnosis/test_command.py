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
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import Algorithm, FedAvg
from lightning_fed.cli.main import main
from lightning_fed.core.rounds import Step
from lightning_fed.data import Iid
from lightning_fed.data.datasets.digits import _load as load_digits
from lightning_fed.lab.configurations import overlay
from lightning_fed.models import MLPClassifier

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


PRIVATE = {
    "trainer__aggregator": {
        "class_path": "DifferentialPrivacy",
        "init_args": {"max_norm": 1.0, "noise_multiplier": 1.0, "delta": 0.01},
    },
    "trainer__sampler": {"class_path": "lightning_fed.server.BernoulliSampler", "init_args": {"probability": 0.5}},
}


class Uphill(FedAvg):
    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        return -g


class Unknown(Algorithm):
    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        return -g


class Broken(MLPClassifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return float("nan") * super().training_step(batch, batch_idx)


class Untrained(MLPClassifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 0 * super().training_step(batch, batch_idx)


class Rare(FederatedDataModule):
    """Digits of which most are 0 and 1, alike for all clients."""

    def __init__(self, num_clients: int = 6) -> None:
        images, labels = load_digits()
        kept = [i for c in range(10) for i in torch.nonzero(labels == c).flatten().tolist()[: 150 if c < 2 else 3]]
        super().__init__(
            train=TensorDataset(images[kept], labels[kept]), partition=Iid(num_clients, seed=0), batch_size=32
        )


@pytest.fixture(autouse=True)
def _own_classes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])
    monkeypatch.setitem(
        sys.modules,
        "mine",
        SimpleNamespace(Uphill=Uphill, Unknown=Unknown, Rare=Rare, Broken=Broken, Untrained=Untrained),
    )


def diagnose(*args: str, rounds: int = 2, **overrides: Any) -> dict[str, Any]:
    """Return the JSON report of a configuration."""
    path = Path("config.yaml")
    path.write_text(yaml.safe_dump(overlay(BASE, {key.replace("__", "."): v for key, v in overrides.items()})))
    main(
        ["diagnose", "--config", str(path), "--rounds", str(rounds), "--hessian_clients", "3", "--out", "r.json", *args]
    )
    return dict(json.loads(Path("r.json").read_text()))


def causes(report: dict[str, Any]) -> dict[str, str]:
    """Return the evidence of each cause, the best there is."""
    return {verdict["cause"]: verdict["evidence"] for verdict in reversed(report["verdicts"])}


@pytest.mark.thorough
def test_options_of_fit_go_on_top_of_the_configuration() -> None:
    options = ["--model.lr=0.02", "--trainer.local_steps", "3", "--trainer.max_steps", "-1", "--seed_everything", "5"]
    written = diagnose(model={"init_args": {"lr": 0.02}}, trainer__local_steps=3, seed_everything=5)
    assert diagnose(*options) == written
    assert [trial["rate"] for trial in written["trials"]] == pytest.approx([0.002, 0.006, 0.02, 0.06, 0.2])


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--trainer.local_stops", "3"), "(?s)local_stops.*Did you mean --trainer.local_steps"),
        (("--trainer.local_step", "3"), "(?s)local_step .*Did you mean --trainer.local_steps"),  # no abbreviations
        (("--trainer.local_steps", "many"), "(?s)local_steps.*many"),
        (("--model.depth", "3"), "depth"),
    ],
)
def test_an_option_that_fit_does_not_take_is_refused(option: tuple[str, str], said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        diagnose(*option)


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
    assert report["verdicts"][0]["cause"] == "the step size is too large"


@pytest.mark.thorough
def test_a_step_size_at_which_training_diverges_is_named() -> None:
    report = diagnose(model__init_args__lr=1e3, trainer__local_steps=30, data__init_args__batch_size=8)
    assert {"the step size is too large", "no step size helps"} & causes(report).keys()


@pytest.mark.thorough
def test_the_first_round_of_scaffold_is_not_held_against_its_step_size() -> None:
    quadratics = {
        "model": {"class_path": "lightning_fed.models.Quadratic", "init_args": {"lr": 0.1}},
        "data": {"class_path": "lightning_fed.data.Quadratics"},
        "trainer__local_steps": 10,
    }
    found = causes(diagnose(trainer__algorithm="Scaffold", **quadratics))
    assert found["the step size is too large"] == "possible"
    assert causes(diagnose(**quadratics))["the step size is too large"] == "likely"


def test_drift_is_named_and_its_cure_makes_it_go() -> None:
    apart = {"data__init_args__alpha": 0.02, "trainer__local_steps": 40, "model__init_args__lr": 0.3}
    report = diagnose(**apart)
    assert causes(report)["clients drift"] == "likely"
    assert "the step size is too large" not in causes(report)
    assert "the classes are imbalanced among the clients" in causes(report)
    cured = diagnose(trainer__algorithm="Scaffold", **apart)
    assert "clients drift" not in causes(cured)
    assert cured["measured"]["drift"] == report["measured"]["drift"]


def test_imbalanced_classes_are_named() -> None:
    report = diagnose(data={"class_path": "mine.Rare", "init_args": {"num_clients": 6}})
    assert causes(report)["the classes are imbalanced"] == "likely"
    assert not {"clients drift", "the classes are imbalanced among the clients"} & causes(report).keys()


@pytest.mark.parametrize(
    ("method", "evidence"),
    [("mine.Uphill", "certain"), pytest.param("mine.Unknown", "likely", marks=pytest.mark.thorough)],
)
def test_a_reversed_sign_is_a_fault(method: str, evidence: str) -> None:
    report = diagnose(trainer__algorithm={"class_path": method})
    assert report["verdicts"][0]["cause"] == "there is a fault"
    assert report["verdicts"][0]["evidence"] == evidence
    assert method.partition(".")[2] in report["verdicts"][0]["text"]


@pytest.mark.parametrize(
    ("model", "told"),
    [("Broken", "The training loss is nan at this model"), ("Untrained", "The gradient of the training")],
)
def test_a_loss_that_trains_nothing_is_a_fault(model: str, told: str) -> None:
    report = diagnose(rounds=1, model={**BASE["model"], "class_path": f"mine.{model}"})
    verdict = report["verdicts"][0]
    assert (verdict["evidence"], verdict["cause"]) == ("certain", "there is a fault")
    assert told in verdict["text"]


@pytest.mark.thorough
def test_it_starts_at_a_checkpoint_of_a_finished_run() -> None:
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
def test_a_server_that_steps_alone_is_tried_at_its_own_rates() -> None:
    report = diagnose(trainer__algorithm="ServerOnly", trainer__local_steps=None)
    assert [trial["rate"] for trial in report["trials"]] == pytest.approx([0.1, 0.3, 1.0, 3.0, 10.0])
    assert len({trial["losses"][-1] for trial in report["trials"]}) == 5
    assert report["check"]["outcome"] == "agrees"


@pytest.mark.thorough
def test_what_only_watches_is_left_out_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    watchers = [{"class_path": "ModelCheckpoint"}, {"class_path": "EarlyStopping", "init_args": {"monitor": "val_acc"}}]
    diagnose(trainer__callbacks=watchers, trainer__check_val_every_n_epoch=1)
    assert "left out, since they only watch or stop a run: ModelCheckpoint, EarlyStopping" in capsys.readouterr().out


@pytest.mark.thorough
def test_another_local_optimizer_is_not_judged_by_formulas_for_sgd() -> None:
    report = diagnose(optimizer={"class_path": "torch.optim.Adam", "init_args": {"lr": 0.001}})
    assert report["measured"]["is_plain"] is False
    assert report["measured"]["drift"] is None
    assert report["measured"]["G"][0] > 0


@pytest.mark.thorough
def test_the_report_is_written_as_markdown() -> None:
    Path("config.yaml").write_text(yaml.safe_dump(BASE))
    main(["diagnose", "--config", "config.yaml", "--rounds", "1", "--out", "pages/report.md"])
    page = Path("pages/report.md").read_text()
    assert page.startswith("# Diagnosis\n")
    assert "| G | " in page
    assert "## Verdicts, best evidence first" in page


@pytest.mark.parametrize(
    ("args", "overrides", "message"),
    [
        (["--out", "report.txt"], {}, "Use a name such as report.md"),
        (["--ckpt_path", "no.ckpt"], {}, "There is no checkpoint no.ckpt"),
        (["--ckpt_path", "last"], {}, "--ckpt_path last found no checkpoint under"),
        ([], {"trainers": {}}, "there is no key of a configuration 'trainers'. Did you mean 'trainer'?"),
        ([], {"model__init_args__rate": 1.0}, "Option 'rate' is not accepted"),
        ([], {"trainer__clients_per_round": 7}, "clients_per_round=7 asks for more clients than the 6"),
        ([], PRIVATE, "A diagnosis measures single clients, which aggregator=Differential"),
        ([], {"trainer__local_epochs": 1}, "Pass local_epochs or local_steps, not both"),
    ],
    ids=str,
)
def test_what_cannot_be_diagnosed_is_refused_by_name(
    args: list[str], overrides: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        diagnose(*args, **overrides)
    assert message in str(end.value)
    assert not Path("r.json").exists()
