"""The cells of an experiment at a scale: the points of the grid, and the configuration of each cell."""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from lightning_fed.core.errors import FederatedError
from lightning_fed.lab.axes import make_tune_axis, revise
from lightning_fed.lab.experiment import Axis, Experiment, Label, Scale
from lightning_fed.lab.overlays import Config, overlay
from lightning_fed.lab.selections import is_within
from lightning_fed.lab.yaml_files import unknown

DEFAULTS: Config = {"trainer": {"engine": "auto", "accelerator": "cpu", "max_update_ratio": None}}
"""A cell's defaults. ``max_update_ratio`` is off: next to a client at its optimum, other updates look too large."""


PER_SEED = "per_seed"
"""A placeholder for the cell's seed. With it, each seed also draws other data."""


@dataclass(frozen=True)
class Point:
    """A combination of labels, one for each axis.

    Args:
        labels: Axis and label, in the order of the axes.
    """

    labels: tuple[tuple[str, Label], ...]

    @cached_property
    def by_axis(self) -> dict[str, Label]:
        """The labels by axis."""
        return dict(self.labels)

    def __str__(self) -> str:
        """Show the labels."""
        return name_of(self.labels)


@dataclass(frozen=True)
class Cell:
    """One run of a grid.

    Args:
        point: Its point of the grid.
        tuned: Name and label of each tuned value.
        seed: Its seed.
    """

    point: Point
    tuned: tuple[tuple[str, Label], ...]
    seed: int

    def __str__(self) -> str:
        """Show labels, tuned values and seed."""
        return name_of((*self.point.labels, *self.tuned, ("seed", str(self.seed))))


class Grid:
    """An experiment at one scale.

    Args:
        experiment: The experiment.
        scale: The name of the scale.
        seeds: The number of seeds; None for the scale's, or else the experiment's.
        accelerator: The accelerator that trains every cell, in place of the file's.

    Raises:
        FederatedError: If the scale is unknown, nothing is left of the grid, or an override does not fit.
    """

    def __init__(
        self, experiment: Experiment, scale: str = "full", seeds: int | None = None, accelerator: str | None = None
    ) -> None:
        if scale not in experiment.scales:
            raise unknown(f"{experiment.file}", "scale", scale, experiment.scales)
        self.experiment = experiment
        self.scale: Scale = experiment.scales[scale]
        self.seeds = seeds or self.scale.seeds or experiment.seeds
        grid = {} if experiment.tune is None else experiment.tune.grid
        self._tuned = revise(grid, {name: values for name, values in self.scale.tune.items() if name in grid})
        self.axes = {name: _at_scale(axis, self.scale, grid) for name, axis in experiment.axes.items()}
        self._accelerator = {} if accelerator is None else {"trainer.accelerator": accelerator}
        points = (
            Point(tuple(zip(self.axes, row, strict=True))) for row in product(*(a.choices for a in self.axes.values()))
        )
        self.points = [p for p in points if not any(is_within(p.by_axis, selection) for selection in experiment.skip)]
        if not self.points:
            raise FederatedError(f"{experiment.file}: skip leaves nothing of the grid at scale {scale!r}.")

    @property
    def choice_seeds(self) -> int:
        """The number of seeds on which tuned values are chosen."""
        tune = self.experiment.tune
        return self.seeds if tune is None or tune.seeds is None else min(tune.seeds, self.seeds)

    @property
    def labels(self) -> dict[str, tuple[Label, ...]]:
        """The labels of every axis."""
        return {name: tuple(axis.choices) for name, axis in self.axes.items()}

    def cases(self, metric: str, point: Point) -> int | None:
        """Return the number of test cases behind a metric at a point, or None if the file does not state it."""
        stated = {**self.experiment.cases, **self.scale.cases}.get(metric, ())
        return next((number for selection, number in stated if is_within(point.by_axis, selection)), None)

    @property
    def data_sets(self) -> list[str]:
        """The data sets that its cells read from a folder."""
        found = set()
        for point in self.points:
            data = self.config(next(self.cells(point, self.tuned(point)[0], range(1))))["data"]
            arguments = data.get("init_args") or {}
            if "root" in arguments:
                found.add(
                    " ".join(
                        [data["class_path"].rpartition(".")[2], *([arguments["split"]] if "split" in arguments else [])]
                    )
                )
        return sorted(found)

    def tuned(self, point: Point) -> list[tuple[tuple[str, Label], ...]]:
        """Return a point's combinations of tuned values, or a single empty one if nothing is tuned."""
        axes = self._tune_axes(point)
        return [tuple(zip(axes, row, strict=True)) for row in product(*(axis.choices for axis in axes.values()))]

    def cells(self, point: Point, tuned: tuple[tuple[str, Label], ...], seeds: range) -> Iterator[Cell]:
        """Yield the cells of a point and its tuned values."""
        yield from (Cell(point, tuned, seed) for seed in seeds)

    def config(self, cell: Cell) -> Config:
        """Return the configuration of a cell.

        Raises:
            FederatedError: If an override does not fit. The message names the cell.
        """
        try:
            config: Config = _seeded(overlay(DEFAULTS, self.experiment.base, *self._overrides(cell)), cell.seed)
            return config
        except FederatedError as error:
            raise FederatedError(f"{self.experiment.file}, {cell}: {error}") from error

    def _overrides(self, cell: Cell) -> Iterator[Mapping[str, Any]]:
        point, tune = cell.point, self._tune_axes(cell.point)
        for name, label in point.labels:
            yield self.axes[name].choices[label]
        yield self.scale.overrides
        for name, label in point.labels:
            yield self.scale.axes[name].choices[label] if name in self.scale.axes else {}
        for name, label in cell.tuned:
            yield tune[name].choices[label]
        yield {"seed_everything": cell.seed, **self._accelerator}

    def _tune_axes(self, point: Point) -> dict[str, Axis]:
        tuned, lists = dict(self._tuned), dict[str, list[Any]]()
        for name, label in point.labels:
            own = self.axes[name].tune.get(label, {})
            tuned |= {n: entry for n, entry in own.items() if not isinstance(entry, list)}
            lists |= {n: entry for n, entry in own.items() if isinstance(entry, list)}
        for name in lists:  # another label may provide the key of that name
            if name not in tuned:
                raise unknown(f"{self.experiment.file}, {point}", "tuned value", name, tuned)
        where = f"{self.experiment.file}, {point}: tune"
        return {name: make_tune_axis(f"{where}.{name}", name, entry) for name, entry in revise(tuned, lists).items()}


def _seeded(node: Any, seed: int) -> Any:
    """Return a configuration with every :data:`PER_SEED` replaced by the cell's seed."""
    if isinstance(node, Mapping):
        return {key: _seeded(value, seed) for key, value in node.items()}
    if isinstance(node, list):
        return [_seeded(value, seed) for value in node]
    return seed if node == PER_SEED else node


def name_of(labels: tuple[tuple[str, Label], ...]) -> str:
    """Return labels in words.

    Example:
        >>> name_of((("method", "FedAvg"), ("lr", "0.1")))
        'method FedAvg, lr 0.1'
    """
    return ", ".join(f"{axis} {label}" for axis, label in labels)


def _at_scale(axis: Axis, scale: Scale, grid: Container[str]) -> Axis:
    """Return an axis with the labels that a scale keeps, and their tuned values at that scale.

    The scale's own lists apply to ``tune.grid``, and to labels only for names that ``tune.grid`` lacks.
    """
    kept = scale.axes.get(axis.name, Axis(axis.name, {}))
    choices = {label: axis.choices[label] for label in axis.choices if not kept.choices or label in kept.choices}
    tune = {}
    for label in choices:
        own = axis.tune.get(label, {})
        lists = {name: values for name, values in scale.tune.items() if name in own and name not in grid}
        tune[label] = revise(revise(own, lists), kept.tune.get(label, {}))
    return replace(axis, choices=choices, tune=tune)
