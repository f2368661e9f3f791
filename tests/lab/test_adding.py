"""A user's method next to those of an experiment."""

import csv
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_fed.cli.main import main
from lightning_fed.lab.adding import add_methods
from lightning_fed.lab.cell import CellRunner
from lightning_fed.lab.grid import Grid
from lightning_fed.lab.reading import read_experiment
from lightning_fed.lab.verdict import read_claims
from tests.helpers.lab import Write, of_paper
from tests.helpers.optional import needs_matplotlib

G = {"key": "data.init_args.G", "values": [1, 10]}
MINE = {"FedProx": {"trainer.algorithm": {"class_path": "lightning_fed.algorithms.FedProx", "init_args": {"mu": 1.0}}}}
ALONG = {"says": "Less G is better.", "source": "Table 1", "claim": "1 < 10", "compare": "G", "quantity": "final"}
ACROSS = {"says": "SCAFFOLD wins.", "source": "Table 1", "claim": "SCAFFOLD < FedAvg", "quantity": "final"}


def mine(folder: Path, methods: Any = MINE) -> Path:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(methods))
    return path


@pytest.mark.thorough
@needs_matplotlib
def test_only_the_added_method_runs_alongside_published_results(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = {"last": {"columns": "G", "value": "final"}}
    figures = {"curves": {"columns": "G"}}
    path = write(axes={"G": G}, claims=[ACROSS, ALONG], tables=tables, figures=figures)
    old, new = tmp_path / "published", tmp_path / "out"
    main(["reproduce", str(path), "--jobs", "0", "--out", str(old)])
    ran: list[str] = []
    original = CellRunner.run

    def noting(self: CellRunner, config: Any, *more: Any) -> None:
        ran.append(config["trainer"]["algorithm"]["class_path"])
        original(self, config, *more)

    monkeypatch.setattr(CellRunner, "run", noting)
    args = ["reproduce", str(path), "--jobs", "0", "--add", str(mine(tmp_path)), "--published", str(old), "--out"]
    main([*args, str(new)])
    assert ran == ["lightning_fed.algorithms.FedProx"] * 2
    text = (new / "tiny.md").read_text()
    assert text.startswith("# Two quadratics, with FedProx\n")
    assert "lightning-fed reproduce tiny.yaml --add mine.yaml --published PUBLISHED" in text
    for line in (old / "tiny.md").read_text().splitlines():
        if line.startswith(("| FedAvg", "| SCAFFOLD", "| [1]", "| [2]")):
            assert line in text
    (row,) = (line for line in text.splitlines() if line.startswith("| FedProx |"))
    assert row.count("|") == 4
    assert read_claims(new / "claims.csv") == read_claims(old / "claims.csv")
    published, merged = (list(csv.DictReader((folder / "tiny_cells.csv").open())) for folder in (old, new))
    assert [cell["settings"] for cell in merged if "FedProx" not in cell["name"]] == [c["settings"] for c in published]
    with pytest.raises(SystemExit, match="--add would replace what is published in .*published"):
        main([*args, str(old)])


def test_method_is_added_to_scales_and_figures_that_list_methods(write: Write, tmp_path: Path) -> None:
    less = [{"what": "methods", "paper": "2", "here": "one", "why": "it is quicker"}]
    scales = {"full": {}, "small": {"departures": less, "methods": ["FedAvg"]}}
    tables = {"some": {"value": "final", "at": {"method": ["FedAvg"]}}, "one": {"rows": "G", "value": "final"}}
    experiment = read_experiment(
        write(scales=scales, axes={"G": G}, tables={**tables, "one": {**tables["one"], "at": {"method": "FedAvg"}}})
    )
    added = add_methods(experiment, mine(tmp_path))
    assert Grid(added, "small").labels["method"] == ("FedAvg", "FedProx")
    assert Grid(added).labels["method"] == ("FedAvg", "SCAFFOLD", "FedProx")
    assert [table.at["method"] for table in added.tables] == [("FedAvg", "FedProx"), ("FedAvg",)]


def test_published_cells_keep_their_settings(tmp_path: Path) -> None:
    experiment = of_paper("mime_fig3")
    grid, added = Grid(experiment, "part"), Grid(add_methods(experiment, mine(tmp_path)), "part")
    for point in grid.points:
        assert point in added.points
        for cell in grid.cells(point, grid.tuned(point)[0], range(1)):
            assert added.config(cell) == grid.config(cell)


def test_duplicate_name_and_invalid_method_are_rejected(write: Write, tmp_path: Path) -> None:
    experiment = read_experiment(write())
    for methods, message in (
        ({"FedAvg": {}}, "tiny has a method 'FedAvg'"),
        ({"Mine": {"algorithm": "x"}}, "there is no key 'algorithm'"),
        ({"Mine": 3}, "must be a mapping"),
        ({}, "name at least one method, such as Mine"),
    ):
        with pytest.raises(ValueError, match=message):
            add_methods(experiment, mine(tmp_path, methods))
