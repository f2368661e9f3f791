"""The paths of clients within rounds in a figure."""

import json
from pathlib import Path

import pytest

from lightning_fed import FederatedError
from lightning_fed.cli.main import main
from lightning_fed.lab.grid import Grid
from lightning_fed.lab.paths import draw_paths
from lightning_fed.lab.reading import read_experiment
from tests.helpers.lab import Write, results_of
from tests.helpers.optional import needs_matplotlib


@needs_matplotlib
@pytest.mark.thorough
def test_client_paths_are_drawn(write: Write, tmp_path: Path) -> None:
    base = {
        "model": {
            "class_path": "lightning_fed.models.LinearRegression",
            "init_args": {"in_features": 2, "bias": False},
        },
        "data": {"class_path": "lightning_fed.data.LeastSquares", "init_args": {"num_clients": 2, "dim": 2}},
        "trainer": {"max_rounds": 2, "local_steps": 3, "precision": "64-true"},
    }
    keep = {"trainer.callbacks": [{"class_path": "lightning_fed.callbacks.LocalIterates"}]}
    figures = {"paths": {"kind": "paths", "rounds": 2}}
    wanted = {"base": base, "metrics": {"val_loss": {"mode": "min"}}, "figures": figures}
    main(["reproduce", str(write(methods={"FedAvg": keep}, **wanted)), "--out", str(tmp_path / "out"), "--jobs", "0"])
    assert (tmp_path / "out" / "tiny_paths.png").stat().st_size > 5_000
    (cell,) = (tmp_path / "out" / "cells").glob("*/cell.json")
    rows = (cell.parent / "iterates" / "round_000001.csv").read_text().splitlines()
    assert rows[0] == "client,step,x0,x1"
    assert len(rows) == 1 + 2 * 4 + 2
    assert json.loads(cell.read_text())["status"] == "finished"
    with pytest.raises(SystemExit, match="put lightning_fed.callbacks.LocalIterates among"):
        main(["reproduce", str(write(methods={"FedAvg": {}}, **wanted)), "--out", str(tmp_path / "o"), "--jobs", "0"])


ITERATES = "client,step,x0\n0,0,1.0\n0,1,0.5\n1,0,1.0\n1,1,2.0\n1,2,3.0\nserver,0,1.0\nserver,1,1.75\n"


@needs_matplotlib
def test_single_parameter_paths_are_drawn_against_the_local_step(write: Write, tmp_path: Path) -> None:
    figures = {"paths": {"kind": "paths", "rounds": 2, "ylim": [0, 4]}}
    experiment = read_experiment(write(methods={"FedAvg": {}}, figures=figures))
    results = results_of(Grid(experiment), tmp_path, lambda _: [1.0])
    (record,) = results.records(results.grid.points[0])
    (record.folder / "iterates").mkdir()
    (record.folder / "iterates" / "round_000001.csv").write_text(ITERATES)
    with pytest.raises(FederatedError, match="needs iterates/round_000002.csv of every cell .*LocalIterates among"):
        draw_paths(experiment.figures[0], results)
    (record.folder / "iterates" / "round_000002.csv").write_text(ITERATES)
    (axes,) = draw_paths(experiment.figures[0], results).axes
    lines = [(line.get_label(), list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()]
    assert lines == [
        ("client 0", [0, 1], [1.0, 0.5]), ("client 1", [0, 1, 2], [1.0, 2.0, 3.0]), ("server", [0, 2], [1.0, 1.75]),
        ("client 0", [2, 3], [1.0, 0.5]), ("client 1", [2, 3, 4], [1.0, 2.0, 3.0]), ("server", [2, 4], [1.0, 1.75]),
    ]  # fmt: skip
    assert axes.get_ylim() == (0, 4)
