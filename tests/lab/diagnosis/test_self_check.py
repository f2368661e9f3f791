"""Methods against their formulas on the quadratics that the self-check runs."""

from typing import Any

import pytest
from torch import Tensor

from lightning_fed import algorithms
from lightning_fed.algorithms import (
    SGD,
    Adam,
    Algorithm,
    CMime,
    FedACG,
    FedAvg,
    FedCM,
    FedDane,
    FedDyn,
    FedExP,
    FedNova,
    FedProx,
    FedProxVR,
    FedSAM,
    FedSpeed,
    Mime,
    MimeLite,
    MimeMVR,
    MoFedSAM,
    Scaffold,
    ScaffoldM,
    ServerOnly,
    SGDm,
)
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import Run, Step, Update
from lightning_fed.lab.diagnosis.self_check import self_check

METHODS = [
    FedAvg(), FedAvg("normalized"), FedNova(), FedProx(0.5), FedDane(0.3), FedDane(0.3, "same"), ServerOnly(),
    Scaffold(), Scaffold("i"), FedCM(0.1), FedCM(0.3, 0.5, "paper"), FedCM(1.0, 0.5), FedDyn(0.2),
    FedDyn(0.2, "inverse_size"), FedExP(), FedExP(0.1, "cohort", 0.5), FedACG(), FedACG(0.5, 0.3), ScaffoldM(0.2),
    ScaffoldM(0.5, 0.4, "paper"), ScaffoldM(1.0, 0.5), FedSAM(0.1), FedSAM(0.5, 0.1), MoFedSAM(0.1, 0.2),
    MoFedSAM(0.3, 0.5, 0.5, "paper", 0.1), FedSpeed(2.0, 0.2), FedSpeed(2.0, 0.2, 0.7, "unit", 0.1, "all"),
    FedProxVR(0.5), FedProxVR(0.5, "sarah"),
    *(kind(base) for kind in (Mime, MimeLite) for base in (None, SGD(), SGDm(0.5), SGDm(0.9, "heavy_ball"))),
    *(MimeMVR(0.2, anchor, m0) for anchor in ("eq15", "lemma9", "current") for m0 in ("grad", "zeros")),
]  # fmt: skip


OF_OWN = {
    "APFL",
    "Ditto",
    "FedBN",
    "FedPer",
    "FedRep",
    "LGFedAvg",
    "PFedMe",
}  # their clients have personal models


ENGINES = ["sequential", "vectorized"]
TRIED = [(method, ENGINES[n % 2]) for n, method in enumerate(METHODS[::6])]
CASES = [
    pytest.param(
        method, engine, id=f"{method!r}-{engine}", marks=[] if (method, engine) in TRIED else pytest.mark.thorough
    )
    for method in METHODS
    for engine in ENGINES
]


@pytest.mark.parametrize(("method", "engine"), CASES)
def test_every_method_matches_its_formula(method: Algorithm, engine: str) -> None:
    check = self_check(method, engine)
    assert check.outcome == "agrees", check.text


def test_every_method_class_is_checked_or_listed_without_a_formula() -> None:
    kinds = {type(method).__name__ for method in METHODS} | OF_OWN | {"CMime", "Scaffnew"}
    public = (getattr(algorithms, name) for name in algorithms.__all__)
    assert kinds == {one.__name__ for one in public if issubclass(one, Algorithm) and one is not Algorithm}


class WrongSign(Scaffold):
    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        return g + step.client["c_i"] - step.server["c"]


class Forgets(Scaffold):
    def finish(self, y: Tensor, run: Run) -> Update:
        update = super().finish(y, run)
        return Update(update.send, dict(run.client), update.implied)


class Uphill(FedAvg):
    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        return -g


@pytest.mark.parametrize(
    ("method", "known", "hook"),
    [(WrongSign(), "Scaffold", "correct"), (Forgets(), "Scaffold", "finish"), (Uphill(), "FedAvg", "correct")],
    ids=repr,
)
def test_incorrect_override_is_named(method: Algorithm, known: str, hook: str) -> None:
    check = self_check(method, "sequential")
    assert check.is_fault
    assert f"{type(method).__name__} departs from the formula of {known}" in check.text
    assert f"Its own {hook} makes it another method than {known}, or is wrong" in check.text


def test_subclass_that_only_observes_agrees() -> None:
    class Same(FedProx):
        def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
            return super().correct(g, y, step)

    assert self_check(Same(0.5), "sequential").outcome == "agrees"


def test_broken_installation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scaffold, "correct", WrongSign.correct)
    check = self_check(Scaffold(), "sequential")
    assert check.is_fault
    assert "Nothing of it is overridden: the installation" in check.text


def test_method_that_raises_is_a_fault() -> None:
    class Breaks(FedAvg):
        def finish(self, y: Tensor, run: Run) -> Update:
            raise FederatedError("out of order")

    check = self_check(Breaks(), "sequential")
    assert (check.outcome, check.is_fault) == ("failed", True)
    assert "out of order" in check.text


class Own(Algorithm):
    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        return 0.5 * g


@pytest.mark.parametrize(
    "method", [Own(), CMime(SGDm()), Mime(Adam()), FedProx(0.1, adaptive={"step": 0.1, "patience": 2})], ids=repr
)
def test_method_without_a_known_formula_is_not_verified(method: Any) -> None:
    check = self_check(method, "sequential")
    assert (check.outcome, check.is_fault) == ("no formula", False)
    assert "nothing is verified" in check.text
