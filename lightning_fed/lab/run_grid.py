"""Check and run a whole grid: first the cells that decide tuned values, then the others."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from lightning_fed.core.errors import FederatedError
from lightning_fed.lab.adding import EitherCells
from lightning_fed.lab.configurations import Configurations, with_root
from lightning_fed.lab.experiment import Experiment
from lightning_fed.lab.grid import Cell, Grid
from lightning_fed.lab.overlays import Config
from lightning_fed.lab.provenance import changed_file
from lightning_fed.lab.quantities import COSTS
from lightning_fed.lab.records import Record
from lightning_fed.lab.results import Cells, Results
from lightning_fed.lab.runner import Job, check_jobs, make_jobs, probe_jobs, run_jobs
from lightning_fed.lab.store import Store
from lightning_fed.lab.workers import TaskRunner


@dataclass(frozen=True)
class StoredCells:
    """The cells of a grid that a store has.

    Args:
        store: The store.
        jobs: The job of each cell.
    """

    store: Store
    jobs: Mapping[Cell, Job]

    def record(self, cell: Cell) -> Record | None:
        """Return a cell's record; None if it is not finished."""
        return self.store.get(self.jobs[cell].key) if cell in self.jobs else None

    def failure(self, cell: Cell) -> str | None:
        """Return the cause of a cell's failure, or None if it did not fail or was not run."""
        return self.store.failure(self.jobs[cell].key) if cell in self.jobs else None


def run_grid(
    grid: Grid, store: Store, workers: TaskRunner, data_root: str | None = None, published: Cells | None = None
) -> Results:
    """Check and run the cells of a grid that its store lacks.

    Args:
        grid: The grid.
        store: The store of its cells.
        workers: The processes that run them. They are closed at the end.
        data_root: The folder of data sets; None for the one in the configurations.
        published: Published cells. They are not run again.

    Raises:
        FederatedError: If a cell or its data is invalid. It is raised before the first cell runs.
        SystemExit: On Ctrl-C; finished cells are kept.
    """
    configurations, jobs = Configurations(), dict[Cell, Job]()
    stored = StoredCells(store, jobs)
    finished: Cells = stored if published is None else EitherCells(published, stored)
    results, seeds = Results(grid, finished), range(grid.choice_seeds)
    each = (grid.cells(point, tuned, seeds) for point in grid.points for tuned in grid.tuned(point))
    first = list(chain.from_iterable(each))
    try:
        jobs.update(_jobs_of(grid, _without(published, first), configurations))
        left = [job for job in {job.key: job for job in jobs.values()}.values() if not store.has(job.key)]
        for cell in first:  # if all cells are published, showing them needs no data
            if (record := (finished if left else stored).record(cell)) is not None:
                _check_data(str(cell), record, grid.config(cell), data_root)
        check_jobs(left, configurations)
        probe_jobs(left, grid.experiment.metrics, _costs(grid.experiment), workers, data_root)
        run_jobs(jobs.values(), store, workers, data_root)
        chosen = [cell for cell in results.asked() if cell not in jobs]
        then = _without(published, chosen)
        if then:
            jobs.update(_jobs_of(grid, then, configurations))
            run_jobs(jobs.values(), store, workers, data_root)
    except KeyboardInterrupt:
        done = sum(store.has(key) for key in {job.key for job in jobs.values()})
        print(
            f"lightning-fed: stopped with {done} cells finished in {store.out}; the same command continues from there.",
            file=sys.stderr,
        )
        sys.exit(130)  # a shell's status for a process that an interrupt ends
    finally:
        workers.close()
    return results


def _check_data(name: str, record: Record, config: Config, data_root: str | None) -> None:
    """Raise if a data file has changed since a finished cell read it."""
    root = (with_root(config, data_root)["data"].get("init_args") or {}).get("root")
    path = None if root is None else changed_file(record.data, root)
    if path is not None:
        raise FederatedError(
            f"{name} was run before {path} was changed: the file had another SHA-256. Cells with other data cannot be"
            " compared. Put the file back, or run all cells again in another folder with --out, without --published."
        )


def _without(published: Cells | None, cells: Iterable[Cell]) -> list[Cell]:
    """Return the cells that were not published."""
    return [cell for cell in cells if published is None or published.record(cell) is None]


def _jobs_of(grid: Grid, cells: Iterable[Cell], configurations: Configurations) -> dict[Cell, Job]:
    cells = list(cells)
    named = make_jobs({str(cell): grid.config(cell) for cell in cells}, configurations)
    return {cell: named[str(cell)] for cell in cells}


def _costs(experiment: Experiment) -> set[str]:
    """Return the costs that an experiment's quantities and figures use."""
    drawn = {figure.x for figure in experiment.figures if figure.x in COSTS}
    return {quantity.kind for quantity in experiment.quantities if quantity.is_cost} | drawn
