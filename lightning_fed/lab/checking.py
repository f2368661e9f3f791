"""Refuse figures and tables that would show several grid points in one place, before anything runs."""

from collections.abc import Iterable

from lightning_fed.core.errors import FederatedError
from lightning_fed.lab.experiment import Selection
from lightning_fed.lab.grid import Grid
from lightning_fed.lab.selections import is_within


def check_outputs(grid: Grid) -> None:
    """Refuse figures and tables that leave an axis of the grid open, and those that show nothing.

    Raises:
        FederatedError: If one does. The message names the axis and its labels.
    """
    experiment = grid.experiment
    for figure in experiment.figures:
        used = {figure.rows, figure.columns, figure.lines, figure.x}
        _check(grid, f"{experiment.file}: figures.{figure.name}", used, figure.at)
    for table in experiment.tables:
        _check(grid, f"{experiment.file}: tables.{table.name}", {*table.rows, table.columns}, table.at)


def _check(grid: Grid, where: str, used: Iterable[str | None], at: Selection) -> None:
    used = set(used)
    points = [point for point in grid.points if is_within(point.by_axis, at)]
    if not points:
        raise FederatedError(f"{where}: the scale {grid.scale.name} has none of its cells.")
    for axis in grid.axes:
        labels = dict.fromkeys(point.by_axis[axis] for point in points)
        if axis not in used and len(labels) > 1:
            raise FederatedError(
                f"{where} does not use the axis {axis} with the labels {', '.join(labels)}. Name the axis in"
                " rows, columns or lines, or one label in `at`."
            )
