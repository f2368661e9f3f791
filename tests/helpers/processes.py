"""Several connected processes, as torchrun starts them. They are forked to save the imports."""

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.helpers.hosts import Host

__all__ = ["HANGS", "Outcome", "environment", "free_port", "in_processes", "wait_until"]

HANGS = 240.0
"""Seconds after which a process is taken to hang, however busy the machine is."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one process.

    Attributes:
        value: The value that its function returned.
        error: The exception that ended it, as text; empty without one, and "killed" if the process was killed.
        trace: The exception with its traceback.
    """

    value: Any = None
    error: str = ""
    trace: str = ""


def in_processes(
    work: Callable[[], Any], folder: Path, count: int = 2, timeout: float = HANGS, hosts: Sequence[Host] = ()
) -> list[Outcome]:
    """Run a function in several processes at once. In each, a trainer with ``count`` devices finds the others.

    Args:
        work: The function. Its result is pickled.
        folder: The folder for results.
        count: The number of processes.
        timeout: The seconds after which they are killed and the test fails.
        hosts: The hosts to run on, with equally many processes on each; empty for this one.
    """
    port = free_port()
    context = multiprocessing.get_context("fork")
    paths = [folder / f"rank-{rank}.pickle" for rank in range(count)]
    for path in paths:
        path.unlink(missing_ok=True)
    processes = [
        context.Process(target=_run, args=(work, path, rank, count, port, hosts), daemon=True)
        for rank, path in enumerate(paths)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    assert not late, f"processes {late} of {count} hung"
    return [pickle.loads(path.read_bytes()) if path.exists() else Outcome(error="killed") for path in paths]


def wait_until(is_so: Callable[[], bool]) -> None:
    """Poll a condition until it is true."""
    deadline = time.monotonic() + HANGS
    while not is_so():
        assert time.monotonic() < deadline, "what is waited for has not happened"
        time.sleep(0.002)


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def environment(rank: int, count: int, port: int, hosts: Sequence[Host] = ()) -> dict[str, str]:
    """Return the environment variables with which a process finds the others."""
    local = count // max(1, len(hosts))
    return {
        "TORCHELASTIC_RUN_ID": "tests",
        "MASTER_ADDR": hosts[0].address if hosts else "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % local),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(rank // local),
    }


def _run(work: Callable[[], Any], path: Path, rank: int, count: int, port: int, hosts: Sequence[Host]) -> None:
    os.environ |= environment(rank, count, port, hosts)
    torch.set_num_threads(1)
    try:
        if hosts:
            hosts[rank * len(hosts) // count].enter()
        outcome = Outcome(work())
    except BaseException as error:
        outcome = Outcome(None, f"{type(error).__name__}: {error}", traceback.format_exc())
    path.write_bytes(pickle.dumps(outcome))
