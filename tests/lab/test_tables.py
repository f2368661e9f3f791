"""Tables of results."""

import csv
from pathlib import Path
from typing import Any

from lightning_fed.lab.grid import Grid
from lightning_fed.lab.page import pages
from lightning_fed.lab.reading import read_experiment
from lightning_fed.lab.tables import markdown, rows_of, write_choices, write_series
from tests.helpers.lab import Write, results_of

G = {"key": "data.init_args.G", "values": [1, 10]}


def test_tables_show_paper_numbers_next_to_ours(write: Any, tmp_path: Path) -> None:
    tables = {"last": {"rows": "method", "columns": "G", "value": ["final", "best"], "paper": {"FedAvg": {10: 4.25}}}}
    experiment = read_experiment(write(axes={"G": G}, tables=tables))
    results = results_of(Grid(experiment), tmp_path, lambda _: [1.5])
    assert "| FedAvg | 1.5 | 1.5 | 1.5 (paper 4.25) | 1.5 |" in pages(results, "", [])[0]


def test_choices_and_curves_of_all_cells_are_written(write: Write, tmp_path: Path) -> None:
    results = results_of(Grid(read_experiment(write(seeds=2))), tmp_path / "o", lambda cell: [1.0, float(cell.seed)])
    write_series(tmp_path / "series.csv", results)
    head, *rows = csv.reader((tmp_path / "series.csv").read_text().splitlines())
    assert head == ["method", "seed", "chosen", "status", "round", "val_distance"]
    assert len(rows) == 2 * 2 * 2
    assert ["FedAvg", "1", "yes", "finished", "2", "1.0"] in rows
    write_choices(tmp_path / "choices.csv", results)
    assert (tmp_path / "choices.csv").read_text().strip() == ""  # nothing is tuned


def test_table_cell_is_empty_when_the_grid_has_no_such_point(write: Write, tmp_path: Path) -> None:
    tables = {"last": {"columns": "G", "value": "final"}}
    experiment = read_experiment(write(axes={"G": G}, tables=tables, skip=[{"method": "FedAvg", "G": 10}]))
    head, rows = rows_of(experiment.tables[0], results_of(Grid(experiment), tmp_path, lambda _: [1.5]))
    assert (head, rows) == (["method", "G 1", "G 10"], [["FedAvg", "1.5", ""], ["SCAFFOLD", "1.5", "1.5"]])
    assert markdown(head, [["a|b", "1", ""]]).splitlines()[-1] == "| a/b | 1 |  |"
