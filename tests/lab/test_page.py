"""The pages of an experiment: the result first, and at most 150 lines."""

from pathlib import Path
from typing import Any

from lightning_fed.lab.grid import Grid
from lightning_fed.lab.page import pages
from lightning_fed.lab.published import PublishedCells, publish
from lightning_fed.lab.reading import read_experiment
from lightning_fed.lab.results import Results
from tests.helpers.lab import results_of

LESS = [{"what": "rounds", "paper": "3", "here": "one", "why": "it is quicker"}]


def test_full_scale_is_stated_only_without_departures(write: Any, tmp_path: Path) -> None:
    for number, (changes, scale, is_full) in enumerate(
        [({}, "full", True), ({"departures": LESS}, "full", False), ({}, "small", False)]
    ):
        results = results_of(Grid(read_experiment(write(**changes)), scale), tmp_path / str(number), lambda _: [1.0])
        text, _ = pages(results, "", [])
        assert ("At full scale." in text) == is_full
        assert ("| rounds | 3 | one | it is quicker |" in text) == (not is_full)


def test_page_starts_with_its_result_and_defines_its_terms(write: Any, tmp_path: Path) -> None:
    entry = {"says": "So it is.", "source": "Table 1", "claim": "FedAvg < SCAFFOLD", "quantity": "setbacks"}
    experiment = read_experiment(
        write(claims=[entry], tables={"last": {"value": "final"}}, departures=LESS, notes="A word.")
    )
    page, details = pages(results_of(Grid(experiment), tmp_path, lambda _: [1.0, 2.0]), "the command", ["a.png"])
    order = ["# Two quadratics", "**setbacks**", "So it is.", "a.png", "## Departures", "## Last", "    the command"]
    places = [page.index(part) for part in order]
    assert places == sorted(places)
    assert "Cite this page as:" in page
    assert "A word." not in page
    assert details.endswith("## What the paper leaves open\n\nA word.\n")


def test_sections_beyond_150_lines_move_to_the_details_page(write: Any, tmp_path: Path) -> None:
    axes = {"G": {"key": "data.init_args.G", "values": list(range(1, 100))}}
    tables = {"all": {"rows": ["G", "method"], "value": "final"}, "few": {"value": "final", "at": {"G": 1}}}
    experiment = read_experiment(write(axes=axes, tables=tables))
    page, details = pages(results_of(Grid(experiment), tmp_path, lambda _: [1.0]), "", [])
    assert len(page.splitlines()) <= 150
    assert "## Few" in page
    assert "## All" in details
    assert "## All" not in page


def test_second_selection_rule_is_shown_alongside_the_first(write: Any, tmp_path: Path) -> None:
    def curve(cell: Any) -> list[float]:
        if cell.point.by_axis["method"] == "SCAFFOLD":
            return [2.0, 2.0, 1.8]
        return [1.0, 3.0, 2.0] if cell.tuned[0][1] == "0.1" else [4.0, 4.0, 1.5]

    entry = {"says": "So it is.", "source": "Table 1", "claim": "FedAvg < SCAFFOLD", "quantity": "final"}
    tune = {"by": "final", "grid": {"lr": {"key": "model.init_args.lr", "values": [0.1, 0.2]}}}
    for also, text in (
        ("best", "| FedAvg | lr 0.2 | lr 0.1 | 1.5 | 2 |"),
        ("best", "| 1 | `FedAvg < SCAFFOLD` | holds | does not hold |"),
        ("last 1", "chooses the same values at all 2 rows.\n\nNo verdict changes"),
    ):
        experiment = read_experiment(write(claims=[entry], tune=tune, scales={"full": {"also_by": also}}))
        results = results_of(Grid(experiment), tmp_path / also / str(len(text)), curve)
        page, _ = pages(results, "", [])
        assert text in page, page
        assert len(list(results.asked())) == 4
        publish(results, tmp_path)
        assert pages(Results(results.grid, PublishedCells(results.grid, tmp_path)), "", [])[0] == page


def test_page_states_whether_a_seed_draws_the_data(write: Any, tmp_path: Path) -> None:
    entry = {"says": "So it is.", "source": "Table 1", "claim": "FedAvg < SCAFFOLD", "quantity": "final"}
    for value, expected in (
        (1.0, "the data and their division are the same for all"),
        ("per_seed", "A seed draws the data"),
    ):
        base = {"data.init_args.G": value}
        methods = {"FedAvg": base, "SCAFFOLD": base}
        experiment = read_experiment(write(methods=methods, claims=[entry], random=True, seeds=2))
        text, _ = pages(results_of(Grid(experiment), tmp_path / str(value), lambda _: [1.0]), "", [])
        assert expected in text
