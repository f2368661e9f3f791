"""Add the user's methods to an experiment. Its claims still cover only its own methods."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from lightning_fed.core.errors import FederatedError
from lightning_fed.lab.axes import read_labels
from lightning_fed.lab.experiment import METHOD, Axis, Claim, Experiment, Figure, Label, Selection, Table
from lightning_fed.lab.grid import Cell
from lightning_fed.lab.records import Record
from lightning_fed.lab.results import Cells
from lightning_fed.lab.yaml_files import read_yaml

_Part = TypeVar("_Part", Figure, Table)


def add_methods(experiment: Experiment, path: Path) -> Experiment:
    """Return an experiment with further methods, at every scale and in every figure and table of methods.

    Args:
        experiment: The experiment.
        path: A file of labels with overrides, in the format of an experiment's ``methods``.

    Raises:
        FederatedError: If the file has another format or names no method, or a label is taken.
    """
    new = read_labels(str(path), METHOD, read_yaml(path))
    if not new.choices:
        raise FederatedError(f"{path}: name at least one method, such as Mine: {{trainer.algorithm: my_package.Mine}}.")
    old = experiment.axes[METHOD]
    for label in new.choices:
        if label in old.choices:
            raise FederatedError(f"{path}: {experiment.name} has a method {label!r}. Give yours another name.")
    scales = {
        name: replace(scale, axes={**scale.axes, METHOD: _joined(scale.axes[METHOD], Axis(METHOD, _empty(new)))})
        if METHOD in scale.axes
        else scale
        for name, scale in experiment.scales.items()
    }
    labels, added = tuple(old.choices), tuple(new.choices)
    return replace(
        experiment,
        title=f"{experiment.title}, with {' and '.join(added)}",
        axes={**experiment.axes, METHOD: _joined(old, new)},
        scales=scales,
        figures=tuple(_extended(figure, (figure.lines, figure.rows, figure.columns, figure.x), labels, added)
                      for figure in experiment.figures),
        tables=tuple(_extended(table, (*table.rows, table.columns), labels, added) for table in experiment.tables),
        claims=tuple(_restricted(claim, labels) for claim in experiment.claims),
        added=path.name,
    )  # fmt: skip


def _joined(old: Axis, new: Axis) -> Axis:
    return replace(old, choices={**old.choices, **new.choices}, tune={**old.tune, **new.tune})


def _empty(axis: Axis) -> Mapping[Label, Mapping[str, object]]:
    return {label: {} for label in axis.choices}


def _extended(part: _Part, axes: tuple[str | None, ...], old: tuple[Label, ...], new: tuple[Label, ...]) -> _Part:
    """Add the new methods to a figure or table with an axis of methods, or restrict it to the old ones."""
    if METHOD in axes:
        at: Selection = {**part.at, METHOD: (*part.at[METHOD], *new)} if METHOD in part.at else part.at
    else:
        at = {METHOD: old, **part.at}
    return replace(part, at=at)


def _restricted(claim: Claim, old: tuple[Label, ...]) -> Claim:
    """Return a claim restricted to the original methods."""
    is_open = claim.compare != METHOD and (claim.difference is None or claim.difference.axis != METHOD)
    at = {METHOD: old, **claim.at} if is_open else claim.at
    return replace(claim, at=at, controls=tuple(_restricted(control, old) for control in claim.controls))


class EitherCells:
    """Cells from several places. The first place that has a cell provides it.

    Args:
        *places: The places, such as published cells and a store.
    """

    def __init__(self, *places: Cells) -> None:
        self._places = places

    def record(self, cell: Cell) -> Record | None:
        """Return a cell's record; None if no place has it."""
        return next((found for place in self._places if (found := place.record(cell)) is not None), None)

    def failure(self, cell: Cell) -> str | None:
        """Return the cause of a cell's failure, or None if it did not fail or was not run."""
        return next((cause for place in self._places if (cause := place.failure(cell)) is not None), None)
