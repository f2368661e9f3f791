"""A provisioned federation on this machine: server and clients with their own certificates, as on real machines."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from tests.deploy.flare.fake import SITES
from tests.deploy.flare.jobs import ROOT

ADMIN = "admin@tests.org"
_BUILDERS = [
    {
        "path": "nvflare.lighter.impl.workspace.WorkspaceBuilder",
        "args": {"template_file": ["master_template.yml"]},
    },
    {"path": "nvflare.lighter.impl.static_file.StaticFileBuilder", "args": {"config_folder": "config"}},
    {"path": "nvflare.lighter.impl.cert.CertBuilder"},
    {"path": "nvflare.lighter.impl.signature.SignatureBuilder"},
]


class Federation:
    """FLARE's processes on this machine. Tests can restart them, and they end with the context."""

    def __init__(self, folder: Path, method: str) -> None:
        self.folder = folder
        own = {"METHOD": method, "PYTHONPATH": str(ROOT), "HOME": str(folder)}
        self.environment = {
            **os.environ,
            **own,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        self.processes: dict[str, psutil.Popen] = {}
        self._session: Session | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        members = [
            {"name": "server", "type": "server", "org": "tests", "default_host": "localhost", "fed_learn_port": port},
            {"name": ADMIN, "type": "admin", "org": "tests", "role": "project_admin"},
            *({"name": name, "type": "client", "org": "tests"} for name in SITES),
        ]
        project = {"api_version": 3, "name": "tests", "participants": members, "builders": _BUILDERS}
        (folder / "project.yml").write_text(yaml.safe_dump(project))
        words = ["-m", "nvflare.cli", "provision", "-p", str(folder / "project.yml"), "-w", str(folder / "kits")]
        subprocess.run([sys.executable, *words, "--force"], check=True, env=self.environment, cwd=folder)
        self.kits = folder / "kits" / "tests" / "prod_00"
        resources = self.kits / "server" / "local" / "resources.json.default"
        text = resources.read_text().replace("/tmp/nvflare", str(folder / "server"))
        resources.write_text(text)

    def start(self, name: str) -> None:
        """Start the server or a client, as ``sub_start.sh`` in its kit does."""
        side = "server" if name == "server" else "client"
        module = f"nvflare.private.fed.app.{side}.{side}_train"
        words = ["-m", module, "-m", str(self.kits / name), "-s", f"fed_{side}.json", "--set", "secure_train=true"]
        options = ["org=tests", "config_folder=config", *([] if side == "server" else [f"uid={name}"])]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = psutil.Popen(
                [sys.executable, "-u", *words, *options],
                stdout=log,
                stderr=log,
                env=self.environment,
                cwd=self.kits / name,
                start_new_session=True,
            )

    def session(self) -> Session:
        """Return the administrator's session, or a new one after the server has ended."""
        if self._session is None:
            self._session = new_secure_session(ADMIN, str(self.kits / ADMIN), timeout=60.0)
        return self._session

    def submit(self, job: Path) -> str:
        return str(self.patient(lambda: self.session().submit_job(str(job))))

    def status(self, job: str) -> str:
        return str(self.patient(lambda: self.session().get_job_meta(job))["status"])

    def patient(self, ask: Callable[[], Any]) -> Any:
        """Retry until the server answers, for at most two minutes."""
        end = time.monotonic() + 120
        while True:
            try:
                return ask()
            except Exception:
                with suppress(Exception):
                    if self._session is not None:
                        self._session.close()
                self._session = None
                if time.monotonic() > end:
                    raise
                time.sleep(1)

    def job_processes(self, name: str) -> list[int]:
        """Return the process ids of a job on the server or on a site."""
        parent, found = self.processes.get(name), []
        if parent is not None:
            with suppress(psutil.Error):
                found = [child.pid for child in parent.children() if any("process" in w for w in child.cmdline())]
        return found

    def log(self) -> str:
        return "".join(f"--- {path.name}\n{path.read_text()}\n" for path in self.folder.glob("*.log"))

    def __enter__(self) -> "Federation":
        for name in ("server", *SITES):
            self.start(name)
        return self

    def __exit__(self, *_: object) -> None:
        if self._session is not None:
            self._session.close()
        running = []
        for process in self.processes.values():
            with suppress(psutil.Error):
                running += [*process.children(recursive=True), process]
        for one in running:
            with suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(running, 20)
