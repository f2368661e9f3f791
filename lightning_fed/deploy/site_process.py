"""The resident process of a site, as the process that the transport has started there sees it; no PyTorch here."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection
from typing import Any

from lightning_fed.deploy.site_worker import (
    READY,
    REPLY,
    STARTED_BY,
    log_of,
    open_log,
    socket_of,
    spec_of,
    state_dir_of,
)

_TRIES = 3  # how often a process that ends during a task is restarted
_LOOK = 0.1  # seconds between two looks for the socket of a process that has been started
# Not from the folder in which the transport was started, whose copy of the app may be another one than was sent. From
# Python 3.11 on, PYTHONSAFEPATH does the same for this process and those that it starts.
_MAIN = "import sys; sys.path[:] = filter(None, sys.path); from lightning_fed.deploy.site_worker import main; main()"
_SHOWN = 2000  # characters of the log in an error


class SiteProcess:
    """The resident process of this site, started if it is not there; it makes trainer, model and data by name.

    It ends with ``parent``: by default the process that has started this one, which is Flower's and ends with the
    SuperNode.
    """

    def __init__(self, makers: Mapping[str, str], node_config: Mapping[str, Any], parent: int = STARTED_BY) -> None:
        self.state_dir = state_dir_of(node_config)
        self.socket = socket_of(self.state_dir)
        self._paths = [path for path in sys.path if path]
        self._spec = spec_of(
            {"makers": dict(makers), "node_config": dict(node_config), "parent": parent, "paths": self._paths}
        )

    def answer(self, tasks: Mapping[str, bytes]) -> tuple[dict[str, bytes], dict[str, str]]:
        """Return the replies to some tasks, and why others have none."""
        replies: dict[str, bytes] = {}
        refused: dict[str, str] = {}
        for tried in range(1, _TRIES + 1):
            try:
                with self._connected() as connection:
                    for key, task in tasks.items():
                        if key in replies or key in refused:
                            continue
                        connection.send_bytes(task)
                        kind, content = connection.recv_bytes(), connection.recv_bytes()
                        if kind == REPLY:
                            replies[key] = content
                        else:
                            refused[key] = content.decode(errors="replace")
                break
            except (OSError, EOFError) as error:
                if tried == _TRIES:
                    end = str(error) or "it ended in the middle of a task"
                    why = f"The site's process has ended {_TRIES} times ({end}). Its last words: {self._end_of_log()}"
                    refused |= dict.fromkeys(tasks.keys() - replies.keys() - refused.keys(), why)
        return replies, refused

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        """Yield a connection to the process of this very app."""
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
                if said == READY:
                    with connection:
                        yield connection
                    return
            time.sleep(_LOOK)  # that of another app, or of a SuperNode that has ended: it ends now

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
