"""Figures and tables that would show several points of a grid in one place."""

from pathlib import Path

import pytest

from lightning_fed import FederatedError
from lightning_fed.cli.main import main
from lightning_fed.lab.checking import check_outputs
from lightning_fed.lab.grid import Grid
from lightning_fed.lab.reading import read_experiment
from tests.helpers.lab import Write
from tests.lab.conftest import LESS


def test_figure_that_hides_points_is_rejected(write: Write, tmp_path: Path) -> None:
    axes = {"G": {"key": "data.init_args.G", "values": [1, 10]}}
    with pytest.raises(SystemExit, match="does not use the axis G with the labels 1, 10"):
        main(["reproduce", str(write(axes=axes, figures={"f": {}})), "--out", str(tmp_path / "out")])


def test_figures_and_tables_must_use_every_axis_and_have_cells(write: Write) -> None:
    axes = {"G": {"key": "data.init_args.G", "values": [1, 10]}}
    for outputs in (
        {"figures": {"f": {"columns": "G"}}},
        {"figures": {"f": {"at": {"G": 1}}}},
        {"tables": {"t": {"value": "final", "columns": "G"}}},
    ):
        check_outputs(Grid(read_experiment(write(axes=axes, **outputs))))
    hiding = {
        "tables.t does not use the axis G with the labels 1, 10": {"tables": {"t": {"value": "final"}}},
        "figures.f does not use the axis method with the labels FedAvg, SCAFFOLD": {"figures": {"f": {"lines": "G"}}},
    }
    for message, outputs in hiding.items():
        with pytest.raises(FederatedError, match=message):
            check_outputs(Grid(read_experiment(write(axes=axes, **outputs))))
    scales = {"full": {}, "small": {"departures": LESS, "methods": ["FedAvg"]}}
    experiment = read_experiment(write(scales=scales, figures={"f": {"at": {"method": "SCAFFOLD"}}}))
    with pytest.raises(FederatedError, match="figures.f: the scale small has none of its cells"):
        check_outputs(Grid(experiment, "small"))
