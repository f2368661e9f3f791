"""Measure a round's time and memory against cohort, population, model size, processes, and clients with a state.

    python benchmarks/scale.py --axis all --results scale.jsonl
    python benchmarks/scale.py --results scale.jsonl --render docs/benchmarks.md

Each point runs in its own process and is one line of JSON. Its memory is the peak resident memory, minus the resident
memory after a small run of the same kind. So it excludes imports and other one-time costs.
``docs/benchmarks.md`` describes the problem and has the figures.
"""

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import scale_page
from systems import summary
from systems.measure import Settings, Stopwatch, machine, positive

__all__ = ["AXES", "Point", "main"]


@dataclass(frozen=True)
class Point:
    """One run.

    Attributes:
        algorithm: The method.
        cohort: The number of clients per round.
        population: The number of all clients.
        parameters: The wanted size of the model.
        processes: Processes that share the clients.
        chunk: Clients that the vectorized engine runs at once.
        states: The store of clients' states, "memory" or "disk".
        rounds: Rounds to time; None for the number on the command line.
    """

    algorithm: str = "FedAvg"
    cohort: int = 100
    population: int = 100_000
    parameters: int = 10_000
    processes: int = 1
    chunk: int = 10
    states: str = "memory"
    rounds: int | None = None


_METHODS = ("FedAvg", "Scaffold")
AXES: dict[str, list[Point]] = {
    "cohort": [
        Point(method, cohort=cohort, parameters=100_000, states="disk")
        for method in (*_METHODS, "MimeLite")
        for cohort in (10, 30, 100, 300, 1000)
    ],
    "large": [
        Point(method, cohort=n, population=10**6, parameters=2000, chunk=100, states="disk", rounds=2)
        for method in _METHODS
        for n in (10**2, 10**3, 10**4, 10**5)
    ],
    "population": [Point(method, population=n) for method in _METHODS for n in (10**3, 10**4, 10**5, 10**6, 10**7)],
    "model": [
        Point(method, cohort=2, population=2, parameters=n, chunk=1)
        for method in _METHODS
        for n in (10**4, 10**5, 10**6, 10**7, 10**8)
    ],
    "processes": [Point(method, parameters=100_000, processes=n, chunk=1) for method in _METHODS for n in (1, 2)],
    "kept": [
        Point("Scaffold", cohort=1000, population=10**6, parameters=2000, chunk=100, states=where, rounds=rounds)
        for where in ("memory", "disk")
        for rounds in (10, 30, 100)
    ],
}
"""The points of each axis."""

_IDENTITY = (
    "axis",
    "algorithm",
    "cohort",
    "population",
    "wanted_parameters",
    "processes",
    "chunk",
    "states",
    "wanted_rounds",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen axes, and return the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.point is not None:
        point = Point(**json.loads(args.point))
        line = measure(point, point.rounds or args.rounds, args.warmup)
        if line is not None:  # None in a process that is not the first
            print(json.dumps(line))
        return 0
    if not args.axis and None in (args.results, args.render):
        parser.error("--axis is required, unless --results and --render make a page out of earlier runs")
    failed = False
    for axis in AXES if "all" in args.axis else args.axis:
        for point in AXES[axis]:
            if _value(axis, point) > args.up_to:
                continue
            line = _run_apart(axis, point, args.rounds, args.warmup)
            failed |= "failed" in line
            print(json.dumps(line), flush=True)
            if args.results is not None and "failed" not in line:
                with args.results.open("a") as file:
                    file.write(f"{json.dumps(line)}\n")
    if args.render is not None:
        scale_page.render(args.render, summary.read(args.results, _IDENTITY))
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--axis", nargs="+", choices=[*AXES, "all"], default=[], help="what to vary")
    add("--rounds", type=positive, default=5, help="rounds to time (%(default)s)")
    add("--warmup", type=positive, default=1, help="rounds before them (%(default)s)")
    add("--up-to", type=positive, default=sys.maxsize, help="leave out points whose value on the axis is larger")
    add("--results", type=Path, help="file of JSON lines to add the figures to, and to render from")
    add("--render", type=Path, metavar="PAGE", help="page to write tables and figure to, between its markers")
    add("--point", help=argparse.SUPPRESS)  # one point, in this process, as JSON
    return parser


def _value(axis: str, point: Point) -> int:
    value: int = getattr(point, {"large": "cohort", "model": "parameters", "kept": "rounds"}.get(axis, axis))
    return value


def _run_apart(axis: str, point: Point, rounds: int, warmup: int) -> dict[str, Any]:
    """Run a point in a fresh process, and return its line. Its messages go to standard error."""
    command = [sys.executable, __file__, "--rounds", str(rounds), "--warmup", str(warmup)]
    done = subprocess.run(  # noqa: S603
        [*command, "--point", json.dumps(asdict(point))], stdout=subprocess.PIPE, text=True
    )
    lines = [text for text in done.stdout.splitlines() if text.startswith("{")]
    if done.returncode or not lines:
        return {"axis": axis, **asdict(point), "failed": f"exit code {done.returncode}"}
    return {"axis": axis, **json.loads(lines[-1])}


def measure(point: Point, rounds: int, warmup: int) -> dict[str, Any] | None:
    """Train in this process, and return the figures, or None in a process that is not the first."""
    if point.processes == 1:
        _train(replace(point, cohort=2, population=2, parameters=1000), rounds=2, warmup=1)
    resident = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    started = time.perf_counter()
    found = _train(point, rounds, warmup)
    if found is None:
        return None
    parameters, kept, kept_bytes, stopwatch = found
    alone = {"peak_above_mb": round((_memory("VmHWM") - resident) / 1e6, 1)} if point.processes == 1 else {}
    return {
        **asdict(point),
        "wanted_parameters": point.parameters,
        "wanted_rounds": point.rounds,
        "parameters": parameters,
        "model_mb": round(4 * parameters / 1e6, 3),
        **stopwatch.figures(),
        **alone,
        "kept_clients": kept,
        "kept_mb": round(kept_bytes / 1e6, 1),
        "seconds": round(time.perf_counter() - started, 1),
        "rounds": rounds,
        "warmup": warmup,
        **machine(),
    }


def _train(point: Point, rounds: int, warmup: int) -> tuple[int, int, int, Stopwatch] | None:
    """Train, and return the number of parameters, the number of kept states, their bytes, and the times of rounds."""
    import lightning_fed  # first: see lightning_fed.compat.torchvision
    import torch

    from on_demand import Network, Population
    from systems.with_lightning_fed import Ticks, make_method

    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)  # keep the output pure JSON
    torch.set_num_threads(1)
    torch.manual_seed(0)
    stopwatch = Stopwatch(Settings(rounds, warmup))
    method, model = make_method(point.algorithm), Network(point.parameters)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning_fed.FederatedTrainer(
            algorithm=method, max_rounds=rounds + warmup, clients_per_round=point.cohort, local_epochs=1, seed=0,
            engine="vectorized", chunk_size=point.chunk, client_states=point.states,
            client_states_dir=folder if point.states == "disk" else None, accelerator="cpu", devices=point.processes,
            strategy="clients" if point.processes > 1 else "auto", callbacks=Ticks(stopwatch), logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
        )  # fmt: skip
        trainer.fit(model, Population(point.population))
        state = trainer.fit_loop.state
        kept, of_one = len(state.clients), sum(value.nbytes for value in method.init_client(state.x).values())
    if not trainer.is_global_zero:
        return None
    return sum(p.numel() for p in model.parameters()), kept, kept * of_one, stopwatch


def _memory(name: str) -> int:
    """Return a figure of this process's memory in bytes."""
    with Path("/proc/self/status").open() as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    sys.exit(main())
