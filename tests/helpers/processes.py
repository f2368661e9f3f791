"""Several processes that know of each other, as torchrun starts them; forked, so that nothing is imported anew."""

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
    """What became of one process.

    Attributes:
        value: What its work returned.
        error: The exception that ended it, as text; empty if none did, and "killed" if it had no time for one.
        trace: The same with its trace.
    """

    value: Any = None
    error: str = ""
    trace: str = ""


def in_processes(
    work: Callable[[], Any], folder: Path, count: int = 2, timeout: float = HANGS, hosts: Sequence[Host] = ()
) -> list[Outcome]:
    """Run a function in several processes at once, in each of which a trainer of as many devices finds the others.

    Args:
        work: The function; what it returns is pickled.
        folder: Where results are put.
        count: The number of processes.
        timeout: After so many seconds they are ended, and the test fails.
        hosts: On which they run, as many on each; none: on this one.
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
    """Ask again and again whether something has happened, until it has."""
    deadline = time.monotonic() + HANGS
    while not is_so():
        assert time.monotonic() < deadline, "what is waited for has not happened"
        time.sleep(0.002)


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def environment(rank: int, count: int, port: int, hosts: Sequence[Host] = ()) -> dict[str, str]:
    """Return the environment in which a process finds the others."""
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
