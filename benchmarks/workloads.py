"""Measure seconds per federated round: lightning_fed, a plain PyTorch loop and other federated simulators.

    python benchmarks/workloads.py --system lightning_fed --workload W1 --rounds 8 --json
    python benchmarks/workloads.py --system all --workload W1 W2 --python fedjax=PATH --render docs/benchmarks.md
    python benchmarks/workloads.py --against CHECKOUT --workload W1 W1x10 W2 W4 --algorithm FedAvg Mime Scaffold
    python benchmarks/workloads.py --without tracing turns whole-steps+turns --workload W2 --algorithm FedAvg Mime

One system on one workload is one line of JSON. Several run workload by workload, each in its own process. Each repeat
runs all systems once, so a busy machine affects all alike. With ``--in-turns 4``, they take turns every four rounds.
Systems other than lightning_fed may have their own environments: ``--python fedjax=PATH`` or the environment variable
``BENCHMARK_PYTHON_FEDJAX`` names their interpreter. Systems that are not installed are skipped.
``--against`` compares lightning_fed with another checkout of it, in turns and on one core. It prints ratios of seconds,
processor time, set-up and memory. ``--without`` does the same without some mechanisms, each by itself or several
joined by "+", to show the gain from each. ``systems/ablations.py`` names them.
``docs/benchmarks.md`` describes the workloads.
"""

import argparse
import contextlib
import importlib
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from systems import ablations, summary, variants
from systems.measure import Outcome, Settings, Stopwatch, machine, positive
from systems.problem import WORKLOADS, Problem, prepare
from systems.variants import Variant

PACKAGES = {
    "lightning_fed": "lightning_fed",
    "torch": "torch",
    "torch-2": "torch",  # the plain loop in two processes
    "fedjax": "fedjax",
    "pfl": "pfl",
    "flwr": "flwr",
    "fluke": "fluke",
}
"""The package that each system needs."""

Run: TypeAlias = tuple[str, str | Variant, str]  # workload, system, method

_OWN = "lightning_fed"
_PROCESSES = {"torch": 1, "torch-2": 2}
_ON_GPU = ("lightning_fed", "torch")


def main(argv: Sequence[str] | None = None) -> int:
    """Run, compare or render, and return the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.against is not None or (args.without and not args.here):
        if args.system is not None or args.render is not None:
            parser.error(
                "--against and --without compare lightning_fed with itself: they take no --system, no --render"
            )
        ablations.check(args.without, args.engine)
        return _compare(args, variants.variants(args.against, args.without))
    args.rounds = args.rounds or 8
    if args.system is None:
        if args.results is None or args.render is None:
            parser.error("--system is required, unless --results and --render make a page out of earlier runs")
        summary.insert(args.render, summary.tables(summary.read(args.results)))
        return 0
    runs = _runs(parser, args)
    if len(runs) == 1 and args.render is args.repeats is args.results is None:
        is_here = args.here or _python(args, runs[0][1]) is None
        line = _run_here(args, *runs[0]) if is_here else _run_one_by_one(args, runs)[0]
        if line is not None:
            print(json.dumps(line) if args.json else "\n".join(f"{name:12} {value}" for name, value in line.items()))
        return int(line is not None and "failed" in line)
    lines: list[dict[str, Any]] = []
    for workload, group in itertools.groupby(runs, key=lambda run: run[0]):
        its_runs, repeats = list(group), args.repeats or WORKLOADS[workload].repeats
        run_all = _run_in_turns if args.in_turns else _run_one_by_one
        found = summary.combine([run_all(args, its_runs) for _ in range(repeats)])
        lines += found
        if args.results is not None:
            with args.results.open("a") as file:
                file.writelines(f"{json.dumps(line)}\n" for line in found)
    print("\n".join(map(json.dumps, lines)) if args.json else summary.table(lines))
    if args.results is not None:
        lines = summary.read(args.results)
    if args.render is not None:
        summary.insert(args.render, summary.tables(lines))
    return int(any("failed" in line for line in lines))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--system", nargs="+", choices=[*PACKAGES, "all"], metavar="NAME", help=f"{', '.join(PACKAGES)}, or all")
    add("--workload", nargs="+", choices=list(WORKLOADS), default=["W1"], help="what to train")
    add("--rounds", type=positive, help="rounds to time; by default 8, in comparisons with itself the workload's own")
    add("--warmup", type=positive, help="rounds before them, the same for all systems; by default the workload's own")
    add("--repeats", type=positive, help="runs of each system, in turns; by default the workload's own")
    turns = "all systems at once in memory, each with so many rounds before the next has its own"
    add("--in-turns", type=positive, default=0, metavar="ROUNDS", help=turns)
    add("--algorithm", nargs="+", help="methods of lightning_fed; FedAvg, with all systems also Mime and Scaffold")
    add("--engine", choices=("auto", "sequential", "vectorized"), default="auto", help="engine of lightning_fed")
    add("--devices", type=positive, help="processes of lightning_fed and flwr, cores of fedjax; by default the best")
    add("--accelerator", choices=("cpu", "gpu"), default="cpu", help="gpu: lightning_fed and torch alone")
    add("--data", type=Path, default=_cache(), help="folder for the data, which is made when missing (%(default)s)")
    add("--python", action="append", type=_interpreter, default=[], metavar="NAME=PATH", help="a system's interpreter")
    add("--json", action="store_true", help="print lines of JSON")
    add("--results", type=Path, help="file of JSON lines to add the figures to, and to render from")
    add("--render", type=Path, metavar="PAGE", help="page to write the tables to, between its markers")
    compared = parser.add_mutually_exclusive_group().add_argument
    compared("--against", type=Path, metavar="CHECKOUT", help="compare lightning_fed with that of another checkout")
    compared("--without", nargs="+", default=[], metavar="NAME", help="and with itself without some of its mechanisms")
    add("--here", action="store_true", help=argparse.SUPPRESS)  # this interpreter is the system's own
    add("--every-round", action="store_true", help=argparse.SUPPRESS)  # the line has the time of each round
    return parser


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_fed" / "benchmarks"


def _interpreter(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if name not in PACKAGES:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH with one of the systems {', '.join(PACKAGES)}")
    if not os.access(path, os.X_OK):
        raise argparse.ArgumentTypeError(f"{path!r} is not a program: give the Python of the environment of {name}")
    return name, path


def _runs(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[Run]:
    """Return the runs (workload, system, method) of a repeat. Other systems only run FedAvg."""
    everything, on_gpu = "all" in args.system, args.accelerator == "gpu"
    systems = [name for name in PACKAGES if name in _ON_GPU or not on_gpu] if everything else args.system
    if on_gpu and not set(systems) <= set(_ON_GPU):
        parser.error(f"--accelerator gpu is for {' and '.join(_ON_GPU)} alone")
    methods = args.algorithm or (["FedAvg", "Mime", "Scaffold"] if everything else ["FedAvg"])
    runs = [
        (workload, system, method)
        for workload in args.workload
        for system in systems
        for method in methods
        if method == "FedAvg" or system == "lightning_fed"
    ]
    if not runs:
        parser.error("--algorithm: methods other than FedAvg are for lightning_fed alone")
    if args.in_turns and len(runs) < 2 and not args.here:
        parser.error("--in-turns: there is only one run")
    return runs


def _compare(args: argparse.Namespace, compared: Sequence[Variant]) -> int:
    """Compare lightning_fed with itself in all workloads and methods, print ratios, and return the exit status."""
    lines: list[dict[str, Any]] = []
    args.devices, args.every_round = args.devices or 1, True
    for workload, method in itertools.product(args.workload, args.algorithm or ["FedAvg"]):
        length, its = variants.LENGTHS[workload], argparse.Namespace(**vars(args))
        its.rounds, its.warmup = args.rounds or length.rounds, args.warmup or length.warmup
        its.in_turns = args.in_turns or length.turn
        runs, repeats = [(workload, variant, method) for variant in compared], []
        for i in range(args.repeats or 1):  # they take turns in starting first, since that one is up to 3 % slower
            step = -1 if i % 2 else 1
            repeats.append(_run_in_turns(its, runs[::step])[::step])
        lines += variants.compare(repeats)
    if args.results is not None:
        with args.results.open("a") as file:
            file.writelines(f"{json.dumps(line)}\n" for line in lines)
    print("\n".join(map(json.dumps, lines)) if args.json else variants.table(lines, args.against is not None))
    return int(any("failed" in line for line in lines))


def _python(args: argparse.Namespace, system: str) -> str | None:
    """Return the interpreter given for a system, or None."""
    return dict(args.python).get(system) or os.environ.get(f"BENCHMARK_PYTHON_{system.upper().replace('-', '_')}")


def _run_here(args: argparse.Namespace, workload: str, system: str, algorithm: str) -> dict[str, Any] | None:
    """Run a system in this process, and return its line, or None in a process that is not the first."""
    named = {"system": system, "workload": workload, "algorithm": algorithm}
    package = PACKAGES[system]
    if importlib.util.find_spec(package) is None:
        reason = (
            f"{package} is not installed in {sys.executable}; name the interpreter of its environment by"
            f" --python {system}=PATH (docs/benchmarks.md says how to make one)"
        )
        print(f"{system} is skipped: {reason}.", file=sys.stderr)
        return {**named, "skipped": reason}
    devices = _PROCESSES.get(system, args.devices)
    warmup = args.warmup or WORKLOADS[workload].warmup
    settings = Settings(args.rounds, warmup, devices, args.engine, algorithm, args.accelerator, args.in_turns)
    prepare(workload, args.data)
    problem = Problem(workload, args.data)
    stopwatch = Stopwatch(settings)
    for name in args.without:
        ablations.switch_off(name)
    with contextlib.redirect_stdout(sys.stderr):  # keep the systems' output out of the JSON
        module = importlib.import_module(f"systems.with_{package}")
        outcome: Outcome | None = module.run(problem, settings, stopwatch)
    if outcome is None:
        return None
    times, cpu_times = stopwatch.rounds()
    return {
        **named,
        **stopwatch.figures(),
        **({"rounds_s": times, "rounds_cpu_s": cpu_times} if args.every_round else {}),
        "loss_end": round(problem.loss(outcome.logits_of), 6),
        "rounds": settings.rounds,
        "warmup": settings.warmup,
        "in_turns": settings.in_turns,
        "config": outcome.config,
        **machine(),
    }


def _run_one_by_one(args: argparse.Namespace, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Run systems one after the other and return their lines."""
    return [_line_of(run, _start(args, *run)) for run in runs]


def _run_in_turns(args: argparse.Namespace, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Run systems in turns, and return their lines. One of them runs while the others are stopped.

    So a machine whose speed varies, such as a virtual one, affects all of them alike.
    """
    started: list[subprocess.Popen[str]] = []
    try:
        waiting = []
        for run in runs:  # one by one to the end of the warm-up
            started.append(_start(args, *run))
            waiting += [started[-1]] if _stops(started[-1]) else []
        while waiting:
            for process in list(waiting):
                os.killpg(process.pid, signal.SIGCONT)
                if not _stops(process):
                    waiting.remove(process)
        return [_line_of(run, process) for run, process in zip(runs, started, strict=True)]
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _stops(process: subprocess.Popen[str]) -> bool:
    """Wait until a process stops or ends, and return whether it has stopped."""
    change = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    has_stopped = change is not None and change.si_code == os.CLD_STOPPED
    if has_stopped:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    return has_stopped


def _start(args: argparse.Namespace, workload: str, system: str | Variant, algorithm: str) -> subprocess.Popen[str]:
    """Start a system in a fresh process. Its other output goes to standard error."""
    environment, without = dict(os.environ), ()
    if isinstance(system, Variant):
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(system.checkout), *filter(None, [environment.get("PYTHONPATH")])]
        )
        without, system = system.without, _OWN
    command = [_python(args, system) or sys.executable, __file__, "--here", "--json"]
    command += ["--system", system, "--workload", workload, "--algorithm", algorithm]
    command += ["--rounds", str(args.rounds), "--data", str(args.data)]
    command += ["--engine", args.engine, "--accelerator", args.accelerator]
    command += ["--warmup", str(args.warmup)] if args.warmup else []
    command += ["--devices", str(args.devices)] if args.devices else []
    command += ["--in-turns", str(args.in_turns)] if args.in_turns else []
    command += ["--every-round"] * args.every_round
    command += ["--without", *without] if without else []
    # its processes form their own group, so that they stop together
    group = args.in_turns > 0
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=group)  # noqa: S603


def _line_of(run: Run, process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a system to end, and return its line."""
    workload, system, algorithm = run
    printed, _ = process.communicate()
    lines = [text for text in printed.splitlines() if text.startswith("{")]
    name = system.name if isinstance(system, Variant) else system
    named = {"system": name, "workload": workload, "algorithm": algorithm}
    line: dict[str, Any] = json.loads(lines[-1]) if lines else {"failed": f"exit code {process.returncode}"}
    line |= named
    took = f"{line['s_per_round']} s a round" if "s_per_round" in line else line.get("failed", "skipped")
    print(f"{workload} {name} {algorithm}: {took}", file=sys.stderr)
    return line


if __name__ == "__main__":
    sys.exit(main())
