"""How a run is measured: times of rounds, and the memory of all its processes."""

import argparse
import contextlib
import datetime
import os
import platform
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

__all__ = ["Outcome", "Settings", "Stopwatch", "machine", "peak_memory_mb", "positive", "usable_cores"]


@dataclass(frozen=True)
class Settings:
    """How a workload is run.

    Attributes:
        rounds: Rounds that are timed.
        warmup: Rounds before them that are not.
        devices: Processes or cores to use; None for what suits system and machine best.
        engine: The engine of lightning_fed.
        algorithm: The method of lightning_fed; the other systems run FedAvg.
        accelerator: "cpu" or "gpu".
        in_turns: After how many rounds that are timed all processes of the system stop until they are told to go on,
            so that others have their rounds; 0 if they do not.
    """

    rounds: int = 8
    warmup: int = 3
    devices: int | None = None
    engine: str = "auto"
    algorithm: str = "FedAvg"
    accelerator: str = "cpu"
    in_turns: int = 0

    @property
    def total(self) -> int:
        """All rounds, those to warm up included."""
        return self.warmup + self.rounds


@dataclass(frozen=True)
class Outcome:
    """What a run ends with.

    Attributes:
        logits_of: The final model, from examples to logits.
        config: What was run: versions, processes, threads, engine.
    """

    logits_of: Callable[[np.ndarray], np.ndarray]
    config: dict[str, Any]


_Times: TypeAlias = tuple[float, float]  # seconds, and seconds of this process's own work


def _now() -> _Times:
    return time.perf_counter(), time.process_time()


def _since(start: _Times, end: _Times) -> _Times:
    return end[0] - start[0], end[1] - start[1]


class Stopwatch:
    """Time rounds from tick to tick: one before the first round, one after every round.

    Args:
        settings: Says how many rounds there are, and how many of them are not counted.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.peak_mb = 0.0
        self._ticks: list[_Times] = []
        self._starts: list[_Times] = []  # of the rounds that follow the ticks
        self._started = _now()

    def tick(self) -> None:
        """Take the time; after the last round, the memory as well, while all processes are still there."""
        self._ticks.append(_now())
        done, in_turns = len(self._ticks) - 1 - self.settings.warmup, self.settings.in_turns
        if done == self.settings.rounds:
            self.peak_mb = peak_memory_mb()
        elif in_turns and done >= 0 and done % in_turns == 0:
            os.killpg(os.getpgrp(), signal.SIGSTOP)
        self._starts.append(_now())

    def figures(self) -> dict[str, float]:
        """Return seconds per round, megabytes at the most, and seconds until the first round that counts.

        Those with "cpu" in their names are processor time of this process alone.

        Raises:
            RuntimeError: If the system did not run as many rounds as it should have.
        """
        warmup, expected = self.settings.warmup, self.settings.total + 1
        if len(self._ticks) != expected:
            raise RuntimeError(f"The stopwatch ticked {len(self._ticks)} times instead of {expected}.")
        times, cpu_times = self.rounds()
        setup, cpu_setup = _since(self._started, self._ticks[warmup])
        return {
            "s_per_round": round(statistics.median(times), 6),
            "cpu_s_per_round": round(statistics.median(cpu_times), 6),
            "min": round(min(times), 6),
            "max": round(max(times), 6),
            "peak_rss_mb": round(self.peak_mb, 1),
            "setup_s": round(setup, 2),
            "setup_cpu_s": round(cpu_setup, 2),
        }

    def rounds(self) -> tuple[list[float], list[float]]:
        """Return the seconds that each round took that counts, and its seconds of processor time."""
        warmup = self.settings.warmup
        pairs = zip(self._starts[warmup:-1], self._ticks[warmup + 1 :], strict=True)
        times, cpu_times = zip(*(_since(start, end) for start, end in pairs), strict=True)
        return list(times), list(cpu_times)


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """Return what a line of figures says of its origin: the processor, its usable cores, the date."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {"machine": {"cpu": _cpu(), "cores": usable_cores()}, "date": today}


def _cpu() -> str:
    """Return the name of the processor."""
    with contextlib.suppress(OSError):
        for text in Path("/proc/cpuinfo").read_text().splitlines():
            if text.startswith("model name"):
                return " ".join(text.partition(":")[2].split())
    return platform.processor() or platform.machine()


def positive(text: str) -> int:
    """Return an argument of the command line as a whole number above 0.

    Raises:
        argparse.ArgumentTypeError: If it is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def peak_memory_mb() -> float:
    """Return the largest resident memory of this process and its descendants in MB.

    Peaks of the processes are added up; pages that they share, such as libraries, are counted once. Of a single process
    they are all counted: how many others have them too, of another system that waits for its turn, is not its matter.
    It is read once, after the last round: looking at the memory while rounds run would cost them time.
    """
    if not Path("/proc/self/smaps_rollup").exists():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
    total, family = 0, _family(os.getpid())
    for pid in family:
        try:
            peak = _kilobytes(Path(f"/proc/{pid}/status"), "VmHWM")
            now = _kilobytes(Path(f"/proc/{pid}/smaps_rollup"), "Rss")
            own = _kilobytes(Path(f"/proc/{pid}/smaps_rollup"), "Pss")
        except (OSError, StopIteration):  # it has ended
            continue
        total += peak if len(family) == 1 else peak - (now - own)
    return total * 1024 / 1e6


def _kilobytes(path: Path, name: str) -> int:
    with path.open() as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _family(root: int) -> list[int]:
    """Return a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found
