"""Runs in separate processes that are struck at a chosen moment: by a signal, an exception, or a full disk."""

import errno
import io
import json
import multiprocessing
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_fed import FederatedCallback
from lightning_fed.checkpoints import files as checkpoint_io
from lightning_fed.core import disk
from lightning_fed.server.client_states import disk_store
from lightning_fed.strategies import stopping
from tests.helpers.processes import HANGS, environment, free_port

__all__ = ["EXITS", "KINDS", "WHERE", "BlowError", "Places", "Strike", "killed_when", "struck", "struck_together"]

SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
KINDS = (*SIGNALS, "exception", "disk full")
WHERE = ("hook", "step", "write", "flush", "rename", "renamed")
EXITS = {"SIGKILL": -signal.SIGKILL, "SIGTERM": 0, "SIGINT": 1, "exception": 1, "disk full": 1}


class BlowError(Exception):
    """An exception of user code."""


@dataclass(frozen=True)
class Strike:
    """A failure of a process and its time.

    Attributes:
        kind: One of :data:`KINDS`.
        where: One of :data:`WHERE`.
        at: The index of the moment among those at the same place, from 0.
        share: The share of a write that is done before the strike.
    """

    kind: str
    where: str
    at: int
    share: float = 0.5


class Places(FederatedCallback):
    """Calls a function in every hook of callbacks."""

    def __init__(self, moment: Callable[[str, str], Any]) -> None:
        self.moment = moment

    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        self.moment("hook", "round start")

    def on_client_start(self, trainer: Any, pl_module: Any, round: int, client_id: Any) -> None:
        self.moment("hook", "client start")

    def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
        self.moment("hook", "client end")

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        self.moment("hook", "round end")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.moment("hook", "validation end")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.moment("hook", "epoch end")


class _Moments:
    """Counts the moments of a run: hooks, local steps, and every write, flush and rename of a checkpoint or store.

    Args:
        strike: The strike; None for none.
        seen: The file that gets the name of the struck moment.
    """

    def __init__(self, strike: Strike | None, seen: Path) -> None:
        self.strike, self.seen, self.counts = strike, seen, dict.fromkeys(WHERE, 0)

    def __call__(self, where: str, name: str = "") -> bool:
        """Count a moment, and return whether the disk fails at it."""
        falls = self.falls(where)
        self.counts[where] += 1
        if self.strike is None or not falls:
            return False
        self.seen.write_text(name or where)
        if self.strike.kind == "disk full":
            return True
        if self.strike.kind == "exception":
            raise BlowError(name or where)
        os.kill(os.getpid(), SIGNALS[self.strike.kind])
        return False

    def falls(self, where: str) -> bool:
        """Return whether the strike falls at the next moment of this kind. A full disk stays full."""
        if self.strike is None or where != self.strike.where:
            return False
        late = self.counts[where] - self.strike.at
        return late >= 0 if self.strike.kind == "disk full" else late == 0

    def listen(self) -> None:
        """Patch this process so that every moment calls this object."""
        check, write = stopping.RoundSignalConnector.check, checkpoint_io._Stream.write
        fsync, replace = os.fsync, os.replace

        def counted_check(connector: Any) -> None:
            self("step")
            check(connector)

        def counted_write(stream: Any, data: Any) -> int:
            data = bytes(data)
            part = data[: int(len(data) * self.strike.share)] if self.strike and self.falls("write") else b""
            stream._stream.write(part)
            if part:
                stream._stream.flush()
            data = data[len(part) :]
            if self("write"):
                stream.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return len(part) + write(stream, data) if len(data) else len(part)

        class CountedFile(io.FileIO):
            """Counts every write to a file of states as a moment. A strike falls in the middle of the write."""

            def write(self, data: Any) -> int:
                part = 0
                if moments.strike and moments.falls("write"):
                    part = super().write(data[: int(len(data) * moments.strike.share)])
                if self.writable() and moments("write"):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return part + super().write(data[part:])

        def counted_open(path: Any, mode: str) -> Any:
            return open(path, mode) if mode == "rb" else io.BufferedWriter(CountedFile(path, mode))

        def counted_fsync(handle: int) -> None:
            if self("flush"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(handle)

        def counted_replace(source: Any, target: Any) -> None:
            self("rename")
            replace(source, target)
            self("renamed")

        stopping.RoundSignalConnector.check = counted_check
        checkpoint_io._Stream.write = counted_write

        class CountedConnection(sqlite3.Connection):
            """Counts every statement that changes an index as a moment, so a kill can fall between any two."""

            def execute(self, statement: str, *args: Any) -> sqlite3.Cursor:
                self._strike(statement)
                return super().execute(statement, *args)

            def executemany(self, statement: str, *args: Any) -> sqlite3.Cursor:
                self._strike(statement)
                return super().executemany(statement, *args)

            def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
                try:
                    self._strike("ROLLBACK" if error else "COMMIT")
                except BaseException as failure:
                    super().__exit__(type(failure), failure, None)
                    raise
                return super().__exit__(kind, error, trace)

            def _strike(self, statement: str) -> None:
                if not statement.startswith(("SELECT", "ROLLBACK")) and moments("write"):
                    raise sqlite3.OperationalError("database or disk is full")

        moments = self
        disk_store.open = counted_open
        disk_store.sqlite3 = _Module(sqlite3, connect=partial(sqlite3.connect, factory=CountedConnection))
        checkpoint_io.os = disk_store.os = disk.os = _Module(os, fsync=counted_fsync, replace=counted_replace)


class _Module:
    """A Python module with some functions replaced."""

    def __init__(self, module: Any, **functions: Callable[..., Any]) -> None:
        self.__dict__.update(functions, module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def struck(work: Callable[[Places], Any], strike: Strike | None, folder: Path) -> tuple[int, str]:
    """Run a fit in a separate process, and strike it.

    Args:
        work: Runs the fit, given a callback that the trainer must have.
        strike: The strike; None for none.
        folder: The folder for notes on the run.

    Returns:
        The exit code and the name of the struck moment, empty if the run ended before it. Without a strike, the
        number of moments of each kind, as JSON.
    """
    ((code, seen),) = struck_together(work, [strike], folder)
    return code, seen


def struck_together(
    work: Callable[[Places], Any], blows: Sequence[Strike | None], folder: Path, timeout: float = HANGS
) -> list[tuple[int, str]]:
    """Run a fit in one process per strike, which may be None; return :func:`struck`'s results for each."""
    context, port, count = multiprocessing.get_context("fork"), free_port(), len(blows)
    notes = [folder / f"seen-{rank}" for rank in range(count)]
    processes = []
    for rank, (strike, seen) in enumerate(zip(blows, notes, strict=True)):
        seen.unlink(missing_ok=True)
        around = environment(rank, count, port) if count > 1 else {}
        processes.append(context.Process(target=_run, args=(work, strike, seen, around), daemon=True))
        processes[-1].start()
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    assert not late, f"processes {late} of {count} hang after {blows}"
    return [(p.exitcode or 0, n.read_text() if n.exists() else "") for p, n in zip(processes, notes, strict=True)]


def killed_when(work: Callable[[], Any], is_time: Callable[[], bool], delay: float = 0.0) -> int | None:
    """Run a function in a separate process, and kill it from outside; return its exit code if it ended before.

    Args:
        work: The function.
        is_time: Returns whether it is time to kill the process; polled.
        delay: The seconds from then to the kill.
    """
    process = multiprocessing.get_context("fork").Process(target=_run_quietly, args=(work,), daemon=True)
    process.start()
    deadline = time.monotonic() + HANGS
    while process.exitcode is None and not is_time():
        assert time.monotonic() < deadline, "a process hangs"
        process.join(0.002)
    process.join(delay)
    code = process.exitcode
    process.kill()
    process.join()
    return code


def _run_quietly(work: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere:
        sys.stderr = sys.stdout = nowhere
        work()


def _run(work: Callable[[Places], Any], strike: Strike | None, seen: Path, around: dict[str, str]) -> None:
    os.environ |= around
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with open(os.devnull, "w") as nowhere:
        sys.stderr = sys.stdout = nowhere
        moments = _Moments(strike, seen)
        moments.listen()
        work(Places(moments))
        if strike is None:
            seen.write_text(json.dumps(moments.counts))
