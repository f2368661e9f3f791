"""Figures and tables in an experiment's file."""

from typing import Any

from lightning_fed.lab.outputs import read_figures, read_tables
from lightning_fed.lab.quantities import Metric
from tests.helpers.lab import Write, check_mistakes

MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"figures": {"f": {"y": "val_dist"}}}, "Did you mean 'val_distance'"),
    ({"figures": {"f": {"columns": "nothing"}}}, "no axis 'nothing'"),
    ({"figures": {"f": {"columns": "method"}}}, "must be different axes"),
    ({"figures": {"f": {"log": ["z"]}}}, "log must be"),
    ({"figures": {"f": {"ylim": [1, 0]}}}, "two rising numbers"),
    ({"figures": {"f": {"x": "time"}}}, "no x 'time'"),
    ({"figures": {"a/b": {}}}, "letters, digits"),
    ({"tables": {"t": {"value": "final", "rows": "G"}}}, "no axis 'G'"),
    ({"tables": {"t": {"value": "final", "paper": {"FedAv": 1}}}}, "no label of method 'FedAv'"),
    ({"tables": {"t": {"value": "final", "paper": {"FedAvg": "1"}}}}, "the paper's number must be a finite number"),
    ({"figures": {"f": {"y": []}}}, r"figures.f.y must name at least one; found \[\]"),
    ({"tables": {"t": {"value": []}}}, r"tables.t.value must name at least one; found \[\]"),
    ({"tables": {"t": {"value": "final", "rows": ["method", "method"]}}}, "rows and columns must be different axes"),
    ({"tables": {"t": {"value": "final", "columns": "method"}}}, "rows and columns must be different axes"),
    ({"figures": {"f": {"marks": [{"at": {"method": "FedAvg"}}]}}}, r"marks\[1\] lacks y"),
    ({"figures": {"f": {"kind": "paths", "log": "y"}}}, r"figures.f \(kind: paths\): there is no key 'log'"),
    ({"figures": {"f": {"rounds": 2}}}, "figures.f: there is no key 'rounds'"),
    ({"figures": {"f": {"kind": "lines"}}}, "figures.f: kind can only be paths; found 'lines'"),
]


def test_invalid_outputs_are_rejected(write: Write) -> None:
    check_mistakes(write, MISTAKES)


LABELS = {"G": ("1", "10"), "method": ("FedAvg", "SCAFFOLD")}
DISTANCE = {"val_distance": Metric("val_distance", "min", "distance")}


def test_figure_defaults_to_curves_by_method() -> None:
    plain, by_axis = read_figures(
        "figures", {"a": {}, "b": {"x": "G", "y": "final", "log": "x", "ylim": [0, 2]}}, LABELS, DISTANCE
    )
    assert (plain.kind, plain.x, plain.lines, plain.y) == ("curves", "rounds", "method", tuple(DISTANCE.values()))
    assert (by_axis.kind, by_axis.x, by_axis.log, by_axis.ylim) == ("quantity", "G", ("x",), (0.0, 2.0))
    assert [quantity.text for quantity in by_axis.y] == ["final"]


def test_table_rows_default_to_methods() -> None:
    found = {
        "a": {"value": "final"},
        "b": {"value": ["final", "best"], "columns": "G", "paper": {"FedAvg": {10: 4.25}}},
    }
    plain, wide = read_tables("tables", found, LABELS, DISTANCE)
    assert (plain.rows, plain.columns, plain.paper) == (("method",), None, {})
    assert ([value.text for value in wide.values], wide.columns) == (["final", "best"], "G")
    assert wide.paper == {("FedAvg", "10"): 4.25}
