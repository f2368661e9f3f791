"""Measure the cost of a run with real clients: seconds per round, CPU time, memory of server and sites, and growth.

    python benchmarks/deploy.py --parameters 11000000 --sites 2 --clients 2 --rounds 8 --json
    python benchmarks/deploy.py --clients 60 --sites 3 --cohort 60 --rounds 200 --json
    python benchmarks/deploy.py --transport flower nvflare nvflare-own --algorithm Scaffold --json

``flower`` is a real SuperLink with SuperNodes on this machine. ``nvflare`` runs the same clients in FLARE's simulator.
``nvflare-own`` runs the same job in the same simulator without lightning_fed: with NVFlare's ScaffoldRecipe and its
patched Trainer. Both run the sites' script in FLARE's own process, the default. The transports run one after the
other, in the order given. One may be given several times.

Clients have 16 examples of 20 features each and take two local steps, so the transport takes nearly all the time.
The first round is a warm-up. Seconds and CPU time are measured from its end to the end of the last round. CPU time
includes processes that have ended. All processes are sampled twice a second. ``peak_mb`` is the largest resident size
of one process of a kind. ``peak_mb_of_all`` is the largest sum over all processes, and counts a shared page once.
Flower counts the bytes at the SuperLink, including the greeting. Quantities that must not grow are measured after a
fifth of the rounds and at the end, and summed over processes of a kind. ``docs/deploy.md`` has figures.
"""

import argparse
import itertools
import json
import os
import re
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning_fed  # first: see lightning_fed.compat.torchvision
import psutil
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from lightning_fed.core.rounds import RoundReport
from lightning_fed.deploy.flare.configured import simulator
from lightning_fed.deploy.flower.configured import LocalFlower
from lightning_fed.deploy.site_process import log_of
from nvflare_scaffold import QUIET, scaffold_recipe, train_as_client
from on_demand import BATCH, Network, Population
from systems.measure import machine, positive
from systems.with_lightning_fed import make_method

__all__ = ["client_ids", "main", "make_data", "make_model", "make_trainer", "measure", "serve_own"]

_OPTIONS = "DEPLOY_BENCHMARK"  # the environment variable with the options for the processes of the run
_LOOK = 0.5  # seconds between two samples of the processes
_STAY = ("flower-superlink", "flwr-serverapp", "flower-supernode", "simulator", "simulator_worker", "site process")
_PROJECT = """
[project]
name = "measured"
version = "1.0.0"
dependencies = []

[tool.flwr.app]
publisher = "nobody"

[tool.flwr.app.components]
serverapp = "measured.server_app:app"
clientapp = "measured.client_app:app"
"""
_SERVER_APP = """
from lightning_fed.deploy.flower import server_app
app = server_app("deploy:make_trainer", "deploy:make_model", "deploy:client_ids", "last.ckpt")
"""
_CLIENT_APP = """
from lightning_fed.deploy.flower import client_app
app = client_app("deploy:make_trainer", "deploy:make_model", "deploy:make_data")
"""
_MAKERS = {f"make_{what}": f"deploy:make_{what}" for what in ("trainer", "model")}
_SITE_SCRIPT = """
from lightning_fed.deploy.flare import serve_site
serve_site("deploy:make_trainer", "deploy:make_model", "deploy:make_data", {sites!r}, {state_dir!r})
"""
_OWN_SCRIPT = """
import importlib  # hides the import from FLARE, which would copy its sources into the job
importlib.import_module("deploy").serve_own()
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the chosen transports, and return the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.rounds < 3:
        parser.error("--rounds must be at least 3: one warms up, and seconds are taken of at least two")
    same_job = args.algorithm == "Scaffold" and args.sites == args.clients == _cohort(args)
    if "nvflare-own" in args.transport and not same_job:
        parser.error("nvflare-own runs --algorithm Scaffold, with one client a site and all clients in each round")
    for transport in args.transport:
        with tempfile.TemporaryDirectory() as folder:
            line = measure(args, Path(folder), transport)
        print(json.dumps(line) if args.json else "\n".join(f"{name:26} {value}" for name, value in line.items()))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--transport", nargs="+", choices=_TRANSPORTS, default=["flower"], help="what carries the messages (flower)")
    add("--rounds", type=positive, default=8, help="rounds to run, of which the first warms up (%(default)s)")
    add("--sites", type=positive, default=2, help="SuperNodes, or clients of FLARE (%(default)s)")
    add("--clients", type=positive, default=2, help="clients, which are dealt out to the sites (%(default)s)")
    add("--cohort", type=positive, help="clients a round; all by default")
    add("--parameters", type=int, default=0, help="of the model, at least about; 0 for the linear one of 210")
    add("--algorithm", default="FedAvg", help="the method (%(default)s)")
    add("--json", action="store_true", help="print one line of JSON")
    return parser


def _cohort(args: argparse.Namespace) -> int:
    return int(args.cohort or args.clients)


# ---------------------------------------------------------------------- objects of server and sites


def _options() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(os.environ[_OPTIONS])
    return found


def make_trainer() -> pl.Trainer:
    """Return the trainer."""
    torch.set_num_threads(1)
    options = _options()
    return lightning_fed.FederatedTrainer(
        algorithm=make_method(options["algorithm"]), max_rounds=options["rounds"], clients_per_round=options["cohort"],
        local_epochs=1, seed=0, engine="sequential", accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
        callbacks=[NoteRounds(Path(options["marks"]))],
    )  # fmt: skip


def make_model() -> pl.LightningModule:
    """Return the model, always with the same parameters."""
    torch.manual_seed(0)
    return Network(_options()["parameters"])


def make_data(node_config: Mapping[str, Any]) -> lightning_fed.FederatedDataModule:
    """Return the data. A site uses only its own clients' data."""
    return Population(_options()["clients"])


def client_ids() -> range:
    """Return the ids of all clients."""
    return range(_options()["clients"])


class NoteRounds(lightning_fed.FederatedCallback):
    """Record the ends of rounds, on the server.

    Args:
        marks: The file that gets a line for each round.
    """

    def __init__(self, marks: Path) -> None:
        self.marks = marks

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round_report: RoundReport) -> None:
        """Record one."""
        _note(self.marks)


def _note(marks: Path) -> None:
    with marks.open("a") as file:
        file.write(f"{time.time()}\n")


def serve_own() -> None:
    """Train as a client of NVFlare's own SCAFFOLD. The first site records its rounds."""
    import nvflare.client as flare

    torch.set_num_threads(1)
    flare.init()
    options, site = _options(), flare.get_site_name()
    data = Population(options["clients"]).client_dataset(int(site.rpartition("-")[2]) - 1)
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", limit_val_batches=0, **QUIET)
    done = (lambda: _note(Path(options["marks"]))) if site == "site-1" else None
    train_as_client(trainer, make_model(), DataLoader(data, BATCH, shuffle=True), done)


# ---------------------------------------------------------------------- transports


@dataclass
class Started:
    """A run that has been started.

    Attributes:
        roots: Returns the side of each root process by its id.
        folder: The files of the server.
        ended: Returns None while the run continues, then an empty text or the error.
        facts: Returns the transport's own counts.
    """

    roots: Callable[[], Mapping[int, str]]
    folder: Path
    ended: Callable[[], str | None]
    facts: Callable[[], Mapping[str, float]] = dict


def _shares(args: argparse.Namespace) -> dict[str, list[int]]:
    return {f"site-{number + 1}": list(range(args.clients)[number :: args.sites]) for number in range(args.sites)}


@contextmanager
def _flower(args: argparse.Namespace, folder: Path) -> Iterator[Started]:
    app = folder / "app"
    (app / "measured").mkdir(parents=True)
    for name, text in (("__init__", ""), ("server_app", _SERVER_APP), ("client_app", _CLIENT_APP)):
        (app / "measured" / f"{name}.py").write_text(text)
    (app / "pyproject.toml").write_text(_PROJECT)
    nodes = [
        f'client-id="{",".join(map(str, share))}" state-dir="{folder / "sites" / site}"'
        for site, share in _shares(args).items()
    ]
    with LocalFlower(folder / "server", nodes) as flower:
        run = flower.submit(app)

        def roots() -> dict[int, str]:
            assert flower.superlink is not None
            return {flower.superlink.pid: "server", **{node.pid: "sites" for node in flower.supernodes.values()}}

        def ended() -> str | None:
            status = flower.status(run)
            if status == "finished:completed":
                return ""
            return f"{status}: {flower.log('superlink')[-5000:]}" if status.startswith("finished") else None

        def facts() -> dict[str, float]:
            traffic = flower.described(run)["network-traffic"]
            names = {"mb_to_sites_per_round": "outbound-bytes", "mb_from_sites_per_round": "inbound-bytes"}
            return {name: round(traffic[counted] / 1e6 / args.rounds, 3) for name, counted in names.items()}

        yield Started(roots, flower.folder, ended, facts)


@contextmanager
def _simulated(job: Path, folder: Path, args: argparse.Namespace) -> Iterator[Started]:
    workspace, log = folder / "server", folder / "log"
    with log.open("wb") as file, simulator(job, workspace, list(_shares(args)), log=file) as process:

        def ended() -> str | None:
            status = process.poll()
            return f"ended with {status}: {log.read_text()[-5000:]}" if status else None if status is None else ""

        yield Started(lambda: {process.pid: "server"}, workspace, ended)


@contextmanager
def _nvflare(args: argparse.Namespace, folder: Path) -> Iterator[Started]:
    job, shares = folder / "job", _shares(args)
    for made in (job / "app" / "config", job / "app" / "custom"):
        made.mkdir(parents=True)
    script = _SITE_SCRIPT.format(sites=shares, state_dir=str(folder / "sites"))
    (job / "app" / "custom" / "serve.py").write_text(script)
    given = {"client_ids": "deploy:client_ids", "checkpoint": str(folder / "last.ckpt"), "sites": shares}
    workflow = {"id": "rounds", "path": "lightning_fed.deploy.flare.RoundsController", "args": {**_MAKERS, **given}}
    executor = {
        "path": "nvflare.app_common.executors.client_api_executor.ClientAPIExecutor",
        "args": {"execution_mode": "in_process", "task_script_path": "serve.py", "params_exchange_format": "numpy"},
    }
    executors = [{"tasks": ["train"], "executor": executor}]
    files = {
        "meta": {"name": "job", "min_clients": args.sites, "deploy_map": {"app": ["@ALL"]}, "resource_spec": {}},
        "app/config/config_fed_server": {"format_version": 2, "workflows": [workflow]},
        "app/config/config_fed_client": {"format_version": 2, "executors": executors},
    }
    for name, content in files.items():
        (job / f"{name}.json").write_text(json.dumps(content))
    with _simulated(job, folder, args) as started:
        yield started


@contextmanager
def _nvflare_own(args: argparse.Namespace, folder: Path) -> Iterator[Started]:
    script = folder / "own.py"
    script.write_text(_OWN_SCRIPT)
    model = {"class_path": "on_demand.Network", "args": {"parameters": args.parameters}}
    recipe = scaffold_recipe(model, args.sites, args.rounds, script)
    recipe.export(str(folder / "jobs"))
    with _simulated(folder / "jobs" / recipe.name, folder, args) as started:
        yield started


_TRANSPORTS = {"flower": _flower, "nvflare": _nvflare, "nvflare-own": _nvflare_own}


# ---------------------------------------------------------------------- measurement


def measure(args: argparse.Namespace, folder: Path, transport: str = "flower") -> dict[str, Any]:
    """Run with real processes, and return the measurements.

    Args:
        args: The options of the command line.
        folder: The folder for all files.
        transport: The transport of the messages.

    Raises:
        RuntimeError: If the run fails.
    """
    marks = folder / "marks"
    marks.touch()
    options = {name: getattr(args, name) for name in ("rounds", "clients", "parameters", "algorithm")}
    os.environ[_OPTIONS] = json.dumps({**options, "cohort": _cohort(args), "marks": str(marks)})
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with _TRANSPORTS[transport](args, folder) as started:
        watch = Watch(started, [folder / "sites" / site for site in _shares(args)], marks)
        watch.wait_for(max(2, args.rounds // 5))
        before = watch.standing()
        watch.wait_for(args.rounds - 1)  # the server may exit after the last round
        after = watch.standing()
        while (wrong := started.ended()) is None:
            time.sleep(1)
        watch.stop()
        if wrong:
            raise RuntimeError(f"The run is {wrong}")
        facts = started.facts()
    return {
        "transport": transport,
        **options,
        "sites": args.sites,
        "cohort": _cohort(args),
        **facts,
        **watch.figures(),
        "grown": {name: [before[name], after[name]] for name in before},
        **machine(),
    }


class Watch:
    """Sample the processes of a run until it is stopped.

    Args:
        started: The run.
        sites: The folders of the sites.
        marks: The file that gets a line when a round ends.
    """

    def __init__(self, started: Started, sites: Sequence[Path], marks: Path) -> None:
        self._started, self._sites, self._marks = started, sites, marks
        self._peak: dict[str, int] = {}  # by the kind of process, in bytes
        self._peak_of_all = 0
        self._cpu: list[tuple[float, dict[str, float]]] = []  # the time, and the CPU seconds of each side until then
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self._thread.start()

    def times(self) -> list[float]:
        """Return the end times of rounds."""
        return [float(line) for line in self._marks.read_text().splitlines()]

    def wait_for(self, rounds: int) -> None:
        """Wait until some rounds are done.

        Args:
            rounds: The number of rounds.

        Raises:
            RuntimeError: If the run ends earlier.
        """
        looked = time.monotonic()
        while len(self.times()) < rounds:
            time.sleep(_LOOK)
            if time.monotonic() - looked > 30:  # asking Flower starts a process
                looked, wrong = time.monotonic(), self._started.ended()
                if wrong is not None and len(self.times()) < rounds:
                    raise RuntimeError(f"The run is over after {len(self.times())} rounds: {wrong}")

    def _roots(self) -> dict[int, str]:
        found = {}
        for site in self._sites:  # its process has no parent if its starter has ended
            if log_of(site).is_file() and (line := re.search(r"Process (\d+) answers", log_of(site).read_text())):
                found[int(line[1])] = "sites"
        return {**found, **self._started.roots()}

    def _processes(self) -> Iterator[tuple[str, str, psutil.Process]]:
        """Yield side, kind and process, each process once."""
        seen = set()
        for pid, side in self._roots().items():
            try:
                root = psutil.Process(pid)
                for process in (root, *root.children(recursive=True)):
                    if process not in seen:
                        seen.add(process)
                        kind = _kind_of(process.cmdline())
                        yield "sites" if kind == "simulator_worker" else side, kind, process
            except psutil.Error:  # the process has just ended
                continue

    def _look_on(self) -> None:
        self.look()
        while not self._is_over.wait(_LOOK):
            self.look()

    def look(self) -> None:
        """Sample all processes once."""
        spent, of_all = {"server": 0.0, "sites": 0.0}, 0
        for side, kind, process in self._processes():
            try:
                spent[side] += sum(process.cpu_times()[:4])  # includes children that have ended
                of_all += process.memory_full_info().pss
                status = Path(f"/proc/{process.pid}/status").read_text()
            except (OSError, psutil.Error):
                continue
            if (found := re.search(r"VmHWM:\s+(\d+) kB", status)) is not None:
                self._peak[kind] = max(self._peak.get(kind, 0), 1024 * int(found[1]))
        self._peak_of_all = max(self._peak_of_all, of_all)
        self._cpu.append((time.time(), spent))

    def standing(self) -> dict[str, float]:
        """Return quantities that must not grow: memory (MB), descriptors and threads of lasting processes, files."""
        found: dict[str, float] = defaultdict(float)
        for _, kind, process in self._processes():
            if kind in _STAY:
                try:
                    found[f"{kind}: MB"] += round(process.memory_info().rss / 1e6, 1)
                    found[f"{kind}: descriptors"] += process.num_fds()
                    found[f"{kind}: sockets"] += len(process.net_connections("all"))
                    found[f"{kind}: threads"] += process.num_threads()
                except psutil.Error:
                    continue
        found["files of sites"] = sum(len(files) for site in self._sites for _, _, files in os.walk(site))
        found["files of the server"] = sum(len(files) for _, _, files in os.walk(self._started.folder))
        return {name: round(value, 1) for name, value in found.items()}

    def stop(self) -> None:
        """Stop sampling."""
        self._is_over.set()
        self._thread.join()

    def figures(self) -> dict[str, Any]:
        """Return seconds and CPU time of the rounds after the first, and the peaks of memory in MB."""
        times = self.times()
        seconds = [end - begin for begin, end in itertools.pairwise(times)]
        start, end = ([spent for when, spent in self._cpu if when <= mark][-1] for mark in (times[0], times[-1]))
        cpu = {side: (end[side] - start[side]) / len(seconds) for side in end}
        return {
            "s_per_round": round(statistics.median(seconds), 2),
            "min": round(min(seconds), 2),
            "max": round(max(seconds), 2),
            "cpu_s_per_round": round(sum(cpu.values()), 2),
            **{f"cpu_s_per_round_{side}": round(value, 2) for side, value in cpu.items()},
            "peak_mb_of_all": round(self._peak_of_all / 1e6, 1),
            "peak_mb": {kind: round(peak / 1e6, 1) for kind, peak in sorted(self._peak.items())},
        }


def _kind_of(command: Sequence[str]) -> str:
    """Return a process's kind by its command line: a command of Flower, a module of FLARE, or a site's process."""
    for word in command[:3]:
        if (name := Path(word).name).startswith(("flower-", "flwr-")):
            return name
        if word.startswith("nvflare."):
            return word.rpartition(".")[2]
    return "site process"


if __name__ == "__main__":
    sys.exit(main())
