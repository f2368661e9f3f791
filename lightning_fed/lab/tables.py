"""Tables of results, as Markdown and as CSV."""

import csv
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from lightning_fed.lab.experiment import Label, Table
from lightning_fed.lab.grid import Point
from lightning_fed.lab.numbers import format_number
from lightning_fed.lab.results import Estimate, Results
from lightning_fed.lab.selections import is_within


@dataclass(frozen=True)
class TableCell:
    """A nonempty cell of a table.

    Args:
        point: The point of the grid.
        estimate: The quantity there.
        paper: The paper's number; None if it gives none.
    """

    point: Point
    estimate: Estimate
    paper: float | None

    def __str__(self) -> str:
        """Show our number, and the paper's."""
        number = (
            "" if self.paper is None else f" (paper {format_number(self.paper, self.estimate.quantity.is_percent)})"
        )
        return f"{self.estimate}{number}"


def rows_of(table: Table, results: Results) -> tuple[list[str], list[list[str]]]:
    """Return heading and rows of a table: quantities with mean and deviation over seeds.

    Args:
        table: The table's description.
        results: The finished cells.
    """
    heads, rows = cells_of(table, results)
    return [*table.rows, *heads], [
        [*labels, *("" if cell is None else str(cell) for cell in cells)] for labels, cells in rows
    ]


def cells_of(
    table: Table, results: Results
) -> tuple[list[str], list[tuple[tuple[Label, ...], list[TableCell | None]]]]:
    """Return the headings of a table's columns, and its rows: their labels and their cells."""
    points = [point for point in results.grid.points if is_within(point.by_axis, table.at)]
    columns = [None] if table.columns is None else _labels(points, table.columns)
    heads = [
        " ".join(filter(None, (column and _head(table.columns, column), value.label if _names_value(table) else "")))
        for column, value in product(columns, table.values)
    ]
    rows = []
    for labels in dict.fromkeys(tuple(point.by_axis[axis] for axis in table.rows) for point in points):
        cells = []
        for column, value in product(columns, table.values):
            wanted = dict(zip(table.rows, labels, strict=True)) | ({table.columns: column} if column else {})
            found = next((p for p in points if all(p.by_axis[a] == label for a, label in wanted.items() if a)), None)
            number = table.paper.get((*labels, *([column] if column else []))) if value == table.values[0] else None
            cells.append(None if found is None else TableCell(found, results.estimate(found, value), number))
        rows.append((labels, cells))
    return heads, rows


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown.

    Example:
        >>> print(markdown(["method", "final"], [["FedAvg", "0.8"]]))
        | method | final |
        | --- | --- |
        | FedAvg | 0.8 |
    """
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines)


def write_series(path: Path, results: Results) -> None:
    """Write every logged value of every round of every finished cell: a row per cell and round."""
    cells = [(cell, record) for cell in results.asked() if (record := results.record(cell)) is not None]
    tags = sorted({tag for _, record in cells for tag in record.series})
    axes = list(results.grid.axes)
    tuned = list(dict.fromkeys(name for cell, _ in cells for name, _ in cell.tuned))
    chosen = {cell for point in results.grid.points for cell in results.cells(point)}
    rows = (
        {
            **cell.point.by_axis,
            **dict(cell.tuned),
            "seed": str(cell.seed),
            "chosen": "yes" if cell in chosen else "",
            "status": record.status,
            "round": str(number),
            **{tag: repr(record.series[tag][number]) for tag in record.series if number in record.series[tag]},
        }
        for cell, record in cells
        for number in sorted({n for curve in record.series.values() for n in curve})
    )
    _write(path, [*axes, *tuned, "seed", "chosen", "status", "round", *tags], rows)


def write_choices(path: Path, results: Results) -> None:
    """Write every tuned combination of every point, with its score and whether it was chosen."""
    rows = results.choice_rows()
    _write(path, list(dict.fromkeys(key for row in rows for key in row)), rows)


def _write(path: Path, head: Sequence[str], rows: Iterable[Mapping[str, str]]) -> None:
    """Write a CSV file atomically."""
    work = path.with_name(f".{path.name}")
    with work.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, head, restval="")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(work, path)


def _labels(points: Iterable[Point], axis: str) -> list[Label]:
    return list(dict.fromkeys(point.by_axis[axis] for point in points))


def _head(axis: str | None, label: Label) -> str:
    return label if axis == "method" else f"{axis} {label}"


def _names_value(table: Table) -> bool:
    """Return whether the columns of a table must name their quantity."""
    return table.columns is None or len(table.values) > 1
