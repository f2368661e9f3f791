"""Search with Optuna: trials asked for and told, their cells kept in the store of a grid."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from lightning_fed.cli.configuration import Configurations
from lightning_fed.cli.yaml_files import check_keys
from lightning_fed.core.arguments import check_count, check_flags, check_number, check_seed
from lightning_fed.core.errors import FederatedError
from lightning_fed.lab.experiment import Axis
from lightning_fed.lab.grid import Cell, Grid, Point
from lightning_fed.lab.quantities import Quantity
from lightning_fed.lab.results import Results
from lightning_fed.lab.run_grid import StoredCells, check_cells, jobs_of, stopping_cleanly
from lightning_fed.lab.runner import Job, run_jobs
from lightning_fed.lab.store import Store
from lightning_fed.lab.workers import TaskRunner

__all__ = ["Range", "Search", "find_optuna", "read_range", "read_search", "run_search"]


@dataclass(frozen=True)
class Range:
    """Numbers between two ends, both included.

    Args:
        key: The key of the configuration.
        low: The lower end.
        high: The upper end.
        log: Whether to search the logarithm.
    """

    key: str
    low: float
    high: float
    log: bool = False

    @property
    def are_integers(self) -> bool:
        """Whether both ends are integers, and so is everything between."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def overrides(self, value: float) -> tuple[str, dict[str, Any]]:
        """Return the label of a value, which has six digits at most, and its overrides."""
        kept = value if self.are_integers else float(f"{value:.6g}")
        return str(kept), {self.key: kept}

    def ends(self, name: str) -> Axis:
        """Return an axis of the two ends alone, by which configurations are checked."""
        return Axis(name, dict(self.overrides(end) for end in (self.low, self.high)))


@dataclass(frozen=True)
class Search:
    """How to search.

    Args:
        trials: How many combinations to try.
        by: What is to be best.
        seed: The seed of the search.
        batch: How many combinations are asked for at once; the search learns from one batch for the next.
    """

    trials: int
    by: Quantity
    seed: int = 0
    batch: int = 4


def read_range(where: str, found: Mapping[str, Any]) -> Range:
    """Return the range that a file states.

    Raises:
        FederatedError: If the ends are not rising numbers, or not positive for the logarithm.
    """
    entry = check_keys(where, found, ("key", "low", "high", "log"), ("key", "low", "high"))
    log = entry.get("log", False)
    check_flags(where, log=log)
    for name in ("low", "high"):
        check_number(where, name, entry[name], positive=log)
    if entry["low"] >= entry["high"]:
        raise FederatedError(f"{where}: low must be below high, found {entry['low']!r} and {entry['high']!r}.")
    return Range(str(entry["key"]), entry["low"], entry["high"], log)


def read_search(where: str, found: Any, by: Quantity) -> Search:
    """Return how to search.

    Raises:
        FederatedError: If a number is not allowed.
    """
    entry = check_keys(where, found or {}, ("trials", "seed", "batch"))
    return Search(
        trials=check_count(where, "trials", entry.get("trials", 20)),
        by=by,
        seed=check_seed(where, entry.get("seed", 0)) % 2**32,
        batch=check_count(where, "batch", entry.get("batch", 4)),
    )


def find_optuna() -> ModuleType:
    """Return the package Optuna.

    Raises:
        FederatedError: If it is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise FederatedError('--search optuna needs Optuna: pip install "lightning_fed[search]".') from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    module: ModuleType = optuna
    return module


def run_search(
    grid: Grid, ranges: Mapping[str, Range], search: Search, store: Store, workers: TaskRunner, data_root: str | None
) -> Results:
    """Run trials until there are as many as asked for.

    The trials follow from the search's seed and from what earlier batches came to, so that the same command finds the
    same ones in the store, and goes on after them.

    Args:
        grid: The grid of what is searched; its points are those tried, at the end.
        ranges: The axes that are ranges.
        search: How to search.
        store: Where cells are kept.
        workers: What runs them; they are closed at the end.
        data_root: The folder of data sets, if not what the configurations say.

    Raises:
        FederatedError: If Optuna is not installed, or something about the cells is wrong; before the first one.
        SystemExit: On Ctrl-C; what is finished is kept.
    """
    if grid.experiment.skip:
        raise FederatedError(
            f"{grid.experiment.file}: skip leaves points out of a grid, and a search does not try them all. Leave skip"
            " out, or search without --search."
        )
    optuna = find_optuna()
    sampler = optuna.samplers.TPESampler(seed=search.seed)
    study = optuna.create_study(direction="maximize" if search.by.mode == "max" else "minimize", sampler=sampler)
    space = {name: _distribution(optuna, axis, ranges.get(name)) for name, axis in grid.axes.items()}
    configurations, jobs = Configurations(), dict[Cell, Job]()
    results = Results(grid, StoredCells(store, jobs))
    with stopping_cleanly(jobs, store, workers):
        check_cells(grid, _cells(grid, _cover(grid)), configurations, store, workers, data_root)
        grid.points = []
        for start in range(0, search.trials, search.batch):
            trials = [study.ask(space) for _ in range(min(search.batch, search.trials - start))]
            points = [_point(grid, ranges, trial.params) for trial in trials]
            grid.points += [point for point in points if point not in grid.points]
            jobs.update(jobs_of(grid, _cells(grid, points), configurations))
            run_jobs(jobs.values(), store, workers, data_root)
            for trial, point in zip(trials, points, strict=True):
                value = results.estimate(point, search.by).mean
                is_failed = math.isnan(value)
                state = optuna.trial.TrialState.FAIL if is_failed else optuna.trial.TrialState.COMPLETE
                study.tell(trial, None if is_failed else value, state=state)
    return results


def _cover(grid: Grid) -> list[Point]:
    """Return points in which every label of every axis occurs."""
    labels = {name: list(axis.choices) for name, axis in grid.axes.items()}
    most = max(len(of_axis) for of_axis in labels.values())
    return [Point(tuple((name, own[min(i, len(own) - 1)]) for name, own in labels.items())) for i in range(most)]


def _cells(grid: Grid, points: list[Point]) -> list[Cell]:
    return [Cell(point, (), seed) for point in dict.fromkeys(points) for seed in range(grid.seeds)]


def _point(grid: Grid, ranges: Mapping[str, Range], params: Mapping[str, Any]) -> Point:
    """Return a trial's point, whose labels the grid then knows."""
    labels = {}
    for name in grid.axes:
        labels[name] = str(params[name])
        if name in ranges:
            labels[name], overrides = ranges[name].overrides(params[name])
            grid.axes[name] = Axis(name, {**grid.axes[name].choices, labels[name]: overrides})
    return Point(tuple(labels.items()))


def _distribution(optuna: Any, axis: Axis, range_: Range | None) -> Any:
    if range_ is None:
        return optuna.distributions.CategoricalDistribution(list(axis.choices))
    kind = optuna.distributions.IntDistribution if range_.are_integers else optuna.distributions.FloatDistribution
    return kind(range_.low, range_.high, log=range_.log)
