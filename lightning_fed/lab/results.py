"""The results of a grid: the values chosen for each point, and quantities with their mean over seeds."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Protocol

from lightning_fed.core.errors import FederatedError
from lightning_fed.lab.experiment import Label
from lightning_fed.lab.grid import Cell, Grid, Point, name_of
from lightning_fed.lab.numbers import format_number, with_spread
from lightning_fed.lab.quantities import Quantity, cost
from lightning_fed.lab.records import Record

Tuned = tuple[tuple[str, Label], ...]


@dataclass(frozen=True)
class Estimate:
    """A quantity of a point over its seeds.

    Args:
        quantity: The quantity.
        values: Its value for each seed, infinite if a target is not reached or the run diverged.
        missing: The reason if there is no value.
        limit: The largest measured cost.
        is_diverged: Whether some seed diverged.
        binomial: The standard error of an accuracy's mean due to the finite test set; None if unknown.
    """

    quantity: Quantity
    values: tuple[float, ...] = ()
    missing: str = ""
    limit: float = math.nan
    is_diverged: bool = False
    binomial: float | None = None

    @property
    def mean(self) -> float:
        """The mean over the seeds; NaN if there is no value."""
        return fmean(self.values) if self.values else math.nan

    @property
    def spread(self) -> float:
        """The sample standard deviation over the seeds; 0 for a single one."""
        finite = len(self.values) > 1 and all(map(math.isfinite, self.values))
        return stdev(self.values) if finite else 0.0

    def __str__(self) -> str:
        """Show the mean and, if defined, the deviation."""
        if len(self.values) < 2 or not math.isfinite(self.mean):
            return self.mean_text
        return with_spread(self.mean, self.spread, self.quantity.is_percent)

    @property
    def mean_text(self) -> str:
        """The formatted mean, or a replacement if it is missing or not finite."""
        if not self.values:
            return "-"
        if math.isfinite(self.mean):
            return format_number(self.mean, self.quantity.is_percent)
        if self.is_diverged:
            return "diverged"
        return f">{format_number(self.limit)}" if self.quantity.is_cost else "not finite"


@dataclass(frozen=True)
class Candidate:
    """A combination of tuned values that was tried.

    Args:
        tuned: The values.
        estimate: The deciding quantity, over the deciding seeds.
        tie: The quantity that decides between equals; lower is better.
    """

    tuned: Tuned
    estimate: Estimate
    tie: float

    @property
    def rank(self) -> tuple[float, float]:
        """The value to minimize; a combination without a value comes last."""
        mean = self.estimate.mean
        sign = 1.0 if self.estimate.quantity.mode == "min" else -1.0
        return (math.inf if math.isnan(mean) else sign * mean), self.tie


def choose(candidates: list[Candidate]) -> Candidate | None:
    """Return the best candidate, the first one of equals, or None if all failed or diverged."""
    sound = [c for c in candidates if c.estimate.values and not c.estimate.is_diverged]
    return min(sound, key=lambda c: c.rank, default=None)


class Cells(Protocol):
    """A source of a grid's cells: the store of a command, or the published cells."""

    def record(self, cell: Cell) -> Record | None:
        """Return a cell's record; None if it is not finished."""

    def failure(self, cell: Cell) -> str | None:
        """Return the cause of a cell's failure, or None if it did not fail or was not run."""


class Results:
    """The finished cells of a grid.

    Args:
        grid: The grid.
        finished: The source of its cells.
        by: The quantity that chooses tuned values; None for the experiment's.

    Attributes:
        beside: The results at the values that the scale's ``also_by`` chooses; None if it has no such rule.
    """

    def __init__(self, grid: Grid, finished: Cells, by: Quantity | None = None) -> None:
        self.grid = grid
        self.record, self.failure = finished.record, finished.failure
        tune, also = grid.experiment.tune, grid.scale.also_by
        self.by = tune.by if by is None and tune is not None else by
        self.beside: Results | None = Results(grid, finished, also) if by is None and also is not None else None
        self._candidates: dict[Point, list[Candidate]] = {}

    def asked(self) -> Iterator[Cell]:
        """Yield every cell behind the results: those that decide tuned values, and all seeds of the chosen values."""
        seen = dict[Cell, None]()
        for point in self.grid.points:
            for tuned in self.grid.tuned(point):
                seen |= dict.fromkeys(self.grid.cells(point, tuned, range(self.grid.choice_seeds)))
            seen |= dict.fromkeys(self.cells(point))
            seen |= dict.fromkeys([] if self.beside is None else self.beside.cells(point))
        yield from seen

    def candidates(self, point: Point) -> list[Candidate]:
        """Return the combinations tried at a point with their scores; empty if nothing is tuned there."""
        by, combinations = self.by, self.grid.tuned(point)
        if by is None or len(combinations) < 2:
            return []
        if point not in self._candidates:
            self._candidates[point] = [self._candidate(point, tuned, by) for tuned in combinations]
        return self._candidates[point]

    def chosen(self, point: Point) -> Tuned | None:
        """Return the tuned values chosen for a point; None if all of them failed or diverged."""
        candidates = self.candidates(point)
        if not candidates:
            return self.grid.tuned(point)[0]
        best = choose(candidates)
        return None if best is None else best.tuned

    def cells(self, point: Point) -> list[Cell]:
        """Return the cells of a point at its chosen values, one for each seed."""
        tuned = self.chosen(point)
        return [] if tuned is None else list(self.grid.cells(point, tuned, range(self.grid.seeds)))

    def records(self, point: Point) -> list[Record]:
        """Return the records of the finished cells among :meth:`cells`."""
        return [record for cell in self.cells(point) if (record := self.record(cell)) is not None]

    def estimate(self, point: Point, quantity: Quantity) -> Estimate:
        """Return a quantity of a point, at its chosen values, over all seeds."""
        cells = self.cells(point)
        if not cells:
            diverged = all(c.estimate.is_diverged for c in self.candidates(point))
            if diverged:
                return Estimate(quantity, (quantity.worst,) * self.grid.seeds, is_diverged=True)
            why = next(c.estimate.missing for c in self.candidates(point) if c.estimate.missing)
            return Estimate(quantity, missing=f"no tuned value has a result: {why}")
        return self._estimate(cells, quantity)

    def _candidate(self, point: Point, tuned: Tuned, by: Quantity) -> Candidate:
        cells = list(self.grid.cells(point, tuned, range(self.grid.choice_seeds)))
        final = self._estimate(cells, Quantity("final", "final", by.metric)).mean if by.is_cost else 0.0
        return Candidate(tuned, self._estimate(cells, by), final if by.metric.mode == "min" else -final)

    def _estimate(self, cells: list[Cell], quantity: Quantity) -> Estimate:
        values, limit, is_diverged = [], 0.0, False
        for cell in cells:
            record = self.record(cell)
            if record is None:
                cause = self.failure(cell)
                why = "was not run" if cause is None else f"failed: {cause}"
                return Estimate(quantity, missing=f"{cell} {why}")
            is_diverged |= record.status == "diverged"
            try:
                values.append(quantity.worst if record.status == "diverged" else quantity.of(record.series))
            except FederatedError as error:
                return Estimate(quantity, missing=f"{cell}: {error}")
            limit = max(limit, _most(record, quantity))
        return Estimate(
            quantity,
            tuple(values),
            limit=limit,
            is_diverged=is_diverged,
            binomial=self._binomial(cells[0], values, quantity),
        )

    def _binomial(self, cell: Cell, values: list[float], quantity: Quantity) -> float | None:
        """Return the standard error of an accuracy in percent over a number of test cases."""
        cases = self.grid.cases(quantity.metric.name, cell.point)
        if cases is None or not quantity.is_share or not all(map(math.isfinite, values)):
            return None
        share = min(max(fmean(values) / 100, 0.0), 1.0)
        return 100 * math.sqrt(share * (1 - share) / cases)

    def choice_rows(self) -> list[dict[str, str]]:
        """Return a row for every tuned combination, with its score and whether it was chosen."""
        rows = []
        for point in self.grid.points:
            best = self.chosen(point)
            for candidate in self.candidates(point):
                score = candidate.estimate
                rows.append(
                    {
                        **point.by_axis,
                        "tuned": name_of(candidate.tuned),
                        score.quantity.text: str(score),
                        "chosen": "yes" if candidate.tuned == best else "",
                    }
                )
        return rows


def _most(record: Record, quantity: Quantity) -> float:
    """Return the largest measured cost of a run, in rounds if the quantity is not a cost."""
    if quantity.kind == "rounds" or not quantity.is_cost:
        return float(max((n for curve in record.series.values() for n in curve), default=0))
    try:
        return max(cost(record.series, quantity.kind).values(), default=0.0)
    except FederatedError:
        return 0.0
