"""What a run through Flower costs: seconds a round, bytes on the wire, memory of server and sites, and what grows.

    python benchmarks/deploy.py --parameters 11000000 --sites 2 --clients 2 --rounds 8 --json
    python benchmarks/deploy.py --clients 60 --sites 3 --cohort 60 --rounds 200 --json

A real SuperLink and SuperNodes on this machine. Clients have 16 examples of 20 features each and take two local steps,
so that nearly all the time is the transport's. Bytes are those that Flower counts at the SuperLink; the first round's
have the greeting with them. Memory is the largest that one process of a kind had, looked at twice a second; CPU time is
that of all processes of the server, or of all sites, from their start. What may not grow is counted when a fifth of the
rounds is done, and at the end, and added up over processes of a kind. ``docs/deploy.md`` has figures.
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning_fed  # first: see lightning_fed.compat.torchvision
import psutil
import pytorch_lightning as pl
import torch

from lightning_fed.core.rounds import RoundReport
from lightning_fed.deploy.flower.local import LocalFlower
from lightning_fed.deploy.resident import log_of
from on_demand import Network, Population
from systems.measure import machine, positive
from systems.with_lightning_fed import make_method

__all__ = ["client_ids", "main", "make_data", "make_model", "make_trainer", "measure"]

_OPTIONS = "DEPLOY_BENCHMARK"  # the environment variable that tells Flower's processes what is run
_LOOK = 0.5  # seconds between two looks at the processes
_STAY = ("flower-superlink", "flwr-serverapp", "flower-supernode", "site process")
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for, and return the exit status."""
    args = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        line = measure(args, Path(folder))
    print(json.dumps(line) if args.json else "\n".join(f"{name:26} {value}" for name, value in line.items()))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=positive, default=8, help="rounds to run (%(default)s)")
    add("--sites", type=positive, default=2, help="SuperNodes (%(default)s)")
    add("--clients", type=positive, default=2, help="clients, which are dealt out to the sites (%(default)s)")
    add("--cohort", type=positive, help="clients a round; all by default")
    add("--parameters", type=int, default=0, help="of the model, at least about; 0 for the linear one of 210")
    add("--algorithm", default="FedAvg", help="the method (%(default)s)")
    add("--json", action="store_true", help="print one line of JSON")
    return parser


# ---------------------------------------------------------------------- what server and sites make


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
    """Return the data, which a site uses for its own clients alone."""
    return Population(_options()["clients"])


def client_ids() -> range:
    """Return the ids of all clients."""
    return range(_options()["clients"])


class NoteRounds(lightning_fed.FederatedCallback):
    """Note when rounds end, on the server.

    Args:
        marks: The file that gets a line for each.
    """

    def __init__(self, marks: Path) -> None:
        self.marks = marks

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round_report: RoundReport) -> None:
        """Note one."""
        with self.marks.open("a") as file:
            file.write(f"{time.time()}\n")


# ---------------------------------------------------------------------- what is measured


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run on real SuperNodes and return the figures.

    Args:
        args: What the command line says.
        folder: Where everything goes.

    Raises:
        RuntimeError: If the run does not end well.
    """
    app, marks = folder / "app", folder / "marks"
    (app / "measured").mkdir(parents=True)
    for name, text in (("__init__", ""), ("server_app", _SERVER_APP), ("client_app", _CLIENT_APP)):
        (app / "measured" / f"{name}.py").write_text(text)
    (app / "pyproject.toml").write_text(_PROJECT)
    marks.touch()
    options = {name: getattr(args, name) for name in ("rounds", "clients", "parameters", "algorithm")}
    os.environ[_OPTIONS] = json.dumps({**options, "cohort": args.cohort or args.clients, "marks": str(marks)})
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    sites = [folder / f"site{number}" for number in range(args.sites)]
    nodes = [
        f'client-id="{",".join(map(str, range(args.clients)[number :: args.sites]))}" state-dir="{site}"'
        for number, site in enumerate(sites)
    ]
    with LocalFlower(folder / "flower", nodes) as flower:
        watch, run = Watch(flower, sites, marks), flower.submit(app)
        watch.wait_for(max(2, args.rounds // 5), run)
        before = watch.standing()
        watch.wait_for(args.rounds - 1, run)  # after the last one the ServerApp may be gone
        after = watch.standing()
        while not (found := flower.described(run))["status"].startswith("finished"):
            time.sleep(1)
        watch.stop()
        if found["status"] != "finished:completed":
            raise RuntimeError(f"The run is {found['status']}: {flower.log('superlink')[-5000:]}")
    times, traffic = watch.times(), found["network-traffic"]
    seconds = statistics.median(end - begin for begin, end in itertools.pairwise(times))
    return {
        **options,
        "sites": args.sites,
        "cohort": args.cohort or args.clients,
        "s_per_round": round(seconds, 2),
        "mb_to_sites_per_round": round(traffic["outbound-bytes"] / 1e6 / args.rounds, 3),
        "mb_from_sites_per_round": round(traffic["inbound-bytes"] / 1e6 / args.rounds, 3),
        "mb_per_s": round(traffic["total-bytes"] / 1e6 / args.rounds / seconds, 3),
        **watch.figures(args.rounds),
        "grown": {name: [before[name], after[name]] for name in before},
        **machine(),
    }


class Watch:
    """Look at Flower's processes, and those that they start, until it is told to stop.

    Args:
        flower: They.
        sites: The folders of the sites.
        marks: The file that gets a line when a round ends.
    """

    def __init__(self, flower: LocalFlower, sites: Sequence[Path], marks: Path) -> None:
        self._flower, self._sites, self._marks = flower, sites, marks
        self._peak: dict[str, int] = {}  # by the kind of process, in bytes
        self._cpu: dict[psutil.Process, tuple[str, float]] = {}  # its side, and its seconds as last seen
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def times(self) -> list[float]:
        """Return when rounds have ended."""
        return [float(line) for line in self._marks.read_text().splitlines()]

    def wait_for(self, rounds: int, run: str) -> None:
        """Wait until some rounds are done.

        Args:
            rounds: How many.
            run: The run.

        Raises:
            RuntimeError: If the run ends before.
        """
        looked = time.monotonic()
        while len(self.times()) < rounds:
            time.sleep(_LOOK)
            if time.monotonic() - looked > 30:
                looked, status = time.monotonic(), self._flower.described(run)["status"]
                if status.startswith("finished") and len(self.times()) < rounds:
                    raise RuntimeError(f"The run is {status}: {self._flower.log('superlink')[-5000:]}")

    def _roots(self) -> Iterator[tuple[str, int]]:
        assert self._flower.superlink is not None
        yield "server", self._flower.superlink.pid
        for node in self._flower.supernodes.values():
            yield "sites", node.pid
        for site in self._sites:  # its process has a session of its own, and is nobody's child
            found = re.search(r"Process (\d+) answers", log_of(site).read_text()) if log_of(site).is_file() else None
            if found is not None:
                yield "sites", int(found[1])

    def _processes(self) -> Iterator[tuple[str, str, psutil.Process]]:
        """Yield side, kind and process."""
        for side, pid in self._roots():
            try:
                root = psutil.Process(pid)
                for process in (root, *root.children(recursive=True)):
                    words = process.cmdline()
                    kind = next((Path(word).name for word in words[:2] if "/fl" in word), "site process")
                    yield side, kind, process
            except psutil.Error:  # it has just ended
                continue

    def _look(self) -> None:
        while not self._is_over.wait(_LOOK):
            for side, kind, process in self._processes():
                try:
                    status = Path(f"/proc/{process.pid}/status").read_text()
                    spent = process.cpu_times()
                except (OSError, psutil.Error):
                    continue
                if (found := re.search(r"VmHWM:\s+(\d+) kB", status)) is not None:
                    self._peak[kind] = max(self._peak.get(kind, 0), 1024 * int(found[1]))
                self._cpu[process] = side, spent.user + spent.system

    def standing(self) -> dict[str, float]:
        """Return what must not grow: memory in MB, descriptors and threads of the processes that stay, and files."""
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
        found["files of the server"] = sum(len(files) for _, _, files in os.walk(self._flower.folder))
        return {name: round(value, 1) for name, value in found.items()}

    def stop(self) -> None:
        """Look no longer."""
        self._is_over.set()
        self._thread.join()

    def figures(self, rounds: int) -> dict[str, Any]:
        """Return the peaks of memory in MB, and the seconds of CPU that a round took.

        Args:
            rounds: The number of rounds.
        """
        cpu: dict[str, float] = defaultdict(float)
        for side, seconds in self._cpu.values():
            cpu[side] += seconds
        return {
            "peak_mb": {kind: round(peak / 1e6, 1) for kind, peak in sorted(self._peak.items())},
            "cpu_s_per_round_server": round(cpu["server"] / rounds, 2),
            "cpu_s_per_round_sites": round(cpu["sites"] / rounds, 2),
        }


if __name__ == "__main__":
    sys.exit(main())
