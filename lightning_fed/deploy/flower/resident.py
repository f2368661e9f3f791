"""The process that stays on a site, with PyTorch, the model and the data; ClientApps hand it tasks one by one.

It is started by the first task, and ends with the SuperNode or after an hour without a task; the next one starts it.
"""

import json
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_fed.deploy.flower.lifetime import end_with
from lightning_fed.deploy.flower.names import called
from lightning_fed.deploy.flower.node import clients_of, state_dir_of
from lightning_fed.deploy.flower.sockets import NOT_MINE, READY, REFUSED, REPLY, SPEC, TASK, receive, send, socket_of

__all__ = ["Resident", "main"]

_IDLE = 3600.0  # seconds without a task after which it ends
_PATIENCE = 60.0  # seconds in which a predecessor is to end


class Resident:
    """Serve the tasks of one site.

    Args:
        spec: ``makers`` (names of the functions that make trainer, model and data), ``node_config``, ``parent`` (the
            process with which it ends) and ``paths`` (where Python finds the app).
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.spec = spec
        self.state_dir = state_dir_of(spec["node_config"])
        self.socket = socket_of(self.state_dir)
        self._site: Any = None

    def serve(self) -> None:
        """Answer until the SuperNode ends, another app comes, or nothing has come for an hour.

        Raises:
            filelock.Timeout: If another process serves the site and does not end.
        """
        from filelock import FileLock

        end_with(self.spec["parent"])
        with FileLock(self.socket.with_suffix(".lock"), timeout=_PATIENCE):  # the system frees it, whatever happens
            self.socket.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(str(self.socket))
                os.chmod(self.socket, 0o600)
                listener.listen()
                listener.settimeout(_IDLE)
                print(f"Process {os.getpid()} answers for {self.spec['node_config']['client-id']}.", flush=True)
                while self._serve_one(listener):
                    pass
                self.socket.unlink(missing_ok=True)
            self._leave()

    def _serve_one(self, listener: socket.socket) -> bool:
        """Serve one connection; return whether to go on."""
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            return False
        with connection:
            connection.settimeout(None)
            try:
                first = receive(connection)
                if first is None:
                    return True
                if first != (SPEC, spec_of(self.spec)):
                    send(connection, NOT_MINE)
                    return False
                send(connection, READY)
                while (frame := receive(connection)) is not None:
                    send(connection, *(self.answer(frame[1]) if frame[0] == TASK else (REFUSED, b"No task.")))
            except OSError as error:  # a ClientApp that has ended; the server will ask again
                print(f"A ClientApp has ended before its reply: {error}", flush=True)
        return True

    def answer(self, task: bytes) -> tuple[bytes, bytes]:
        """Return what to send back for a task: a reply, or why there is none.

        Args:
            task: The bytes of a :class:`lightning_fed.deploy.Message`.
        """
        try:
            site = self._made()
            from lightning_fed.deploy.message import Message

            return REPLY, site.answer(Message.from_bytes(task)).to_bytes()
        except Exception as error:
            errors = sys.modules.get("lightning_fed.core.errors")  # without which it is none of them
            if errors is not None and isinstance(error, errors.FederatedError):
                return REFUSED, str(error).encode()
            traceback.print_exc()
            self._leave()  # whatever state it was in: the next task makes it anew
            return REFUSED, f"{type(error).__name__}: {error} (the site's log is {log_of(self.state_dir)})".encode()

    def _made(self) -> Any:
        if self._site is None:
            trainer, model, data = (called(self.spec["makers"][what]) for what in ("trainer", "model", "data"))
            node_config = dict(self.spec["node_config"])
            made = trainer(), model(), data(dict(node_config))
            from lightning_fed.deploy.site import FederatedSite

            self._site = FederatedSite(*made, clients_of(node_config), self.state_dir)
        return self._site

    def _leave(self) -> None:
        site, self._site = self._site, None
        if site is not None:
            try:
                site.close()
            except Exception:
                traceback.print_exc()


def spec_of(values: Mapping[str, Any]) -> bytes:
    """Return a specification as bytes, which are the same for the same values."""
    return json.dumps(values, sort_keys=True).encode()  # Flower hands out configurations in any order


def log_of(state_dir: Path) -> Path:
    """Return the file that takes what a site's process prints."""
    return state_dir / "site.log"


def main() -> None:
    """Serve the site that the standard input describes."""
    Resident(json.load(sys.stdin)).serve()


if __name__ == "__main__":
    main()
