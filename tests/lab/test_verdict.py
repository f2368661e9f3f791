"""The verdict on an experiment's claims, on its pages and in the table of claims."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_fed.lab.claims import judge
from lightning_fed.lab.grid import Cell, Grid
from lightning_fed.lab.page import pages
from lightning_fed.lab.reading import read_experiment
from lightning_fed.lab.results import Results
from lightning_fed.lab.verdict import write_claims
from tests.helpers.lab import results_of

SEEDS = {"random": True, "seeds": 3}
ENTRY = {"says": "x", "source": "Table 1", "claim": "FedAvg < SCAFFOLD", "quantity": "final", "paper": "1 < 2"}


def of_seeds(curves: dict[str, tuple[float, ...]]) -> Callable[[Cell], list[float]]:
    return lambda cell: [curves[cell.point.by_axis["method"]][cell.seed]]


@pytest.fixture
def paired(write: Any, tmp_path: Path) -> Results:
    experiment = read_experiment(write(claims=[ENTRY], **SEEDS))
    curves = {"FedAvg": (1.0, 1.1, 0.9), "SCAFFOLD": (2.0, 2.3, 2.0)}
    return results_of(Grid(experiment), tmp_path / "o", of_seeds(curves))


def test_claim_row_has_difference_interval_error_and_p(paired: Results) -> None:
    page, details = pages(paired, "", [])
    row = next(line for line in page.splitlines() if line.startswith("| [1](tiny_details.md#claim-1)"))
    assert "| x `FedAvg < SCAFFOLD` in final distance | 1 < 2 |" in row
    assert "| FedAvg: 1; SCAFFOLD: 2.1 | -1.100 [-1.348, -0.852] | 0.058 | 0.0027 | holds |" in row
    assert "### Claim 1" in details
    assert "| - | FedAvg: 1; SCAFFOLD: 2.1 | -1.1000 ± 0.0577 | -1.3484 to -0.8516 | 0.0027 | holds |" in details
    for text in (page, details):
        assert "Student's t over the paired differences of n = 3 seeds, two-sided at the 5 % level" in text
    assert "± is the sample standard deviation over the 3 seeds" in page


def test_false_inequality_is_never_printed(write: Any, tmp_path: Path) -> None:
    experiment = read_experiment(write(claims=[ENTRY], **SEEDS))
    curves = {"FedAvg": (1.0, 1.2, 1.1), "SCAFFOLD": (1.05, 1.05, 1.05)}
    text = "".join(pages(results_of(Grid(experiment), tmp_path / "o", of_seeds(curves)), "", []))
    assert "*undecided*" in text
    assert "1.1 < 1.05" not in text
    assert "FedAvg: 1.1; SCAFFOLD: 1.05" in text


def test_claim_at_several_points_is_corrected_for_their_number(write: Any, tmp_path: Path) -> None:
    axes = {"G": {"key": "data.init_args.G", "values": [1, 10]}}
    experiment = read_experiment(write(claims=[ENTRY, {**ENTRY, "at": {"G": 1}}], axes=axes, **SEEDS))
    falls = {"1": (-1.0, -1.3, -0.6), "10": (-1.0, 2.0, 0.0)}  # p = 0.041 and 0.74

    def curve(cell: Cell) -> list[float]:
        return [falls[cell.point.by_axis["G"]][cell.seed] if cell.point.by_axis["method"] == "FedAvg" else 0.0]

    results = results_of(Grid(experiment), tmp_path / "o", curve)
    everywhere, (alone,) = (judge(claim, results) for claim in experiment.claims)
    (first,) = everywhere[0].comparisons
    assert first.p == pytest.approx(0.0412, abs=1e-4)
    assert everywhere[0].corrected == (2 * first.p,)
    assert (alone.verdict, everywhere[0].verdict) == ("holds", "undecided")
    page, details = pages(results, "", [])
    assert "*undecided* at 2 of 2" in page
    assert "| 0.041 | 0.083 | *undecided* |" in details


def test_controls_are_judged_below_their_claim_and_not_counted(write: Any, tmp_path: Path) -> None:
    control = {"says": "Not with ten times the gradients.", "claim": "SCAFFOLD < FedAvg", "quantity": "final"}
    experiment = read_experiment(write(claims=[{**ENTRY, "controls": [control]}]))
    results = results_of(
        Grid(experiment), tmp_path, lambda cell: [1.0 if cell.point.by_axis["method"] == "FedAvg" else 2.0]
    )
    page, details = pages(results, "", [])
    assert "Of 1 claim: 1 holds." in page
    assert control["says"] not in page
    assert (
        "Control: Not with ten times the gradients.\n\n`SCAFFOLD < FedAvg` in final distance: **does not hold**."
        in details
    )


def test_comparisons_without_a_paper_are_counted_separately(write: Any, tmp_path: Path) -> None:
    experiment = read_experiment(write(claims=[ENTRY], own=True))
    results = results_of(Grid(experiment), tmp_path / "o", lambda _: [1.0])
    assert "Of 1 comparison of our own: 1 does not hold." in pages(results, "", [])[0]
    write_claims(tmp_path / "claims.csv", results)
    assert [row["kind"] for row in rows_of(tmp_path / "claims.csv")] == ["own"]


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_claims_table_keeps_rows_of_other_experiments(paired: Results, write: Any, tmp_path: Path) -> None:
    path = tmp_path / "claims.csv"
    write_claims(path, paired)
    (row,) = rows_of(path)
    assert (row["n"], row["difference"], row["standard error"]) == ("3", "-1.1", "0.057735")
    assert float(row["p"]) == float(row["p (Holm)"]) == pytest.approx(0.002743, abs=1e-6)
    told = {name: row[name] for name in ("paper", "place", "claim", "the paper's number", "ours", "verdict", "scale")}
    assert list(told.values()) == ["A paper", "Table 1", "x", "1 < 2", "FedAvg: 1; SCAFFOLD: 2.1", "holds", "full"]
    other = read_experiment(write("another", claims=[ENTRY, ENTRY | {"says": "y"}]))
    write_claims(path, results_of(Grid(other), tmp_path / "p", lambda _: [1.0]))
    write_claims(path, paired)
    assert [row["experiment"] for row in rows_of(path)] == ["another", "another", "tiny"]


def test_percent_metric_is_shown_in_percent_everywhere(write: Any, tmp_path: Path) -> None:
    metrics = {"val_distance": {"mode": "max", "label": "accuracy", "percent": True}}
    entry = {"says": "x", "source": "Table 1", "claim": "FedAvg > 55", "quantity": "final"}
    costs = {**entry, "claim": "FedAvg < 3", "quantity": "rounds to 60"}
    experiment = read_experiment(write(metrics=metrics, claims=[entry, costs], tables={"last": {"value": "best"}}))
    results = results_of(Grid(experiment), tmp_path, lambda _: [0.5, 0.625, 0.6])
    assert [judge(claim, results)[0].numbers for claim in experiment.claims] == ["FedAvg: 60.00; 55", "FedAvg: 2; 3"]
    assert "| FedAvg | 62.50 |" in pages(results, "", [])[0]


def test_binomial_error_of_a_finite_test_set_is_shown(write: Any, tmp_path: Path) -> None:
    metrics = {"val_distance": {"mode": "max", "label": "accuracy", "percent": True, "cases": 400}}
    axes = {"G": {"key": "data.init_args.G", "values": [1, 10]}}
    by_label = {"full": {"cases": {"val_distance": {"G": {1: 100, 10: 2500}}}}}
    curves = {"FedAvg": (0.5, 0.5, 0.5), "SCAFFOLD": (0.89, 0.9, 0.91)}
    for cases, changes in (([400], {}), ([100, 2500], {"axes": axes, "scales": by_label})):
        experiment = read_experiment(write(metrics=metrics, claims=[ENTRY], **SEEDS, **changes))
        results = results_of(Grid(experiment), tmp_path / str(len(cases)), of_seeds(curves))
        errors = [100 * (0.5 * 0.5 / n + 0.9 * 0.1 / n) ** 0.5 for n in cases]
        found = judge(experiment.claims[0], results)
        assert [j.comparisons[0].binomial for j in found] == pytest.approx(errors)
        page, details = pages(results, "", [])
        assert "| standard error | binomial error | p |" in page
        assert f"| {errors[-1]:.2f} |" in details
        assert f"{' or '.join(f'{n:,}' for n in cases)} test cases" in page
