"""Worker processes that run one cell after another, so that each imports its modules only once."""

import contextlib
import logging
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

import torch

from lightning_fed.compat.package import NAMES
from lightning_fed.core.errors import refusal_in
from lightning_fed.lab.cell import CellRunner
from lightning_fed.lab.overlays import Config


@dataclass(frozen=True)
class WorkerTask:
    """A task for a worker.

    Args:
        name: The cell, for messages.
        config: Its configuration.
        completed: The configuration with all defaults, for the record.
        folder: The folder of its record; None to only probe the cell.
    """

    name: str
    config: Config
    completed: Config
    folder: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """The outcome of a task.

    Args:
        task: The task.
        cause: The cause of its failure, or None.
        tags: The tags that a probed cell logs; None if it diverged.
        trace: The traceback of the failure.
    """

    task: WorkerTask
    cause: str | None = None
    tags: tuple[str, ...] | None = ()
    trace: str = ""


class TaskRunner(Protocol):
    """Run tasks, and yield outcomes in the order of completion."""

    def run(self, tasks: Iterable[WorkerTask]) -> Iterator[Outcome]:
        """Yield the outcome of each task when it is done."""
        ...

    def close(self) -> None:
        """Stop, even if tasks are running."""
        ...


class Inline:
    """Run tasks in this process, for debugging or for a single task."""

    def __init__(self) -> None:
        self._runner = CellRunner()

    def run(self, tasks: Iterable[WorkerTask]) -> Iterator[Outcome]:
        """Yield the outcome of each task in turn."""
        for task in tasks:
            with quietly():
                outcome = _outcome_of(self._runner, task)
            yield outcome

    def close(self) -> None:
        """Do nothing: no task is running."""


class Workers:
    """Run tasks in several processes with one thread each.

    If a worker dies because memory runs out or a library crashes, its task fails and a new worker replaces it.

    Args:
        jobs: The number of processes.
    """

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self._workers: dict[Connection, BaseProcess] = {}

    def run(self, tasks: Iterable[WorkerTask]) -> Iterator[Outcome]:
        """Yield the outcome of each task when it is done."""
        waiting, busy = list(tasks), dict[Connection, WorkerTask]()
        while waiting or busy:
            while waiting and len(busy) < self.jobs:
                idle = next((pipe for pipe in self._workers if pipe not in busy), None) or self._start()
                task = waiting.pop(0)
                with contextlib.suppress(BrokenPipeError):  # the worker died; its task fails below
                    idle.send(task)
                busy[idle] = task
            for pipe in connection.wait(list(busy)):
                assert isinstance(pipe, Connection)
                task = busy.pop(pipe)
                try:
                    yield pipe.recv()
                except (EOFError, ConnectionResetError):
                    yield Outcome(
                        task, f"its process ended, with exit code {self._remove(pipe)}: perhaps memory ran out"
                    )

    def close(self) -> None:
        """Kill the workers; only their current tasks are lost."""
        for process in self._workers.values():
            process.kill()
        for pipe in list(self._workers):
            self._remove(pipe)

    def _start(self) -> Connection:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs,), daemon=True)
        with _environment(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1"):
            process.start()
        theirs.close()
        self._workers[ours] = process
        return ours

    def _remove(self, pipe: Connection) -> int | None:
        process = self._workers.pop(pipe)
        process.join()
        pipe.close()
        return process.exitcode


def make_workers(jobs: int) -> TaskRunner:
    """Return workers in a number of processes, or in this one if ``jobs`` is 0."""
    return Workers(jobs) if jobs else Inline()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppress the output and warnings of Lightning and the modules."""
    loggers = [logging.getLogger(name) for names in NAMES.values() for name in names]
    levels = [logger.level for logger in loggers]
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(Path(os.devnull).open("w"))
        stack.enter_context(contextlib.redirect_stdout(sink))
        stack.enter_context(contextlib.redirect_stderr(sink))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _work(pipe: Connection) -> None:
    """Run tasks until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    runner = CellRunner()
    with quietly(), contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            pipe.send(_outcome_of(runner, pipe.recv()))


def _leave_with_parent() -> None:
    """End this process when its parent ends, for any reason."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _outcome_of(runner: CellRunner, task: WorkerTask) -> Outcome:
    try:
        if task.folder is None:
            tags = runner.probe(task.config)
            return Outcome(task, tags=None if tags is None else tuple(tags))
        runner.run(task.config, task.completed, task.folder)
    except Exception as error:
        refusal = refusal_in(error)
        cause = str(refusal) if refusal is not None else f"{type(error).__name__}: {error}"
        return Outcome(task, cause, trace=traceback.format_exc())
    return Outcome(task)


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set environment variables for processes started within the context."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
