"""Run a command, print its wall and CPU time, and fail if it needs more CPU time than its budget.

    python .ci/budget.py --wall 240 --cpu 420 -- pytest -n auto

CPU seconds depend on the machine, so a fixed loop is timed before and after the command, on all cores at once like the
tests. The budget is in seconds of the reference machine, where that loop takes ``REFERENCE`` seconds. The exit status
is the command's own, or 1 if the command passes and uses more than ``TOLERANCE`` times its CPU budget. The wall time
is only printed, since it depends on the machine's other load.
"""

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from os import cpu_count

REFERENCE = 0.6  # CPU seconds of `calibrate` on two idle cores of an Intel Xeon with AVX-512, Python 3.11
TOLERANCE = 1.2
LOOPS = 3_000_000


def calibrate(loops: int) -> float:
    """Return the CPU seconds of a fixed amount of interpreted work, the least of three runs."""
    found = []
    for _ in range(3):
        start = time.process_time()
        table: dict[int, int] = {}
        for i in range(loops):
            key = i * 7 % 997
            table[key] = table.get(key, 0) + len(str(i))
        found.append(time.process_time() - start)
    return min(found)


def slowness(processes: int, loops: int) -> float:
    """Return this machine's time as a multiple of the reference machine's, with all cores busy."""
    with ProcessPoolExecutor(processes) as pool:
        seconds = sum(pool.map(calibrate, [loops] * processes)) / processes
    return seconds / (REFERENCE * loops / LOOPS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, or 1 if it is over budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wall", type=float, required=True, help="seconds; printed beside the measured time")
    parser.add_argument("--cpu", type=float, required=True, help="CPU seconds of the reference machine")
    parser.add_argument("--processes", type=int, default=min(cpu_count() or 1, 8), help="that the command uses")
    parser.add_argument("--loops", type=int, default=LOOPS, help="of the calibration")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(arguments)

    before = slowness(given.processes, given.loops)
    used, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    status = subprocess.run(given.command, check=False).returncode  # noqa: S603 - the caller's own command
    wall, total = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = total.ru_utime + total.ru_stime - used.ru_utime - used.ru_stime
    factor = (before + slowness(given.processes, given.loops)) / 2

    limit = TOLERANCE * given.cpu * factor
    print(
        f"budget: {wall:.0f} s (goal {given.wall:g} s on 2 idle cores), {cpu:.0f} s of CPU; on the reference machine"
        f" {cpu / factor:.0f} s of CPU (goal {given.cpu:g} s): this one takes {factor:.2f} times as long"
    )
    if status == 0 and cpu > limit:
        print(f"over budget: {cpu:.0f} s of CPU, at most {limit:.0f} s. Move slow tests behind the marker `thorough`.")
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
