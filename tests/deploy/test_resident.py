"""The process that stays on a site: it starts, answers, starts anew, ends with its parent, lets nobody else in."""

import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason='no Flower: pip install "lightning_fed[flower]"')

from lightning_fed.deploy.flower.client import SiteProcess
from lightning_fed.deploy.flower.resident import Resident, receive, send, socket_of

APP = "def trainer(): raise OSError('no such disk')\nmodel = data = trainer\n"  # refused before PyTorch is needed


def pid_of(path: Path) -> int:
    """Return the process that listens at a socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(path))
        pid: int = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return pid


def wait_for(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


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


needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's lists of processes")


@needs_linux
def test_it_is_started_answers_is_started_anew_and_ends_with_its_parent(site: Callable[..., SiteProcess]) -> None:
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


def test_a_folder_that_others_can_open_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = socket_of(tmp_path / "site").parent
    folder.chmod(0o750)
    with pytest.raises(OSError, match="must be a folder of this user's with mode 0700"):
        socket_of(tmp_path / "site")
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(OSError, match="must be a folder of this user's"):
        socket_of(tmp_path / "site")


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


def test_frames_come_whole_or_not_at_all() -> None:
    one, other = socket.socketpair()
    with one, other:
        one.settimeout(60)
        send(other, b"T", b"content")
        assert receive(one) == (b"T", b"content")
        other.sendall(b"T" + (9).to_bytes(8, "big") + b"half")
        other.close()
        with pytest.raises(ConnectionError, match="in the middle"):
            receive(one)
        assert receive(one) is None


def test_an_error_in_the_users_code_is_named_and_does_not_stay(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    (tmp_path / "broken_app.py").write_text(APP)
    monkeypatch.syspath_prepend(str(tmp_path))
    makers = {name: f"broken_app:{name}" for name in ("trainer", "model", "data")}
    node_config = {"client-id": 0, "state-dir": str(tmp_path / "site")}
    resident = Resident({"makers": makers, "node_config": node_config, "parent": os.getpid(), "paths": []})
    for _ in range(2):
        kind, why = resident.answer(b"task")
        assert kind == b"E"
        assert f"OSError: no such disk (the site's log is {tmp_path}/site/site.log)" in why.decode()
    assert "Traceback" in capsys.readouterr().err
