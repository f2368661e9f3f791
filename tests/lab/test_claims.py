"""Claims are judged by their numbers, and left open if they cannot be judged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_fed.lab.claims import judge, overall
from lightning_fed.lab.grid import Cell, Grid
from lightning_fed.lab.page import pages
from lightning_fed.lab.reading import read_experiment
from tests.helpers.lab import results_of

LESS = [{"what": "rounds", "paper": "3", "here": "one", "why": "it is quicker"}]


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


@pytest.mark.parametrize(
    ("claim", "expected"),
    [
        ("A < B", ("holds", "A: 1; B: 2")),
        ("B < A", ("does not hold", "B: 2; A: 1")),
        ("A < B < 3", ("holds", "A: 1; B: 2; 3")),
        ("A < 3 < B", ("does not hold", "A: 1; 3; B: 2")),
        ("2 * A <= B", ("holds", "2 * A: 2; B: 2")),
        ("2.5 * A <= B", ("does not hold", "2.5 * A: 2.5; B: 2")),
        ("B > A >= 1", ("holds", "B: 2; A: 1; 1")),
        ("A ~ B", ("does not hold", "A: 1; B: 2")),
        ("A ~ 1.05", ("holds", "A: 1; 1.05")),
    ],
)
def test_inequality_holds_if_its_numbers_satisfy_it(judged: Any, claim: str, expected: tuple[str, str]) -> None:
    assert judged(claim, {"A": [3.0, 1.0], "B": [0.0, 2.0]}) == expected


def test_explanation_is_shown_for_a_claim_that_does_not_hold(judged: Any) -> None:
    for claim in ("A < B", "B < A"):
        judged(claim, {"A": [1.0], "B": [2.0]}, found="A is first by luck.")


def test_reached_target_ranks_below_unreached_target(judged: Any) -> None:
    curves = {"A": [3.0, 1.0, 0.5], "B": [3.0, 3.0, 3.0], "C": [4.0, 4.0, 4.0]}
    assert judged("A < B", curves, "rounds to 1") == ("holds", "A: 2; B: >3")
    assert judged("B < A", curves, "rounds to 1") == ("does not hold", "B: >3; A: 2")
    assert judged("B < C", curves, "rounds to 1")[0] == "not judged"


def test_diverged_is_worst_and_failed_is_not_judged(judged: Any) -> None:
    curves: Curves = {"A": [1.0], "B": "diverged", "C": "failed"}
    assert judged("A < B", curves) == ("holds", "A: 1; B: diverged")
    assert judged("B < A", curves)[0] == "does not hold"
    verdict, why = judged("A < C", curves)
    assert verdict == "not judged"
    assert "failed: no memory" in why


def test_claim_is_judged_at_every_combination_it_leaves_open(write: Any, tmp_path: Path) -> None:
    axes = {"G": {"key": "data.init_args.G", "values": [1, 10]}}
    entry = {"says": "x", "source": "Table 1", "claim": "FedAvg < SCAFFOLD", "quantity": "final"}
    experiment = read_experiment(write(axes=axes, claims=[entry, {**entry, "at": {"G": 10}}]))
    values = {("1", "FedAvg"): 1.0, ("1", "SCAFFOLD"): 2.0, ("10", "FedAvg"): 4.0, ("10", "SCAFFOLD"): 3.0}
    results = results_of(Grid(experiment), tmp_path / "o", lambda cell: [values[tuple(cell.point.by_axis.values())]])
    everywhere, at_ten = (judge(claim, results) for claim in experiment.claims)
    assert [(j.where, j.verdict) for j in everywhere] == [("G 1", "holds"), ("G 10", "does not hold")]
    assert overall(everywhere) == "does not hold"
    assert len(at_ten) == 1
    along = {"says": "x", "source": "Table 1", "claim": "1 < 10", "compare": "G", "quantity": "final"}
    (claim,) = read_experiment(write(axes=axes, claims=[along])).claims
    assert [j.numbers for j in judge(claim, results)] == ["1: 1; 10: 4", "1: 2; 10: 3"]


MEANS = {
    ("1", "FedAvg"): 1.0, ("1", "SCAFFOLD"): 5.0, ("10", "FedAvg"): 6.0, ("10", "SCAFFOLD"): 3.0,
}  # fmt: skip


G = {"key": "data.init_args.G", "values": [1, 10]}
ON_AVERAGE = {"says": "x", "source": "Table 1", "claim": "FedAvg < SCAFFOLD", "quantity": "final", "mean_over": "G"}


def means(write: Any, out: Path, entry: dict[str, Any], scale: str = "full", **changes: Any) -> tuple[Any, str]:
    """Return the judgements of a claim on methods whose values depend on G, and the verdict."""
    experiment = read_experiment(write(**{"axes": {"G": G}, "claims": [entry], **changes}))
    results = results_of(
        Grid(experiment, scale), out, lambda cell: [MEANS[tuple(cell.point.by_axis.values())[-2:]]] * 3
    )
    found = judge(experiment.claims[0], results)
    return [(j.where, j.verdict, j.numbers) for j in found], "".join(pages(results, "", []))


def test_claim_about_means_averages_before_comparing(write: Any, tmp_path: Path) -> None:
    found, text = means(write, tmp_path / "o", ON_AVERAGE)
    assert found == [("mean over G 1 and 10", "holds", "FedAvg: 3.5; SCAFFOLD: 4")]
    assert "`FedAvg < SCAFFOLD` in final distance, mean over G: holds." in text
    found, _ = means(write, tmp_path / "at", {**ON_AVERAGE, "at": {"G": 10}})
    assert found == [("mean over G 10", "does not hold", "FedAvg: 6; SCAFFOLD: 3")]
    numbers = {**ON_AVERAGE, "claim": "2 * FedAvg < 7.5", "mean_over": ["G"]}
    assert means(write, tmp_path / "n", numbers)[0][0][1:] == ("holds", "2 * FedAvg: 7; 7.5")


def test_axes_not_averaged_are_judged_separately(write: Any, tmp_path: Path) -> None:
    axes = {"K": {"key": "trainer.local_steps", "values": [1, 2]}, "G": G}
    found, _ = means(write, tmp_path / "one", ON_AVERAGE, axes=axes)
    assert [where for where, _, _ in found] == ["K 1, mean over G 1 and 10", "K 2, mean over G 1 and 10"]
    found, _ = means(write, tmp_path / "both", {**ON_AVERAGE, "mean_over": ["G", "K"]}, axes=axes)
    assert found == [("mean over G 1 and 10, mean over K 1 and 2", "holds", "FedAvg: 3.5; SCAFFOLD: 4")]


def test_means_use_the_same_labels_on_every_side(write: Any, tmp_path: Path) -> None:
    skip = [{"method": "FedAvg", "G": 10}]
    found, _ = means(write, tmp_path / "gap", ON_AVERAGE, skip=skip)
    assert found == [("mean over G 1 and 10", "not judged", "the grid leaves method FedAvg out at G 10")]
    scales = {"full": {}, "small": {"departures": LESS, "axes": {"G": [1]}}}
    found, _ = means(write, tmp_path / "small", ON_AVERAGE, scale="small", scales=scales)
    assert found == [("mean over G 1", "holds", "FedAvg: 1; SCAFFOLD: 5")]


def test_mean_has_no_number_when_one_of_its_parts_has_none(write: Any, tmp_path: Path) -> None:
    entry = {**ON_AVERAGE, "claim": "SCAFFOLD < FedAvg", "quantity": "rounds to 5"}
    found, _ = means(write, tmp_path / "far", entry)  # FedAvg takes 1 round with G = 1, and more than 3 with G = 10
    assert found[0][1:] == ("holds", "SCAFFOLD: 1; FedAvg: >2")
    experiment = read_experiment(write(axes={"G": G}, claims=[ON_AVERAGE]))
    for name in ("failed", "diverged"):
        curve: dict[str, list[float] | str] = {"FedAvg": name, "SCAFFOLD": [2.0]}
        results = results_of(
            Grid(experiment),
            tmp_path / name,
            lambda cell, c=curve: [1.0] if cell.point.by_axis["G"] == "1" else c[cell.point.by_axis["method"]],
        )
        (found,) = judge(experiment.claims[0], results)
        expected = {
            "failed": ("not judged", "failed: no memory"),
            "diverged": ("does not hold", "FedAvg: diverged; SCAFFOLD: 1.5"),
        }
        assert found.verdict == expected[name][0]
        assert expected[name][1] in found.numbers


def test_claim_about_points_missing_from_a_scale_is_not_judged(write: Any, tmp_path: Path) -> None:
    scales = {"full": {}, "small": {"departures": LESS, "methods": ["FedAvg"]}}
    entry = {"says": "x", "source": "Table 1", "claim": "FedAvg < SCAFFOLD", "quantity": "final"}
    numbers = {"says": "x", "source": "Table 1", "claim": "FedAvg < 2", "quantity": "final", "scales": ["full"]}
    experiment = read_experiment(write(scales=scales, claims=[entry, numbers]))
    results = results_of(Grid(experiment, "small"), tmp_path / "o", lambda cell: [1.0])
    first, second = (judge(claim, results) for claim in experiment.claims)
    assert "has no method SCAFFOLD" in first[0].numbers
    assert "stated for the scale full" in second[0].numbers
    assert {first[0].verdict, second[0].verdict} == {"not judged"}


SEEDS = {"random": True, "seeds": 3}


@pytest.mark.parametrize(
    ("claim", "a", "b", "expected"),
    [
        ("A < B", (1.0, 1.1, 0.9), (2.0, 2.1, 1.9), "holds"),  # A is lower by 1 under every seed
        ("A < B", (1.0, 5.0, 9.0), (2.0, 6.0, 10.0), "holds"),  # the spread is due to the seeds, not the methods
        ("A < B", (1.0, 1.0, 1.0), (0.9, 1.3, 1.2), "undecided"),
        ("B < A", (1.0, 1.0, 1.0), (2.0, 2.1, 1.9), "does not hold"),
        ("A > B", (1.0, 1.0, 1.0), (0.5, 0.6, 0.4), "holds"),
        ("A < B", (1.0, 1.0, 1.0), (1.0, 1.0, 1.0), "does not hold"),
        ("A <= B", (1.0, 1.0, 1.0), (1.0, 1.0, 1.0), "holds"),
        ("A <= B", (1.0, 1.0, 1.0), (0.9, 1.3, 1.2), "undecided"),
        ("A ~ B", (1.0, 1.0, 1.0), (1.01, 1.02, 1.03), "holds"),
        ("A ~ B", (1.0, 1.0, 1.0), (0.9, 1.3, 1.2), "undecided"),
        ("A ~ B", (1.0, 1.0, 1.0), (1.9, 2.0, 2.1), "does not hold"),
        ("A < 1.05 < B", (1.0, 1.0, 1.0), (1.0, 1.3, 1.2), "undecided"),
        ("A < 0.5 < B", (1.0, 1.0, 1.0), (1.0, 1.3, 1.2), "does not hold"),
    ],
)
def test_difference_is_decided_by_students_t(
    write: Any, tmp_path: Path, claim: str, a: Any, b: Any, expected: str
) -> None:
    curves = {"A": a, "B": b}
    entry = {"says": "x", "source": "Table 1", "claim": claim, "quantity": "final"}
    experiment = read_experiment(write(methods={"A": {}, "B": {}}, claims=[entry], **SEEDS))
    results = results_of(Grid(experiment), tmp_path, lambda cell: [curves[cell.point.by_axis["method"]][cell.seed]])
    assert overall(judge(experiment.claims[0], results)) == expected


def test_single_seed_is_undecided_when_randomness_is_involved(write: Any, tmp_path: Path) -> None:
    entry = {"says": "x", "source": "Table 1", "claim": "FedAvg < SCAFFOLD", "quantity": "final"}
    experiment = read_experiment(write(claims=[entry], random=True))
    results = results_of(
        Grid(experiment), tmp_path, lambda cell: [1.0 if cell.point.by_axis["method"] == "FedAvg" else 2.0]
    )
    assert overall(judge(experiment.claims[0], results)) == "undecided"


@pytest.mark.parametrize(("reached", "expected"), [(3, "holds"), (2, "undecided")])
def test_unreached_target_decides_only_if_unreached_for_every_seed(
    write: Any, tmp_path: Path, reached: int, expected: str
) -> None:
    entry = {"says": "x", "source": "Table 1", "claim": "FedAvg < SCAFFOLD", "quantity": "rounds to 1"}
    experiment = read_experiment(write(claims=[entry], **SEEDS))

    def curve(cell: Cell) -> list[float]:
        is_late = cell.point.by_axis["method"] == "SCAFFOLD" or cell.seed >= reached
        return [2.0, 2.0] if is_late else [2.0, 1.0]

    results = results_of(Grid(experiment), tmp_path, curve)
    (found,) = judge(experiment.claims[0], results)
    assert found.verdict == (expected if reached == 3 else "undecided")
    assert found.numbers == ("FedAvg: 2; SCAFFOLD: >2" if reached == 3 else "FedAvg: >2; SCAFFOLD: >2")


def test_differences_along_an_axis_are_compared(write: Any, tmp_path: Path) -> None:
    entry = {
        "says": "x", "source": "Table 1", "claim": "FedAvg < 2 < SCAFFOLD", "quantity": "final",
        "difference": {"G": [10, 1]},
    }  # fmt: skip
    experiment = read_experiment(write(axes={"G": G}, claims=[entry], random=True, seeds=2))
    rises = {"FedAvg": 1.0, "SCAFFOLD": 3.0}

    def curve(cell: Cell) -> list[float]:
        start = 100.0 * cell.seed  # differs much more between seeds than between values of G
        return [start + (rises[cell.point.by_axis["method"]] if cell.point.by_axis["G"] == "10" else 0.0)]

    results = results_of(Grid(experiment), tmp_path, curve)
    (found,) = judge(experiment.claims[0], results)
    assert (found.verdict, found.where) == ("holds", "")
    assert found.numbers == "FedAvg: 1; 2; SCAFFOLD: 3"
    assert "`FedAvg < 2 < SCAFFOLD` in final distance, 10 minus 1: holds." in pages(results, "", [])[1]
