"""Verdicts on the numbers of a configuration with one fault."""

import math
from typing import Any

import pytest

from lightning_fed.algorithms import Algorithm, FedAvg, Scaffold
from lightning_fed.lab.diagnosis.self_check import SelfCheck
from lightning_fed.lab.diagnosis.verdicts import verdicts
from tests.helpers.diagnosis import BASE, causes, diagnose, findings


@pytest.mark.thorough
def test_step_size_that_is_too_large_is_named() -> None:
    report = diagnose(model__init_args__lr=20.0)
    assert report["verdicts"][0]["cause"] == "the step size is too large"


@pytest.mark.thorough
def test_step_size_at_which_training_diverges_is_named() -> None:
    report = diagnose(model__init_args__lr=1e3, trainer__local_steps=30, data__init_args__batch_size=8)
    assert {"the step size is too large", "no step size helps"} & causes(report).keys()


@pytest.mark.thorough
def test_first_round_of_scaffold_does_not_count_against_its_step_size() -> None:
    quadratics = {
        "model": {"class_path": "lightning_fed.models.Quadratic", "init_args": {"lr": 0.1}},
        "data": {"class_path": "lightning_fed.data.Quadratics"},
        "trainer__local_steps": 10,
    }
    found = causes(diagnose(trainer__algorithm="Scaffold", **quadratics))
    assert found["the step size is too large"] == "possible"
    assert causes(diagnose(**quadratics))["the step size is too large"] == "likely"


@pytest.mark.thorough
def test_drift_is_named_and_disappears_with_its_remedy() -> None:
    apart = {"data__init_args__alpha": 0.02, "trainer__local_steps": 20, "model__init_args__lr": 0.3}
    report = diagnose(rounds=1, **apart)
    assert causes(report)["clients drift"] == "likely"
    assert "the step size is too large" not in causes(report)
    assert "the classes are imbalanced among the clients" in causes(report)
    cured = diagnose(rounds=1, trainer__algorithm="Scaffold", **apart)
    assert "clients drift" not in causes(cured)
    assert cured["measured"]["drift"] == report["measured"]["drift"]


@pytest.mark.thorough  # tests below cover the verdict; the drift's test covers reading labels
def test_imbalanced_classes_are_named() -> None:
    report = diagnose(data={"class_path": "mine.Rare", "init_args": {"num_clients": 6}})
    assert causes(report)["the classes are imbalanced"] == "likely"
    assert not {"clients drift", "the classes are imbalanced among the clients"} & causes(report).keys()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "evidence"),
    [("mine.Uphill", "certain"), ("mine.Unknown", "likely")],
)
def test_reversed_sign_is_a_fault(method: str, evidence: str) -> None:
    report = diagnose(trainer__algorithm={"class_path": method})
    assert report["verdicts"][0]["cause"] == "there is a fault"
    assert report["verdicts"][0]["evidence"] == evidence
    assert method.partition(".")[2] in report["verdicts"][0]["text"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "told"),
    [
        pytest.param("Broken", "The training loss is nan at this model"),
        pytest.param("Untrained", "The gradient of the training"),
    ],
)
def test_loss_that_trains_nothing_is_a_fault(model: str, told: str) -> None:
    report = diagnose(rounds=1, model={**BASE["model"], "class_path": f"mine.{model}"})
    verdict = report["verdicts"][0]
    assert (verdict["evidence"], verdict["cause"]) == ("certain", "there is a fault")
    assert told in verdict["text"]


@pytest.mark.thorough
def test_other_local_optimizers_are_not_judged_by_sgd_formulas() -> None:
    report = diagnose(optimizer={"class_path": "torch.optim.Adam", "init_args": {"lr": 0.001}})
    assert report["measured"]["is_plain"] is False
    assert report["measured"]["drift"] is None
    assert report["measured"]["G"][0] > 0


def found(algorithm: Algorithm | None = None, **changes: Any) -> dict[str, str]:
    return {verdict.cause: verdict.evidence for verdict in verdicts(findings(algorithm, **changes))}


def test_verdict_without_findings_names_a_better_step_size() -> None:
    (verdict,) = verdicts(findings(trials={10.0: [2.0, 0.8]}))
    assert verdict.cause == "nothing stands out"
    assert "1 did a little better: the loss goes from 2 to 0.8 there, and goes from 2 to 1" in verdict.text
    (verdict,) = verdicts(findings())
    assert "better" not in verdict.text


def test_each_cause_follows_from_its_numbers() -> None:
    assert found() == {"nothing stands out": "possible"}
    assert found(check=SelfCheck("differs", "Its own correct.")) == {"there is a fault": "certain"}
    assert found(loss=math.nan)["there is a fault"] == "certain"
    assert found(gradient=0.0)["there is a fault"] == "certain"
    assert found(cosine=-0.9)["there is a fault"] == "likely"
    assert found(trials={1.0: [2.0, 2.5]})["the step size is too large"] == "likely"
    assert found(trials={1.0: [2.0, math.inf]})["the step size is too large"] == "certain"
    assert found(trials={0.1: [2.0, 2.1], 1.0: [2.0, 2.5]}) == {"no step size helps": "possible"}
    assert found(trials={10.0: [2.0, 0.1]}) == {"the step size is rather small": "possible"}
    assert found(trials={0.1: [2.0, 0.1]}) == {"the step size is rather large": "possible"}
    assert found(drift=0.3) == {"clients drift": "possible"}
    assert found(drift=0.6) == {"clients drift": "likely"}
    assert found(Scaffold(), drift=0.6) == {"nothing stands out": "possible"}
    assert found(batches=2.0) == found(drawing=2.0) == {"noise dominates": "possible"}
    assert found(Scaffold(), drawing=2.0) == {"nothing stands out": "possible"}  # it keeps each client's gradient
    assert found(global_entropy=2.5) == {"the classes are imbalanced": "possible"}
    assert found(global_entropy=1.0) == {"the classes are imbalanced": "likely"}
    assert found(label_distance=0.8) == {"the classes are imbalanced among the clients": "possible"}
    assert found(classes=0, label_distance=0.8, global_entropy=1.0) == {"nothing stands out": "possible"}


def test_overshooting_steps_are_too_large_and_not_drift() -> None:
    rising = {0.1: [2.0, 2.1], 1.0: [2.0, 2.5]}
    assert found(ceiling=0.005, drift=0.6, trials=rising) == {"the step size is too large": "likely"}
    assert found(ceiling=0.04, drift=0.6, trials=rising) == {"no step size helps": "possible"}
    assert found(ceiling=0.06, drift=0.6, trials=rising) == {
        "clients drift": "likely",
        "no step size helps": "possible",
    }
    assert found(ceiling=0.005, drift=0.6) == {"clients drift": "possible"}  # the loss falls


def test_clients_without_a_finite_loss_are_named() -> None:
    (verdict,) = verdicts(findings(loss=math.nan, lost=("c3",)))
    assert "Only that of client 'c3' is not finite" in verdict.text
    (verdict,) = verdicts(findings(loss=math.nan, lost=tuple(range(6))))
    assert "Only" not in verdict.text


def test_negative_loss_suggests_a_reversed_sign() -> None:
    (verdict,) = verdicts(findings(trials={1.0: [-2.3, -264.3], 10.0: [-2.3, -300.0]}))
    assert (verdict.evidence, verdict.cause) == ("possible", "there is a fault")
    assert "goes from -2.3 to -264.3, which is below 0" in verdict.text
    assert found(trials={1.0: [2.0, 0.0]}) == {"nothing stands out": "possible"}


def test_first_round_of_late_drift_correction_is_not_judged() -> None:
    late = {1.0: [2.0, 4.0, 3.0]}
    assert found(Scaffold(), trials=late)["the step size is too large"] == "possible"
    assert found(FedAvg(), trials=late)["the step size is too large"] == "likely"


def test_strongest_evidence_comes_first() -> None:
    assert list(found(check=SelfCheck("failed", "x"), drift=0.6, global_entropy=2.5).values()) == [
        "certain",
        "likely",
        "possible",
    ]
