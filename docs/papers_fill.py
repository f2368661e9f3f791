"""Run the missing cells of an experiment, and keep them so that the next machine can continue.

    python docs/papers_fill.py NAME SCALE STORE [--jobs K] [--data_root DIR] [--first "METHOD; METHOD"]...

Cells in STORE, ``docs/papers/started`` or ``docs/papers`` are not run again. The lines of the experiment run one after
the other, first their tuned values and then their other seeds. After each, all cells that were found or run are written
to ``docs/papers/started``, in the files of a published experiment. The same command continues from there. When
nothing is missing, move the files to ``docs/papers``, and make the page with ``lightning-fed reproduce NAME --scale
SCALE --published docs/papers --out docs/papers``.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_fed.core.errors import FederatedError
from lightning_fed.lab.adding import EitherCells
from lightning_fed.lab.configurations import Configurations
from lightning_fed.lab.experiment import METHOD
from lightning_fed.lab.grid import Cell, Grid, Point
from lightning_fed.lab.published import PublishedCells, publish
from lightning_fed.lab.reading import find_experiment, read_experiment
from lightning_fed.lab.results import Results
from lightning_fed.lab.run_grid import StoredCells
from lightning_fed.lab.runner import Job, check_jobs, make_jobs, run_jobs
from lightning_fed.lab.store import Store
from lightning_fed.lab.workers import TaskRunner, make_workers

PUBLISHED = Path(__file__).parent / "papers"
STARTED = PUBLISHED / "started"


def published(grid: Grid, folder: Path) -> list[PublishedCells]:
    """Return an experiment's published cells in a folder, or an empty list if there are none."""
    try:
        return [PublishedCells(grid, folder)]
    except FederatedError:
        return []


def lines(grid: Grid, results: Results, first: Sequence[Sequence[str]]) -> Iterator[list[Cell]]:
    """Yield the cells of each line: those that choose its values, then all seeds. Some methods come first."""

    def turn(point: Point) -> int:
        return next((n for n, methods in enumerate(first) if point.by_axis[METHOD] in methods), len(first))

    for point in sorted(grid.points, key=turn):
        yield [cell for tuned in grid.tuned(point) for cell in grid.cells(point, tuned, range(grid.choice_seeds))]
        yield results.cells(point)
        yield [] if results.beside is None else results.beside.cells(point)


def fill(
    grid: Grid, store: Store, workers: TaskRunner, started: Path, first: Sequence[Sequence[str]], root: str | None
) -> Results:
    """Run the missing cells line by line, and publish after each line.

    Args:
        grid: The experiment at a scale.
        store: The store of the cells that are run here.
        workers: The processes that run them.
        started: The folder to publish them in.
        first: The methods that come first, by turns.
        root: The folder of data sets.
    """
    configurations, jobs = Configurations(), dict[Cell, Job]()
    places = [*published(grid, started), *published(grid, started.parent)]
    results = Results(grid, EitherCells(StoredCells(store, jobs), *places))
    started.mkdir(parents=True, exist_ok=True)
    for cells in lines(grid, results, first):
        lacking = {str(cell): cell for cell in cells if results.record(cell) is None}
        if not lacking:
            continue
        made = make_jobs({name: grid.config(cell) for name, cell in lacking.items()}, configurations)
        jobs.update({lacking[name]: job for name, job in made.items()})
        todo = [job for job in made.values() if not store.has(job.key)]
        check_jobs(todo, configurations)
        run_jobs(todo, store, workers, root)
        publish(Results(grid, EitherCells(StoredCells(store, jobs), *places)), started)
    return results


def main() -> None:
    """Read the command line, run, and print the number of missing cells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="an experiment, or the path of its file")
    parser.add_argument("scale")
    parser.add_argument("store", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--data_root")
    parser.add_argument("--first", action="append", default=[])
    options = parser.parse_args()
    grid = Grid(read_experiment(find_experiment(options.name)), options.scale)
    first = [[method.strip() for method in some.split(";")] for some in options.first]
    with Store(options.store) as store:
        workers = make_workers(options.jobs)
        try:
            results = fill(grid, store, workers, STARTED, first, options.data_root)
        finally:
            workers.close()
        missing = [cell for cell in results.asked() if results.record(cell) is None]
    print(f"{len(missing)} cells are missing")


if __name__ == "__main__":
    main()
