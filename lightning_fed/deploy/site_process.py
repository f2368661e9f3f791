"""The resident process of a site, with PyTorch, the model and the data, and the class that sends it tasks one by one.

The first task starts it. It ends with the SuperNode, or after an hour without a task; the next task starts it again.
Importing this file does not import PyTorch, since Flower starts an interpreter for every message.
"""

import hashlib
import importlib
import json
import logging
import os
import select
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, TypeAlias

from lightning_fed.core.errors import FederatedError

STARTED_BY = os.getppid()
"""The process that started this one, or the system's first process if this one was already an orphan."""

Maker: TypeAlias = Callable[..., Any] | str
"""A user's function, or its name, ``"module:function"``."""

_IDLE = 3600.0  # seconds without a task until the process ends
_PATIENCE = 60.0  # seconds to wait until a predecessor ends
_TRIES = 3  # attempts, if the process ends during a task
_LOOK = 0.1  # polling interval in seconds
_LOG_SIZE = 10 * 2**20  # bytes
_SHOWN = 2000  # characters of the log in an error
_READY, _NOT_MINE = b"Y", b"N"  # replies to a specification: a match, or else this process ends
_LIMITS = ("max-epsilon", "privacy-delta", "share-words")
# Do not import from the folder in which the transport was started: its copy of the app may differ from the one sent.
# From Python 3.11 on, PYTHONSAFEPATH does the same for this process and its children.
_MAIN = "import sys; sys.path[:] = filter(None, sys.path); from lightning_fed.deploy.site_process import main; main()"


class SiteProcess:
    """The resident process of this site, started on demand; it creates trainer, model and data by name.

    It ends with ``parent``. By default, this is the process that started this one: it is Flower's, and ends with the
    SuperNode.
    """

    def __init__(self, makers: Mapping[str, str], node_config: Mapping[str, Any], parent: int = STARTED_BY) -> None:
        self.state_dir = state_dir_of(node_config)
        self.socket = socket_of(self.state_dir)
        self._paths = [path for path in sys.path if path]
        self._spec = spec_of(
            {"makers": dict(makers), "node_config": dict(node_config), "parent": parent, "paths": self._paths}
        )

    def answer(self, tasks: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the answers to some tasks: replies or refusals."""
        answers: dict[str, bytes] = {}
        for _ in range(_TRIES):
            try:
                with self._connected() as connection:
                    for key in [key for key in tasks if key not in answers]:
                        connection.send_bytes(tasks[key])
                        answers[key] = connection.recv_bytes()
                return answers
            except (OSError, EOFError) as error:
                end = str(error) or "it ended in the middle of a task"
        why = f"The site's process has ended {_TRIES} times ({end}). Its last words: {self._end_of_log()}"
        return {**dict.fromkeys(tasks, refusal(why)), **answers}

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        """Yield a connection to the process of exactly this app."""
        process: subprocess.Popen[bytes] | None = None
        while True:
            try:
                connection = Client(str(self.socket), "AF_UNIX")
                connection.send_bytes(self._spec)
                said = connection.recv_bytes()
            except (OSError, EOFError):
                if process is not None and process.poll() is not None:
                    raise ConnectionError(f"it ended with {process.returncode} before it was ready") from None
                process = process or self._start()
            else:
                if said == _READY:
                    with connection:
                        yield connection
                    return
            time.sleep(_LOOK)  # a process of another app, or of an ended SuperNode, ends now

    def _start(self) -> "subprocess.Popen[bytes]":
        self.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(open_log(self.state_dir), "wb") as out:
            process = subprocess.Popen(  # noqa: S603  # this very interpreter
                [sys.executable, "-c", _MAIN],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(self._paths), "PYTHONSAFEPATH": "1"},
                cwd=self.state_dir,
                start_new_session=True,
            )
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(self._spec)
        return process

    def _end_of_log(self) -> str:
        if (self.state_dir / "privacy").exists():
            return f"in {log_of(self.state_dir)}, which does not leave the site under client_privacy"
        try:
            return log_of(self.state_dir).read_text(errors="replace")[-_SHOWN:].strip() or "none"
        except OSError as error:
            return str(error)


class SiteWorker:
    """Serve the tasks of one site.

    ``spec`` has ``makers`` (names of the functions that make trainer, model and data), ``node_config``, ``parent`` (the
    process with which it ends) and ``paths`` (where Python finds the app).
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.spec, self.state_dir = spec, state_dir_of(spec["node_config"])
        self.socket = socket_of(self.state_dir)
        self._site: Any = None

    def serve(self) -> None:
        """Answer until the SuperNode ends, another app connects, or an hour passes without a task."""
        from filelock import FileLock

        end_with(self.spec["parent"])
        with FileLock(self.socket.with_suffix(".lock"), timeout=_PATIENCE):  # the system frees it in any case
            self.socket.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(str(self.socket))
                os.chmod(self.socket, 0o600)
                listener.listen()
                listener.settimeout(_IDLE)
                print(f"Process {os.getpid()} answers for {self.spec['node_config']['client-id']}.", flush=True)
                while self._serve_one(listener):
                    self._renew_log()
                self.socket.unlink(missing_ok=True)
            self._leave()

    def _serve_one(self, listener: socket.socket) -> bool:
        """Serve one connection; return whether to continue."""
        try:
            accepted, _ = listener.accept()
        except TimeoutError:
            return False
        with Connection(accepted.detach()) as connection, suppress(EOFError):  # a ClientApp is done
            try:
                if connection.recv_bytes() != spec_of(self.spec):
                    connection.send_bytes(_NOT_MINE)
                    return False
                connection.send_bytes(_READY)
                while True:
                    connection.send_bytes(self.answer(connection.recv_bytes()))
            except OSError as error:  # the server will ask again
                print(f"A ClientApp has ended before its reply: {error}", flush=True)
        return True

    def answer(self, task: bytes) -> bytes:
        """Return the answer to a task: a reply, or a refusal."""
        try:
            site = self._made()
            from lightning_fed.deploy.message import Message

            reply: bytes = site.answer(Message.from_bytes(task)).to_bytes()
            return reply
        except FederatedError as error:
            why = str(error)
        except Exception as error:
            traceback.print_exc()
            self._leave()  # its state is unknown: the next task creates a new site
            why = f"{type(error).__name__}: {error} (the site's log is {log_of(self.state_dir)})"
        return refusal(why)

    def _made(self) -> Any:
        if self._site is None:
            makers, node_config = self.spec["makers"], self.spec["node_config"]
            max_epsilon, delta, shared = limits_of(node_config)
            trainer = called(makers["trainer"])()
            try:
                model, data = called(makers["model"])(), called(makers["data"])(dict(node_config))
            except Exception as error:  # it may describe an example
                if trainer.fit_loop.settings.client_privacy is None:
                    raise
                traceback.print_exc()
                raise FederatedError(
                    f"The site's model or data cannot be made. Its own log ({log_of(self.state_dir)}) has the reason,"
                    " which does not leave it under client_privacy."
                ) from error
            from lightning_fed.deploy.site import FederatedSite

            self._site = FederatedSite(
                trainer, model, data, clients_of(node_config), self.state_dir, max_epsilon, delta, shared
            )
        return self._site

    def _renew_log(self) -> None:
        """Start a new log if this process writes to one that is too long."""
        path, now = log_of(self.state_dir), os.fstat(1)
        if now.st_size > _LOG_SIZE and path.is_file() and os.path.samestat(now, path.stat()):
            log = open_log(self.state_dir)
            for stream in (1, 2):
                os.dup2(log, stream)
            os.close(log)

    def _leave(self) -> None:
        site, self._site = self._site, None
        if site is not None:
            try:
                site.close()
            except Exception:
                traceback.print_exc()


def refusal(reason: str) -> bytes:
    """Return a site's refusal of a task as a message that :func:`lightning_fed.deploy.reply_from` reads."""
    from safetensors import serialize

    return bytes(serialize({}, {"message": json.dumps({"refused": reason})}))


def spec_of(values: Mapping[str, Any]) -> bytes:
    """Return a specification as bytes."""
    return json.dumps(values, sort_keys=True).encode()  # Flower passes configurations in any order


def log_of(state_dir: Path) -> Path:
    """Return the file of the output of a site's process."""
    return state_dir / "site.log"


def open_log(state_dir: Path) -> int:
    """Open a new log for this user alone; the previous one stays as ``site.log.1``."""
    log = log_of(state_dir)
    if log.is_file():
        os.replace(log, log.with_suffix(".log.1"))
    return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def main() -> None:
    """Serve the site that the standard input describes."""
    logging.basicConfig(stream=sys.stdout, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("lightning_fed.deploy").setLevel(logging.INFO)
    SiteWorker(json.load(sys.stdin)).serve()


# Values of a node's configuration: its clients, their folder, the user's functions


def clients_of(node_config: Mapping[str, Any]) -> list[int | str]:
    """Return the ids of a node's clients: ``client-id=3``, ``client-id="clinic"``, or several, ``client-id="0,1,2"``.

    Example:
        >>> clients_of({"client-id": "0, 12,north"})
        [0, 12, 'north']
    """
    said = node_config.get("client-id")
    words = [word.strip() for word in str(said).split(",")]
    if said is None or isinstance(said, bool) or not all(words):
        raise ValueError(
            f"This SuperNode's client-id is {said!r}. Start flower-supernode with --node-config 'client-id=\"clinic\"',"
            " or with several ids and commas between them."
        )
    return [int(word) if word.isdecimal() and word == str(int(word)) else word for word in words]


def limits_of(node_config: Mapping[str, Any]) -> tuple[Any, Any, list[str]]:
    """Return the operator's limits: the largest epsilon, its delta, and the columns whose words may leave."""
    for name in node_config:
        option = name.replace("_", "-").lower()
        if option in _LIMITS and name not in _LIMITS:
            raise ValueError(f"This site's configuration has {name}, which limits nothing. The option is {option}.")
    columns = [column.strip() for column in str(node_config.get("share-words", "")).split(",")]
    return node_config.get("max-epsilon"), node_config.get("privacy-delta"), [*filter(None, columns)]


def state_dir_of(node_config: Mapping[str, Any]) -> Path:
    """Return the folder of a node's client states: ``state-dir``, or one in the user's home, by their ids."""
    said = node_config.get("state-dir")
    if said is not None:
        return Path(str(said)).expanduser().absolute()
    safe = "".join(c if c.isalnum() or c in "-." else "_" for c in "-".join(map(str, clients_of(node_config))))
    return Path.home() / ".lightning_fed" / "sites" / safe[:100]


def names_of(make_trainer: Maker, make_model: Maker, make_data: Maker) -> dict[str, str]:
    """Return the names of the functions that make the parts of a site."""
    given = {"trainer": make_trainer, "model": make_model, "data": make_data}
    return {what: named(f"make_{what}", maker) for what, maker in given.items()}


def named(what: str, maker: Maker) -> str:
    """Return the name of a function, ``"module:function"``, for another process to find it."""
    if isinstance(maker, str):
        module, _, attribute = maker.partition(":")
        is_good = all(part.isidentifier() for part in (*module.split("."), attribute))
    else:
        module, attribute = getattr(maker, "__module__", ""), getattr(maker, "__qualname__", "")
        is_good = attribute.isidentifier() and module != "__main__"
    if not is_good:
        raise FederatedError(
            f"{what}={maker!r} is made in another process, which finds it by its name: give a function at the top of a"
            f' module of the app, or its name, such as {what}="hospital.task:{what}".'
        )
    return f"{module}:{attribute}"


def called(maker: Maker) -> Callable[..., Any]:
    """Return the function itself, imported if it is given by name."""
    if not isinstance(maker, str):
        return maker
    module, _, attribute = maker.partition(":")
    function: object = getattr(importlib.import_module(module), attribute, None)
    if not callable(function):
        raise FederatedError(f"The module {module} has no function {attribute}.")
    return function


def socket_of(state_dir: Path) -> Path:
    """Return the path of a site's socket, in a folder that only this user can open.

    It is not in the site's own folder, since a socket's path may have only about 100 characters.
    """
    if os.name != "posix":
        raise OSError("Sites need the local sockets of Linux or macOS.")
    folder = Path(tempfile.gettempdir()) / f"lightning_fed-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OSError(f"{folder} must be a folder of this user's with mode 0700, for the sockets of sites. Remove it.")
    return folder / f"{hashlib.blake2b(str(state_dir).encode(), digest_size=8).hexdigest()}.sock"


# A process that does not outlive another one


def end_with(other: int) -> None:
    """End this process as soon as another one ends, even in the middle of work.

    This damages no saved data: client states and checkpoints are written atomically.
    """

    def wait_and_end() -> None:
        with suppress(ProcessLookupError):
            if hasattr(os, "pidfd_open"):  # notifies at once, even if the process's number is reused
                select.select([os.pidfd_open(other)], [], [])
            else:
                while True:
                    os.kill(other, 0)
                    time.sleep(_LOOK)
        os._exit(0)

    threading.Thread(target=wait_and_end, daemon=True).start()
