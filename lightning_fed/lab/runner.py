"""Check the cells of a grid that its store lacks, and run them."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_fed.callbacks.progress import overwrites
from lightning_fed.compat.private import Tqdm
from lightning_fed.core.errors import FederatedError
from lightning_fed.lab.configurations import Configurations, key_of, with_root
from lightning_fed.lab.overlays import Config
from lightning_fed.lab.quantities import COSTS, Metric
from lightning_fed.lab.store import Store
from lightning_fed.lab.workers import TaskRunner, WorkerTask, quietly
from lightning_fed.lab.yaml_files import unknown


@dataclass(frozen=True)
class Job:
    """A cell to finish.

    Args:
        name: The cell in words. Cells with the same configuration share one job, named after the first.
        key: Its name in the store.
        config: Its configuration.
        completed: The configuration with all defaults.
    """

    name: str
    key: str
    config: Config
    completed: Config


def make_jobs(configs: Mapping[str, Config], configurations: Configurations) -> dict[str, Job]:
    """Return the job of every cell. Cells with the same configuration share one.

    Args:
        configs: The cells' configurations by the cells' names.
        configurations: The object that completes them.

    Raises:
        FederatedError: If a configuration is invalid. The message names the cell.
    """
    jobs, by_key = {}, dict[str, Job]()
    for name, config in configs.items():
        completed = configurations.complete(name, config)
        key = key_of(completed)
        jobs[name] = by_key.setdefault(key, Job(name, key, config, completed))
    return jobs


def check_jobs(jobs: Iterable[Job], configurations: Configurations) -> None:
    """Instantiate each distinct trainer, model and data module once.

    Raises:
        FederatedError: If a class refuses its arguments. The message names the cell.
    """
    with quietly():
        for job in jobs:
            configurations.check(job.name, job.config)


def probe_jobs(
    jobs: Sequence[Job], metrics: Mapping[str, Metric], costs: Iterable[str], workers: TaskRunner, data_root: str | None
) -> None:
    """Run one round of every kind of cell, and check that data sets exist and that some cell logs each metric.

    Cells are of one kind if their configurations differ only in numbers.

    Args:
        jobs: The cells.
        metrics: The required metrics.
        costs: The required costs, from :data:`COSTS`.
        workers: The processes that run the rounds.
        data_root: The folder of data sets; None for the one in the configurations.

    Raises:
        FederatedError: If a cell fails, or a metric is not logged. The message names the cell or the metric.
    """
    kinds: dict[str, list[Job]] = {}
    for job in jobs:
        kinds.setdefault(json.dumps(_without_numbers(job.config), sort_keys=True, default=str), []).append(job)
    logged, unknown_kinds = set[str](), 0
    with _Bar(total=len(kinds), desc="Checks", unit="kind", leave=False, disable=not kinds) as bar:
        waiting = list(kinds.values())
        while waiting:  # a diverged probe has no tags, so try the kind's next cell
            tasks = {of[0].name: WorkerTask(of[0].name, with_root(of[0].config, data_root), {}) for of in waiting}
            others = {of[0].name: of[1:] for of in waiting}
            waiting = []
            for outcome in workers.run(tasks.values()):
                if outcome.cause is not None:
                    raise FederatedError(f"{outcome.task.name} cannot be run: {outcome.cause}")
                left = others[outcome.task.name]
                if outcome.tags is None and left:
                    waiting.append(left)
                    continue
                unknown_kinds += outcome.tags is None
                logged.update(outcome.tags or ())
                bar.update()
    wanted = [*metrics, *(tag for cost in costs for tag in COSTS[cost])]
    for metric in wanted if kinds and not unknown_kinds else ():
        if metric not in logged:
            raise unknown("After one round of every kind of cell", "metric", metric, sorted(logged))


def run_jobs(jobs: Iterable[Job], store: Store, workers: TaskRunner, data_root: str | None = None) -> None:
    """Run the unfinished jobs, with a progress bar over cells.

    The store notes each failed cell, and the other cells still run.

    Args:
        jobs: The jobs. Duplicates run once.
        store: The store of finished cells.
        workers: The processes that run them.
        data_root: The folder of data sets; None for the one in the configurations.
    """
    by_key = {job.key: job for job in jobs}
    left = [job for job in by_key.values() if not store.has(job.key)]
    tasks = [
        WorkerTask(job.name, with_root(job.config, data_root), job.completed, store.cells / job.key) for job in left
    ]
    store.forget_failures(by_key)
    failed = 0
    with _Bar(total=len(by_key), initial=len(by_key) - len(left), desc="Cells", unit="cell", disable=not tasks) as bar:
        for outcome in workers.run(tasks):
            if outcome.cause is not None:
                failed += 1
                assert outcome.task.folder is not None
                store.note_failure(outcome.task.folder.name, outcome.task.name, outcome.cause)
                bar.write(f"{outcome.task.name} failed: {outcome.cause}")
                bar.set_postfix(failed=failed)
            bar.update()


class _Bar(Tqdm):
    """A progress bar on a terminal or in a notebook. Elsewhere, it prints a line every 30 s to keep log files short."""

    def __init__(self, **options: Any) -> None:
        if not overwrites(sys.stderr):
            options |= {
                "leave": True,
                "mininterval": 30,
                "bar_format": "{desc} {n_fmt}/{total_fmt}, {elapsed} so far{postfix}",
            }
        super().__init__(**options)

    @staticmethod
    def status_printer(file: Any) -> Callable[[str], None]:
        """Return the function that shows a status."""
        if overwrites(sys.stderr):
            show: Callable[[str], None] = Tqdm.status_printer(file)
            return show
        return lambda status: print(status, file=file, flush=True) if status else None


def _without_numbers(node: Any) -> Any:
    """Return a configuration without its numbers. It identifies the kind of a cell."""
    if isinstance(node, Mapping):
        return {key: _without_numbers(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_without_numbers(value) for value in node]
    return None if isinstance(node, int | float) and not isinstance(node, bool) else node
