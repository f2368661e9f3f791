"""Real Flower processes, including the server's, are killed and restarted as the documentation describes."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason='no Flower: pip install "lightning_fed[flower]"')
pytest.importorskip("psutil", reason="no psutil, which finds the processes to kill")

import psutil

from lightning_fed.deploy.flower.configured import LocalFlower
from lightning_fed.deploy.site_process import socket_of
from tests.deploy.flower.test_local import ROOT, written_app
from tests.deploy.processes import is_alive, needs_linux, pid_of, wait_for
from tests.deploy.wire import make_trainer, simulated

METHOD, ROUNDS = "Scaffold ii", 5
KILLS = {"superlink": 3, "serverapp": 4, "clientapp": 3, "supernode": 9, "site process": 11}
_PATIENCE = 120.0  # seconds for a run's ServerApp to start
pytestmark = [
    needs_linux,
    pytest.mark.thorough,
    pytest.mark.timeout(1800),  # takes minutes on an idle machine
    pytest.mark.skipif(shutil.which("flower-superlink") is None, reason="no flower-superlink on the path"),
]


class Run:
    """A run that restarts its ended processes, as a service manager does.

    Args:
        flower: Flower's processes.
        app: The folder of the app.
        sites: The folders of the sites.
    """

    def __init__(self, flower: LocalFlower, app: Path, sites: list[Path]) -> None:
        self.flower, self.app, self.sites = flower, app, sites
        self.checkpoint = flower.folder / "last.ckpt"
        self.submitted = -_PATIENCE

    def pids(self, what: str) -> list[int]:
        """Return the process ids of a kind."""
        assert self.flower.superlink is not None
        nodes = list(self.flower.supernodes.values())
        if what in ("superlink", "supernode"):
            return [process.pid for process in (nodes if what == "supernode" else [self.flower.superlink])]
        if what == "site process":
            return [pid for site in self.sites for pid in listening(site)]
        roots = nodes if what == "clientapp" else [self.flower.superlink]
        return [pid for root in roots if root.poll() is None for pid in below(root.pid, f"flwr-{what}")]

    def kill(self, what: str, chance: random.Random) -> bool:
        """Kill a process of a kind; return whether there was one."""
        if not (pids := self.pids(what)):
            return False
        pid = chance.choice(pids)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it has just ended
            return False
        for own in (self.flower.superlink, *self.flower.supernodes.values()):
            if own is not None and own.pid == pid:
                own.wait()  # otherwise it stays a zombie, and Flower's SuperExec treats it as alive
        if what in ("superlink", "serverapp"):
            self.submitted = -_PATIENCE  # the run has ended
        return True

    def keep_up(self) -> None:
        """Restart ended processes, and submit the run if it has no ServerApp."""
        link = self.flower.superlink
        if link is None or link.poll() is not None:
            self.flower.start_superlink()
        for number, node in list(self.flower.supernodes.items()):
            if node.poll() is not None:
                self.flower.start_supernode(number)
        if time.monotonic() - self.submitted > _PATIENCE and not self.pids("serverapp") and not self.is_done():
            self.flower.submit(self.app)
            self.submitted = time.monotonic()

    def rounds(self) -> int:
        """Return the number of completed rounds in the checkpoint, or 0 without one."""
        if not self.checkpoint.is_file():
            return 0
        saved = torch.load(self.checkpoint, weights_only=True, map_location="meta", mmap=True)
        return int(saved["loops"]["fit_loop"]["state_dict"]["round"])

    def is_done(self) -> bool:
        return self.rounds() >= ROUNDS

    def wait_for(self, holds: Callable[[], bool], seconds: float = 600.0) -> None:
        """Restart ended processes until a condition holds."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, self.flower.log("superlink")[-5000:]
            self.keep_up()
            time.sleep(0.5)


def listening(site: Path) -> list[int]:
    try:
        return [pid_of(socket_of(site))]
    except OSError:
        return []


def below(pid: int, program: str) -> list[int]:
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            found += [process.pid] if any(program in word for word in process.cmdline()[:2]) else []
    return found


@contextmanager
def started(folder: Path, monkeypatch: pytest.MonkeyPatch, has_database: bool = True) -> Iterator[Run]:
    monkeypatch.setenv("METHOD", METHOD)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    sites = [folder / f"site{number}" for number in range(3)]
    nodes = [f'client-id="{ids}" state-dir="{site}"' for ids, site in zip(("0", "1", "2,3"), sites, strict=True)]
    options = ["--database", str(folder / "link.db")] if has_database else []
    with LocalFlower(folder / "flower", nodes, superlink=options) as flower:
        yield Run(flower, written_app(folder / "app"), sites)


def check_bits(checkpoint: Path) -> None:
    expected = simulated(partial(make_trainer, METHOD)).lightning_module.state_dict()
    found = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("has_database", [True, False], ids=["database", "memory"])
def test_run_resumes_after_the_server_processes_are_killed(
    has_database: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(0)
    with started(tmp_path, monkeypatch, has_database) as run:
        nodes = run.pids("supernode")
        run.wait_for(lambda: run.rounds() >= 1)
        assert run.kill("serverapp", chance)
        run.wait_for(lambda: run.rounds() >= 2)
        left = run.pids("serverapp")
        assert left
        assert run.kill("superlink", chance)
        wait_for(lambda: not any(map(is_alive, left)))  # a ServerApp ends with its SuperLink
        run.wait_for(run.is_done)
        assert (run.pids("supernode") == nodes) == has_database, "with a database, SuperNodes stay"
    check_bits(run.checkpoint)


def test_thirty_random_kills_yield_identical_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, runs = random.Random(31), 0
    to_kill = [what for what, count in KILLS.items() for _ in range(count)]
    chance.shuffle(to_kill)
    while to_kill:
        with started(tmp_path / str(runs), monkeypatch) as run:
            while to_kill and not run.is_done():
                run.wait_for(lambda run=run: bool(run.pids(to_kill[-1])) or run.is_done())  # type: ignore[misc]
                end = time.monotonic() + chance.uniform(0.0, 4.0)
                run.wait_for(lambda run=run, end=end: time.monotonic() > end or run.is_done())  # type: ignore[misc]
                if run.kill(to_kill[-1], chance):
                    to_kill.pop()
            run.wait_for(run.is_done)
        check_bits(run.checkpoint)
        runs += 1
