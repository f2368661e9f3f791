"""The results of a grid."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_fed.lab.claims import judge, overall
from lightning_fed.lab.experiment import Claim
from lightning_fed.lab.grid import Grid
from lightning_fed.lab.numbers import format_number
from lightning_fed.lab.page import pages
from lightning_fed.lab.quantities import Metric, parse_quantity
from lightning_fed.lab.reading import read_experiment
from lightning_fed.lab.reading_claims import ClaimReader
from lightning_fed.lab.results import Candidate, Estimate, choose
from tests.helpers.lab import results_of

Curves = dict[str, list[float] | str]


@pytest.fixture
def judged(write: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """Return a function that judges a claim on each method's curve, or on the status of a diverged or failed cell."""

    def of(claim: str, curves: Curves, quantity: str = "final", seeds: int = 1, **more: Any) -> tuple[str, str]:
        entry = {"says": "So it is.", "source": "Table 1", "claim": claim, "quantity": quantity, **more}
        experiment = read_experiment(write(methods={name: {} for name in curves}, claims=[entry], seeds=seeds))
        results = results_of(
            Grid(experiment), tmp_path / f"{claim} {quantity}", lambda cell: curves[cell.point.by_axis["method"]]
        )
        found = judge(experiment.claims[0], results)
        text = "".join(pages(results, "the command", []))
        assert "So it is." in text
        if "found" in more:
            assert (more["found"] in text) == (overall(found) != "holds")
        return overall(found), found[0].numbers

    return of


def test_seeds_are_averaged(judged: Any, write: Any, tmp_path: Path) -> None:
    experiment = read_experiment(write(seeds=3))
    results = results_of(Grid(experiment), tmp_path / "o", lambda cell: [float(cell.seed)])
    estimate = results.estimate(results.grid.points[0], claim_on(experiment, "final").quantity)
    assert estimate.mean == 1.0
    assert estimate.spread == pytest.approx(1.0)
    assert str(estimate) == "1.0 ± 1.0"
    some = results.estimate(results.grid.points[0], claim_on(experiment, "rounds to 0.5").quantity)
    assert math.isinf(some.mean)  # a seed that does not reach the target counts as never


def claim_on(experiment: Any, quantity: str) -> Claim:
    entry = {"says": "", "source": "Table 1", "claim": "FedAvg < SCAFFOLD", "quantity": quantity}
    labels = {name: tuple(axis.choices) for name, axis in experiment.axes.items()}
    return ClaimReader(labels, experiment.metrics, ("full",)).read("", [entry])[0]


METRICS = {
    "val_acc": Metric("val_acc", "max", "accuracy"),
    "val_loss": Metric("val_loss", "min", "loss"),
    "other": Metric("other", "min", "other loss"),
}


def test_only_costs_show_a_lower_bound_when_unreached() -> None:
    cost_of, final = (parse_quantity("here", text, METRICS) for text in ("rounds to 0.9", "final"))
    assert str(Estimate(cost_of, (math.inf,), limit=8.0)) == ">8"
    assert str(Estimate(final, (-math.inf,), limit=8.0)) == "not finite"


def candidate(label: str, *values: float, tie: float = 0.0, by: str = "final", **more: Any) -> Candidate:
    quantity = parse_quantity("", by, {"acc": Metric("acc", "max", "accuracy")})
    return Candidate((("lr", label),), Estimate(quantity, values, **more), tie)


def test_best_candidate_is_chosen_and_ties_go_to_the_first() -> None:
    a, b, equal = candidate("a", 0.5, 0.7), candidate("b", 0.8, 0.8), candidate("c", 0.8, 0.8)
    assert choose([a, b, equal]) is b
    assert choose([a, candidate("d", 0.9, is_diverged=True), candidate("e", missing="failed")]) is a
    assert choose([candidate("d", 0.9, is_diverged=True), candidate("e", missing="failed")]) is None
    costs = [candidate("a", 7.0, by="rounds to 0.5", tie=-0.7), candidate("b", 7.0, by="rounds to 0.5", tie=-0.9)]
    assert choose(costs) is costs[1]  # for equal costs, the final value decides


def test_estimate_shows_its_mean_or_why_it_is_missing() -> None:
    assert str(candidate("a", 0.25).estimate) == "0.25"
    assert str(candidate("a", 0.25, 0.75).estimate) == "0.50 ± 0.35"
    assert str(candidate("a").estimate) == "-"
    assert str(candidate("a", -math.inf, is_diverged=True).estimate) == "diverged"
    assert [format_number(value) for value in (38.0, 0.123456, 1234.56, math.inf, math.nan, 1e8)] == [
        "38",
        "0.1235",
        "1235",
        "infinite",
        "-",
        "1e+08",
    ]
