"""Tables in LaTeX."""

from pathlib import Path
from typing import Any

from lightning_fed.lab.grid import Cell, Grid
from lightning_fed.lab.latex import latex
from lightning_fed.lab.reading import read_experiment
from tests.helpers.lab import results_of

METRICS = {"val_distance": {"mode": "max", "label": "test accuracy", "percent": True}}
G = {"key": "data.init_args.G", "values": [1, 10]}
VALUES = {("1", "FedAvg"): 0.5, ("1", "SCAFFOLD"): 0.625, ("10", "FedAvg"): 0.75, ("10", "SCAFFOLD"): 0.375}


def curve(cell: Cell) -> list[float]:
    return [VALUES[tuple(cell.point.by_axis.values())] + 0.01 * (cell.seed - 1)]


def test_best_method_is_bold_and_deviations_are_rounded(write: Any, tmp_path: Path) -> None:
    tables = {
        "rows_are_methods": {"columns": "G", "value": "final", "paper": {"FedAvg": {10: 82.8}}},
        "columns_are_methods": {"rows": "G", "columns": "method", "value": ["final", "rounds to 60"]},
    }
    experiment = read_experiment(write(axes={"G": G}, tables=tables, metrics=METRICS, random=True, seeds=3))
    results = results_of(Grid(experiment), tmp_path / "o", curve)
    first, second = (latex(table, results) for table in experiment.tables)
    assert first.splitlines()[1:] == [
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"method & G 1 & G 10 \\",
        r"\midrule",
        r"FedAvg & 50.00 $\pm$ 1.00 & \textbf{75.00 $\pm$ 1.00} (paper 82.80) \\",
        r"SCAFFOLD & \textbf{62.50 $\pm$ 1.00} & 37.50 $\pm$ 1.00 \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    assert first.startswith(
        "% Two quadratics: rows_are_methods, at the scale full; mean and sample standard deviation over 3"
    )
    assert r"1 & 50.00 $\pm$ 1.00 & $>$1 & \textbf{62.50 $\pm$ 1.00} & 1 $\pm$ 0 \\" in second


def test_latex_special_characters_are_escaped(write: Any, tmp_path: Path) -> None:
    methods: dict[str, Any] = {"50 % of_all": {}, "μ = 1 & #2": {}}
    experiment = read_experiment(write(methods=methods, tables={"last": {"value": "final"}}))
    text = latex(experiment.tables[0], results_of(Grid(experiment), tmp_path / "o", lambda _: [1.0]))
    assert r"50 \% of\_all & \textbf{1} \\" in text
    assert r"$\mu$ = 1 \& \#2 & \textbf{1} \\" in text
