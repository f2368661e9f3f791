"""Small grids of the lab, and results with given curves."""

import math
import os
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lightning_fed import FederatedError
from lightning_fed.algorithms import FedAvg
from lightning_fed.lab.cell import CellRunner
from lightning_fed.lab.experiment import Experiment
from lightning_fed.lab.grid import Cell, Grid
from lightning_fed.lab.reading import PAPERS, read_experiment
from lightning_fed.lab.records import Record, write_record
from lightning_fed.lab.results import Results
from lightning_fed.lab.run_grid import StoredCells, run_grid
from lightning_fed.lab.runner import Job
from lightning_fed.lab.store import Store
from lightning_fed.lab.workers import make_workers

Write = Callable[..., Path]
"""Of the fixture ``write``."""


@cache
def of_paper(name: str) -> Experiment:
    """Return an experiment of the package. Each file is read once."""
    return read_experiment(PAPERS / f"{name}.yaml")


def check_mistakes(write: Write, mistakes: Iterable[tuple[dict[str, Any], str]]) -> None:
    """Check that each change of the tiny experiment is refused with its message."""
    for changes, message in mistakes:
        try:
            read_experiment(write(**changes))
        except FederatedError as error:
            assert re.search(message, str(error)), f"{changes}: {error}"  # noqa: PT017
        else:
            pytest.fail(f"{changes} is not refused")


def run(path: Path, out: Path, scale: str = "full", jobs: int = 0) -> tuple[Results, list[str]]:
    """Run a grid, and return its results and the names of the cells that were run."""
    ran: list[str] = []
    original = CellRunner.run

    def noting(self: CellRunner, config: Any, completed: Any, final: Path) -> None:
        ran.append(final.name)
        original(self, config, completed, final)

    with pytest.MonkeyPatch.context() as patch, Store(out) as store:
        patch.setattr(CellRunner, "run", noting)
        results = run_grid(Grid(read_experiment(path), scale), store, make_workers(jobs))
    return results, ran


def results_of(grid: Grid, out: Path, curve_of: Callable[[Cell], list[float] | str]) -> Results:
    """Return results whose cells have these values of the metric, one per round."""
    store = Store(out)
    jobs = {}
    for number, point in enumerate(grid.points):
        for cell in (c for tuned in grid.tuned(point) for c in grid.cells(point, tuned, range(grid.seeds))):
            key = f"{number}-{'-'.join(label for _, label in cell.tuned)}-{cell.seed}"
            jobs[cell] = Job(str(cell), key, {}, {})
            curve = curve_of(cell)
            if curve == "failed":
                store.cells.mkdir(parents=True, exist_ok=True)
                store.note_failure(key, str(cell), "no memory")
                continue
            diverged = curve == "diverged" or any(map(math.isnan, curve))
            values = {} if isinstance(curve, str) else dict(enumerate(curve, start=1))
            (store.cells / key).mkdir(parents=True)
            series = {"val_distance": values}
            status: Any = "diverged" if diverged else "finished"
            write_record(store.cells / key, Record({}, status, "", 9.0, 1.0, {"torch": "2"}, series, store.cells / key))
    return Results(grid, StoredCells(store, jobs))


class Failing(FedAvg):
    """A method that fails on request."""

    def __init__(self, file: str = "", hard: bool = False) -> None:
        super().__init__()
        self.file, self.hard = file, hard

    def update_server(self, *args: Any) -> Any:
        if Path(self.file).exists() and os.environ.get("NOW"):
            if self.hard:
                os._exit(9)
            raise RuntimeError("out of luck")
        return super().update_server(*args)


def failing(write: Write, file: Path, hard: bool = False) -> Path:
    algorithm = {"class_path": f"{Failing.__module__}.Failing", "init_args": {"file": str(file), "hard": hard}}
    return write(methods={"Failing": {"trainer.algorithm": algorithm}, "FedAvg": {}})
