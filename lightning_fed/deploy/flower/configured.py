"""Flower's part of ``lightning-fed deploy``: a SuperLink and SuperNodes on this machine, to try an app."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.deploy.configured import NAME, write_app

_LOOK = 0.2  # polling interval in seconds
_SHOWN = 2000  # characters of a log in an error


class LocalFlower:
    """Flower's processes on this machine, which end with the context. Nothing is encrypted.

    They write to one folder: logs, Flower's own folder, the SuperLink's working directory. ``nodes`` has each
    SuperNode's configuration in the format of ``--node-config``, ``superlink`` further arguments of the SuperLink.
    """

    def __init__(self, folder: Path, nodes: Sequence[str], superlink: Sequence[str] = ()) -> None:
        self.folder, self.nodes, self._superlink = folder.absolute(), list(nodes), list(superlink)
        self.port = _free_port()
        self.logs = self.folder / "logs"
        self.home = self.folder / "flower"
        for made in (self.logs, self.home):
            made.mkdir(parents=True, exist_ok=True)
        address = f'address = "127.0.0.1:{self.port}"\ninsecure = true'
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\n{address}\n', encoding="utf-8"
        )
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_HOME": str(self.home)}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        self.environment = {**os.environ, **quiet, "PATH": path}
        self.superlink: subprocess.Popen[bytes] | None = None
        self.supernodes: dict[int, subprocess.Popen[bytes]] = {}

    def start_superlink(self) -> None:
        """Start the SuperLink, and wait until it listens."""
        where = ["--host", "127.0.0.1", "--port", str(self.port), "--disable-runtime-dependency-installation"]
        self.superlink = self._start("superlink", ["flower-superlink", *where, "--insecure", *self._superlink])
        while self.superlink.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(_LOOK)
        raise FederatedError(f"flower-superlink has ended: {self.log('superlink')[-_SHOWN:]}")

    def start_supernode(self, number: int) -> None:
        """Start a SuperNode."""
        where = ["--superlink", f"127.0.0.1:{self.port}", "--port", str(_free_port()), "--insecure"]
        command = ["flower-supernode", *where, "--node-config", self.nodes[number]]
        self.supernodes[number] = self._start(f"supernode{number}", command)

    def _start(self, name: str, command: Sequence[str]) -> "subprocess.Popen[bytes]":
        with (self.logs / f"{name}.log").open("ab") as log:
            return subprocess.Popen(  # noqa: S603 - Flower's own
                command, stdout=log, stderr=log, cwd=self.folder, env=self.environment, start_new_session=True
            )

    def log(self, name: str) -> str:
        """Return the output of a process: ``superlink``, ``supernode0``, ..."""
        return (self.logs / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def flwr(self, *words: str) -> str:
        """Run a command of ``flwr``, and return its output."""
        command = ["flwr", *words]
        done = subprocess.run(  # noqa: S603
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise FederatedError(f"flwr {' '.join(words)} has failed: {(done.stdout + done.stderr)[-_SHOWN:]}")
        return done.stdout

    def submit(self, app: Path, *options: str) -> str:
        """Start a run of an app, and return its id."""
        printed = self.flwr("run", str(app), "here", *options)
        found = re.search(r"started run (\d+)", printed)
        if found is None:
            raise FederatedError(f"flwr run has not said which run it has started: {printed[-_SHOWN:]}")
        return found[1]

    def follow(self, run: str) -> None:
        """Print the log of a run until its end."""
        command = ["flwr", "log", run, "here"]
        subprocess.run(command, cwd=self.folder, env=self.environment, check=False)  # noqa: S603

    def described(self, run: str) -> dict[str, Any]:
        """Return Flower's facts on a run: its ``status``, its ``network-traffic`` and more."""
        printed = self.flwr("list", "here", "--run-id", run, "--format", "json")
        found: dict[str, Any] = json.loads(printed)["runs"][0]
        return found

    def status(self, run: str) -> str:
        """Return the status of a run, such as ``running``, ``finished:completed`` or ``finished:failed``."""
        return str(self.described(run)["status"])

    def stop(self) -> None:
        """End all processes, SuperNodes first, and their process groups."""
        processes = [*self.supernodes.values(), *([] if self.superlink is None else [self.superlink])]
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            with suppress(ProcessLookupError):  # its group is already gone
                os.killpg(process.pid, signal.SIGKILL)

    def __enter__(self) -> "LocalFlower":
        """Start the SuperLink and all SuperNodes."""
        try:
            self.start_superlink()
            for number in range(len(self.nodes)):
                self.start_supernode(number)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes."""
        self.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write(who: str, config: Path, out: Path, shares: list[list[ClientId]], rounds: int | None) -> str:
    """Write the app of a configuration, and return how to run it."""
    values = {"name": NAME, "count": str(len(shares))}
    made = write_app(who, config, Path(__file__).parent / "app", out, out / NAME, rounds, values)
    return f"{made} {out}: the app, which `flwr run {out}` starts where a SuperLink is."


def run(who: str, out: Path, shares: list[list[ClientId]]) -> None:
    """Run the app with a SuperLink and a SuperNode for each share of the clients, on this machine."""
    nodes = [
        f'client-id="{",".join(map(str, share))}" state-dir="{out / "sites" / str(number)}"'
        for number, share in enumerate(shares)
    ]
    print(f"SuperLink and {len(nodes)} SuperNodes start on this machine; their logs are in {out / 'logs'}.", flush=True)
    with LocalFlower(out, nodes) as flower:
        number = flower.submit(out)
        flower.follow(number)
        status = flower.status(number)
    if status != "finished:completed":
        raise FederatedError(f"{who}: the run is {status}. Its log is above, those of Flower in {flower.logs}.")
