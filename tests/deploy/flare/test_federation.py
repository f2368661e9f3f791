"""A provisioned federation with certificates: aborts, deadlines, and processes that are killed."""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason='no NVFlare: pip install "lightning_fed[nvflare]"')

from nvflare.fuel.flare_api.api_spec import InternalError

from tests.deploy.flare.fake import SITES
from tests.deploy.flare.federation import Federation
from tests.deploy.flare.jobs import check_bits, rounds_in, site_processes, written_job
from tests.deploy.processes import is_alive, needs_linux, wait_for

METHOD, ROUNDS = "Scaffold ii", 5
KILLS = {"server": 1, "client": 1, "server job": 2, "client job": 2, "site process": 8}
pytestmark = [needs_linux, pytest.mark.thorough, pytest.mark.timeout(1800)]  # takes minutes on an idle machine


class Run:
    """A run that resubmits its job when it has ended, and restarts killed processes.

    Args:
        federation: FLARE's processes.
        folder: Holds the job, its checkpoint and its sites.
        controller: More arguments of the controller.
    """

    def __init__(self, federation: Federation, folder: Path, **controller: float) -> None:
        self.federation, self.folder = federation, folder
        folder.mkdir()
        self.checkpoint, self._file = folder / "last.ckpt", written_job(folder, **controller)
        self.job: str | None = None

    def pids(self, what: str) -> list[tuple[str, int]]:
        """Return the process ids of a kind, each with its site or the server."""
        members = ["server"] if what.startswith("server") else list(SITES)
        if what == "site process":
            return list(site_processes(self.folder).items())
        if what.endswith("job"):
            return [(name, pid) for name in members for pid in self.federation.job_processes(name)[-1:]]
        return [(name, self.federation.processes[name].pid) for name in members]

    def kill(self, what: str, chance: random.Random) -> bool:
        """Kill a process of a kind; return whether there was one."""
        if not (pids := self.pids(what)):
            return False
        name, pid = chance.choice(pids)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it has just ended
            return False
        if what in ("server", "client"):
            self.federation.processes[name].wait()
            self.federation.start(name)
            self.abort()  # FLARE does not let a client rejoin a job
        return True

    def abort(self) -> None:
        if (job := self.job) is not None:
            self.federation.status(job)  # waits until the server answers again
            with suppress(InternalError):  # the job has ended
                self.federation.session().abort_job(job)
        self.job = None

    def keep_up(self) -> None:
        """Submit the job again if it has ended."""
        if self.job is not None and self.federation.status(self.job).startswith("FINISHED"):
            self.job = None
        if self.job is None and not self.is_done():
            self.job = self.federation.submit(self._file)

    def is_done(self) -> bool:
        return rounds_in(self.checkpoint) >= ROUNDS

    def wait_for(self, holds: Callable[[], bool], seconds: float = 600.0) -> None:
        """Resubmit ended jobs until a condition holds."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, self.federation.log()
            self.keep_up()
            time.sleep(1)

    def ended(self) -> str:
        """Wait until the job has ended, and return its status."""
        assert self.job is not None
        while not (status := self.federation.status(self.job)).startswith("FINISHED"):
            time.sleep(1)
        return status


def test_abort_and_deadline_end_the_job_and_keep_the_checkpoint(tmp_path: Path) -> None:
    with Federation(tmp_path, METHOD) as federation:
        run = Run(federation, tmp_path / "run", phase_timeout=40)
        run.wait_for(lambda: rounds_in(run.checkpoint) >= 1)
        sites, job = site_processes(run.folder), run.job
        run.abort()
        run.job = job
        assert run.ended() == "FINISHED:ABORTED"
        wait_for(lambda: not any(map(is_alive, sites.values())))
        assert "The job was aborted. Submitted again, it continues from" in federation.log()
        done = rounds_in(run.checkpoint)
        assert 1 <= done < ROUNDS
        run.keep_up()
        run.wait_for(lambda: rounds_in(run.checkpoint) > done)
        silent = site_processes(run.folder)["site-3"]
        os.kill(silent, signal.SIGSTOP)
        assert run.ended() == "FINISHED:EXECUTION_EXCEPTION"
        assert "no reply arrived for 40 s" in federation.log()
        os.kill(silent, signal.SIGKILL)
        run.wait_for(run.is_done)
        assert run.ended() == "FINISHED:COMPLETED"
    check_bits(run.checkpoint, METHOD)


def test_fourteen_random_kills_yield_identical_bits(tmp_path: Path) -> None:
    chance, runs = random.Random(7), 0
    to_kill = [what for what, count in KILLS.items() for _ in range(count)]
    chance.shuffle(to_kill)
    with Federation(tmp_path, METHOD) as federation:
        while to_kill:
            run = Run(federation, tmp_path / str(runs))
            while to_kill and not run.is_done():
                run.wait_for(lambda run=run: bool(run.pids("site process")) or run.is_done())  # type: ignore[misc]
                end = time.monotonic() + chance.uniform(0.0, 20.0)
                run.wait_for(lambda run=run, end=end: time.monotonic() > end or run.is_done())  # type: ignore[misc]
                if not run.is_done() and run.kill(to_kill[-1], chance):
                    to_kill.pop()
            run.wait_for(run.is_done)
            check_bits(run.checkpoint, METHOD)
            runs += 1
