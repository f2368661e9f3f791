"""The process of a site, which nobody else may use."""

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_fed.deploy.site_process import SiteProcess
from tests.deploy.processes import is_alive, needs_linux, pid_of, wait_for

APP = "def trainer(): raise OSError('no such disk')\nmodel = data = trainer\n"  # refused before PyTorch is needed


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SiteProcess]]:
    """Return what makes the process of a site."""
    (tmp_path / "own_app.py").write_text(APP)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    made: list[SiteProcess] = []

    def make(**node_config: Any) -> SiteProcess:
        makers = {name: f"own_app:{name}" for name in ("trainer", "model", "data")}
        config = {"client-id": "north", "state-dir": str(tmp_path / "site"), **node_config}
        made.append(SiteProcess(makers, config, parent.pid))
        made[-1].parent = parent  # type: ignore[attr-defined]
        return made[-1]

    yield make
    parent.kill()
    parent.wait()
    for process in made:
        wait_for(lambda process=process: not process.socket.exists() or not _listens(process.socket))  # type: ignore[misc]


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


@needs_linux
def test_a_sites_process_stays_until_it_is_killed_or_its_parent_ends(site: Callable[..., SiteProcess]) -> None:
    first = site()
    _, refused = first.answer({"0": b"nothing"})
    assert f"OSError: no such disk (the site's log is {first.state_dir}/site.log)" in refused["0"]
    pid = pid_of(first.socket)
    first.answer({"0": b"nothing"})
    assert pid_of(first.socket) == pid, "it stays"
    same = site(**{"state-dir": str(first.state_dir), "client-id": "north"})  # in another order, as Flower gives it
    same.answer({"0": b"nothing"})
    assert pid_of(first.socket) == pid
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(pid))
    first.answer({"0": b"nothing"})
    second = pid_of(first.socket)
    assert second != pid
    site(data="other").answer({"0": b"nothing"})  # another app: there is never more than one for a site's folder
    third = pid_of(first.socket)
    assert third != second
    wait_for(lambda: not is_alive(second))
    first.parent.kill()  # type: ignore[attr-defined]
    wait_for(lambda: not is_alive(third))


@needs_linux
def test_nobody_else_can_open_its_socket_or_its_folder(site: Callable[..., SiteProcess]) -> None:
    process = site()
    process.answer({"0": b"nothing"})
    for path, mode in ((process.socket.parent, 0o700), (process.socket, 0o600), (process.state_dir, 0o700)):
        assert stat.S_IMODE(path.stat().st_mode) == mode
        assert path.stat().st_uid == os.getuid()


@needs_linux
def test_the_process_runs_the_app_that_was_sent(
    site: Callable[..., SiteProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_in = tmp_path / "checkout"
    started_in.mkdir()
    (started_in / "own_app.py").write_text(APP.replace("no such disk", "an older copy"))
    monkeypatch.chdir(started_in)
    process = site()
    _, refused = process.answer({"0": b"nothing"})
    assert "OSError: no such disk" in refused["0"]
    pid = pid_of(process.socket)
    assert Path(f"/proc/{pid}/cwd").resolve() == process.state_dir
    assert stat.S_IMODE((process.state_dir / "site.log").stat().st_mode) & 0o077 == 0


@pytest.mark.thorough
@needs_linux
def test_the_log_says_why_a_process_does_not_start(site: Callable[..., SiteProcess], tmp_path: Path) -> None:
    process = site()
    folder = tmp_path / "hidden"
    (folder / "filelock").mkdir(parents=True)
    (folder / "filelock" / "__init__.py").write_text("raise SystemExit('the disk is full')")
    process._paths.insert(0, str(folder))
    replies, refused = process.answer({"0": b"nothing", "1": b"nothing"})
    assert not replies
    assert "has ended 3 times (it ended with 1 before it was ready)" in refused["1"]
    assert refused["0"].endswith("Its last words: the disk is full")
    (process.state_dir / "privacy").mkdir()
    replies, refused = process.answer({"0": b"nothing"})
    assert refused["0"].endswith("site.log, which does not leave the site under client_privacy")
