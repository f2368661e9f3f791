"""The process of a site, which no other user may use."""

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy import Message, Refusal, reply_from
from lightning_fed.deploy.message import printable
from lightning_fed.deploy.site_process import (
    SiteProcess,
    SiteWorker,
    called,
    clients_of,
    named,
    open_log,
    socket_of,
    spec_of,
    state_dir_of,
)
from tests.deploy.processes import is_alive, needs_linux, pid_of, wait_for
from tests.deploy.site_models import model
from tests.deploy.task import DATA, NAMES
from tests.helpers.optional import needs_opacus

APP = "def trainer(): raise OSError('no such disk')\nmodel = data = trainer\n"  # refused before PyTorch is needed


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SiteProcess]]:
    """Return a function that makes the process of a site."""
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


@pytest.mark.thorough
@needs_linux
def test_site_process_stays_until_killed_or_its_parent_ends(site: Callable[..., SiteProcess]) -> None:
    first = site()
    answers = first.answer({"0": b"nothing"})
    assert f"OSError: no such disk (the site's log is {first.state_dir}/site.log)" in refused(answers["0"])
    pid = pid_of(first.socket)
    first.answer({"0": b"nothing"})
    assert pid_of(first.socket) == pid, "it stays"
    same = site(**{"state-dir": str(first.state_dir), "client-id": "north"})  # the same settings in Flower's order
    same.answer({"0": b"nothing"})
    assert pid_of(first.socket) == pid
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(pid))
    first.answer({"0": b"nothing"})
    second = pid_of(first.socket)
    assert second != pid
    site(data="other").answer({"0": b"nothing"})  # another app replaces it: a site's folder has one process
    third = pid_of(first.socket)
    assert third != second
    wait_for(lambda: not is_alive(second))
    first.parent.kill()  # type: ignore[attr-defined]
    wait_for(lambda: not is_alive(third))


@needs_linux
def test_other_users_cannot_open_the_socket_or_folder(site: Callable[..., SiteProcess]) -> None:
    process = site()
    process.answer({"0": b"nothing"})
    for path, mode in ((process.socket.parent, 0o700), (process.socket, 0o600), (process.state_dir, 0o700)):
        assert stat.S_IMODE(path.stat().st_mode) == mode
        assert path.stat().st_uid == os.getuid()


@needs_linux
def test_site_process_runs_the_app_that_was_sent(
    site: Callable[..., SiteProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_in = tmp_path / "checkout"
    started_in.mkdir()
    (started_in / "own_app.py").write_text(APP.replace("no such disk", "an older copy"))
    monkeypatch.chdir(started_in)
    process = site()
    assert "OSError: no such disk" in refused(process.answer({"0": b"nothing"})["0"])
    pid = pid_of(process.socket)
    assert Path(f"/proc/{pid}/cwd").resolve() == process.state_dir
    assert stat.S_IMODE((process.state_dir / "site.log").stat().st_mode) & 0o077 == 0


@pytest.mark.thorough
@needs_linux
def test_log_explains_why_a_process_does_not_start(site: Callable[..., SiteProcess], tmp_path: Path) -> None:
    process = site()
    folder = tmp_path / "hidden"
    (folder / "filelock").mkdir(parents=True)
    (folder / "filelock" / "__init__.py").write_text("raise SystemExit('the disk is full')")
    process._paths.insert(0, str(folder))
    answers = process.answer({"0": b"nothing", "1": b"nothing"})
    assert "has ended 3 times (it ended with 1 before it was ready)" in refused(answers["1"])
    assert refused(answers["0"]).endswith("Its last words: the disk is full")
    (process.state_dir / "privacy").mkdir()
    answers = process.answer({"0": b"nothing"})
    assert refused(answers["0"]).endswith("site.log, which does not leave the site under client_privacy")


APP = "def trainer(): raise OSError('no such disk')\nmodel = data = trainer\n"  # refused before PyTorch is needed


def refused(answer: bytes) -> str:
    found = reply_from("client", answer)
    assert isinstance(found, Refusal)
    return found.reason


def test_folder_that_others_can_open_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = socket_of(tmp_path / "site").parent
    folder.chmod(0o750)
    with pytest.raises(OSError, match="must be a folder of this user's with mode 0700"):
        socket_of(tmp_path / "site")
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(OSError, match="must be a folder of this user's"):
        socket_of(tmp_path / "site")


def test_partial_task_is_not_answered_and_does_not_end_the_process(tmp_path: Path, capsys: Any) -> None:
    resident = SiteWorker({"node_config": {"client-id": 0, "state-dir": str(tmp_path)}})
    asked: list[bytes] = []
    resident.answer = asked.append  # type: ignore[assignment,method-assign]
    spec = spec_of(resident.spec)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        for rest, said in ((b"", ""), ((9).to_bytes(4, "big") + b"half", "A ClientApp has ended before its reply")):
            with socket.socket(socket.AF_UNIX) as app:
                app.connect(str(tmp_path / "socket"))
                app.sendall(len(spec).to_bytes(4, "big") + spec + rest)
                app.shutdown(socket.SHUT_WR)
                assert resident._serve_one(listener)
                assert app.recv(9) == (1).to_bytes(4, "big") + b"Y"
            assert said in capsys.readouterr().out
    assert not asked


def test_error_in_user_code_is_named_and_does_not_persist(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    (tmp_path / "broken_app.py").write_text(APP)
    monkeypatch.syspath_prepend(str(tmp_path))
    makers = {name: f"broken_app:{name}" for name in ("trainer", "model", "data")}
    node_config = {"client-id": 0, "state-dir": str(tmp_path / "site")}
    resident = SiteWorker({"makers": makers, "node_config": node_config, "parent": os.getpid(), "paths": []})
    for _ in range(2):
        why = refused(resident.answer(b"task"))
        assert f"OSError: no such disk (the site's log is {tmp_path}/site/site.log)" in why
    assert "Traceback" in capsys.readouterr().err


def test_refusal_with_invalid_unicode_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = SiteWorker({"node_config": {"client-id": 0}})

    def refuse() -> None:
        raise FederatedError("its \ud800 is 5")

    monkeypatch.setattr(resident, "_made", refuse)
    assert printable(refused(resident.answer(b"task"))) == r"its \ud800 is 5"


def test_node_configuration_limits_apply_to_the_site(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("METHOD", "FedAvg")
    makers = dict(zip(("trainer", "model", "data"), (*NAMES, DATA), strict=True))
    node_config: dict[str, Any] = {"client-id": 0, "state-dir": str(tmp_path / "site"), "share-words": " ward,sex, "}
    spec = {"makers": makers, "node_config": node_config, "parent": os.getpid(), "paths": []}
    with SiteWorker(spec)._made() as site:
        assert site._shared == ["ward", "sex"]
    for name, value, said in (("max-epsilon", 3.0, "max_epsilon=3.0"), ("privacy-delta", 0.1, "delta=0.1")):
        limited = SiteWorker({**spec, "node_config": {**node_config, name: value}})
        why = refused(limited.answer(Message({}).to_bytes()))
        assert f"FederatedSite({said}): the trainer has no client_privacy" in why
    for name in ("max_epsilon", "Max-Epsilon", "share_words"):
        misspelt = SiteWorker({**spec, "node_config": {**node_config, name: 3.0}})
        why = refused(misspelt.answer(Message({}).to_bytes()))
        assert f"This site's configuration has {name}, which limits nothing" in why


PRIVATE = """
from tests.deploy.wire import make_trainer
from lightning_fed.server import ClientPrivacy
def trainer(): return make_trainer("FedAvg", client_privacy=ClientPrivacy(1.0, 1.0))
def model(): pass
def data(config): raise ValueError("the patient 7")
"""


@needs_opacus
def test_error_in_user_code_does_not_leave_a_private_site(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    (tmp_path / "private_app.py").write_text(PRIVATE)
    monkeypatch.syspath_prepend(str(tmp_path))
    makers = {name: f"private_app:{name}" for name in ("trainer", "model", "data")}
    node_config = {"client-id": 0, "state-dir": str(tmp_path / "site")}
    spec = {"makers": makers, "node_config": node_config, "parent": 0, "paths": []}
    why = refused(SiteWorker(spec).answer(b"task"))
    assert "cannot be made. Its own log" in why
    assert "patient" not in why
    assert "the patient 7" in capsys.readouterr().err


WRITES = """
import os, sys
from pathlib import Path
from lightning_fed.deploy import site_process
site_process._LOG_SIZE = 1000
site = site_process.SiteWorker({"node_config": {"client-id": 0, "state-dir": sys.argv[1]}})
for number in range(6):
    os.write(2, b"%d" % number * 400)
    site._renew_log()
"""


@pytest.mark.thorough
def test_site_log_size_is_limited(tmp_path: Path) -> None:
    with open(open_log(tmp_path), "wb") as log:
        subprocess.run([sys.executable, "-c", WRITES, str(tmp_path)], stdout=log, stderr=log, check=True)
        subprocess.run([sys.executable, "-c", WRITES, str(tmp_path / "other")], stdout=log, stderr=log, check=True)
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found["site.log.1"] == "3" * 400 + "4" * 400 + "5" * 400
    assert found["site.log"] == ""
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_node_configuration_names_its_clients() -> None:
    assert clients_of({"client-id": 3}) == [3]
    assert clients_of({"client-id": "north"}) == ["north"]
    assert clients_of({"client-id": "0, 12,007"}) == [0, 12, "007"]
    for wrong in ({}, {"client-id": ""}, {"client-id": "a,,b"}, {"client-id": True}):
        with pytest.raises(ValueError, match="client-id"):
            clients_of(wrong)
    assert state_dir_of({"client-id": "a/b"}).name == "a_b"
    assert state_dir_of({"client-id": 1, "state-dir": "/srv/site"}) == Path("/srv/site")


def test_functions_round_trip_through_their_qualified_names() -> None:
    assert named("make_model", model) == "tests.deploy.site_models:model"
    assert called(named("make_model", model)) is model
    for wrong in (lambda: None, "no name", "module:", partial(model)):
        with pytest.raises(FederatedError, match="make_model.*at the top of a module"):
            named("make_model", wrong)
    with pytest.raises(FederatedError, match="has no function 'nobody'|has no function nobody"):
        called("tests.deploy.site_models:nobody")
