"""The verdict on an experiment, as its page states it."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_fed.lab.claims import judge
from lightning_fed.lab.grid import Grid
from lightning_fed.lab.reading import read_experiment
from lightning_fed.lab.verdict import means, verdict
from tests.helpers.lab import Write, results_of, run


@pytest.mark.thorough
def test_cells_recorded_without_cpu_time_count_with_their_wall_time(write: Write, tmp_path: Path) -> None:
    run(write(), tmp_path / "out")
    files = sorted((tmp_path / "out" / "cells").glob("*/cell.json"))

    def means_with(times: list[dict[str, float]]) -> str:
        for file, kept in zip(files, times, strict=True):
            about = json.loads(file.read_text())
            about = {name: value for name, value in about.items() if "seconds" not in name}
            file.write_text(json.dumps(about | kept))
        results, ran = run(write(), tmp_path / "out")
        assert ran == []
        return means(results)[0]

    new, old = {"seconds": 100.4, "cpu_seconds": 7.2}, {"seconds": 130.4}
    assert means_with([new, new]) == "2 cells, 14 seconds of CPU time in all; nothing depends on a seed."
    assert (
        means_with([new, old])
        == "2 cells, 7 seconds of CPU time, and 130 seconds of wall time for 1 of them; nothing depends on a seed."
    )
    assert means_with([old, old]) == "2 cells, 261 seconds of wall time in all; nothing depends on a seed."


LESS = [{"what": "rounds", "paper": "3", "here": "one", "why": "it is quicker"}]
SEEDS = {"random": True, "seeds": 3}


def test_a_paired_difference_is_told_with_its_standard_error(write: Any, tmp_path: Path) -> None:
    curves = {"FedAvg": (1.0, 1.1, 0.9), "SCAFFOLD": (2.0, 2.3, 2.0)}
    entry = {"says": "x", "source": "Table 1", "claim": "FedAvg < SCAFFOLD", "quantity": "final", "paper": "1 < 2"}
    experiment = read_experiment(write(claims=[entry], **SEEDS))
    results = results_of(Grid(experiment), tmp_path, lambda cell: [curves[cell.point.by_axis["method"]][cell.seed]])
    text = verdict(results, "", [])
    assert "- x (Table 1)" in text
    assert "in final distance: holds. The paper: 1 < 2." in text
    assert "1 < 2.1; difference -1.1, standard error 0.05774" in text


def test_controls_are_judged_below_their_claim_and_not_counted(write: Any, tmp_path: Path) -> None:
    control = {"says": "Not with ten times the gradients.", "claim": "SCAFFOLD < FedAvg", "quantity": "final"}
    entry = {"says": "x", "source": "Table 1", "claim": "FedAvg < SCAFFOLD", "quantity": "final", "controls": [control]}
    experiment = read_experiment(write(claims=[entry]))
    results = results_of(
        Grid(experiment), tmp_path, lambda cell: [1.0 if cell.point.by_axis["method"] == "FedAvg" else 2.0]
    )
    text = verdict(results, "", [])
    assert "Of 1 claim: 1 hold." in text
    assert (
        "  Control: Not with ten times the gradients.\n  `SCAFFOLD < FedAvg` in final distance: **does not hold**."
        in text
    )


def test_at_full_scale_is_said_only_without_departures(write: Any, tmp_path: Path) -> None:
    for number, (changes, scale, is_full) in enumerate(
        [({}, "full", True), ({"departures": LESS}, "full", False), ({}, "small", False)]
    ):
        results = results_of(Grid(read_experiment(write(**changes)), scale), tmp_path / str(number), lambda _: [1.0])
        text = verdict(results, "", [])
        assert ("At full scale." in text) == is_full
        assert ("| rounds | 3 | one | it is quicker |" in text) == (not is_full)


def test_a_metric_in_percent_is_so_everywhere(write: Any, tmp_path: Path) -> None:
    metrics = {"val_distance": {"mode": "max", "label": "accuracy", "percent": True}}
    entry = {"says": "x", "source": "Table 1", "claim": "FedAvg > 55", "quantity": "final"}
    costs = {**entry, "claim": "FedAvg < 3", "quantity": "rounds to 60"}
    experiment = read_experiment(write(metrics=metrics, claims=[entry, costs], tables={"last": {"value": "best"}}))
    results = results_of(Grid(experiment), tmp_path, lambda _: [0.5, 0.625, 0.6])
    assert [judge(claim, results)[0].numbers for claim in experiment.claims] == ["60 > 55", "2 < 3"]
    assert "| FedAvg | 62.5 |" in verdict(results, "", [])
