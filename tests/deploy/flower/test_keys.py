"""SuperNodes with keys over TLS: admission, the owners of clients, and the return of a killed SuperNode."""

import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason='no Flower: pip install "lightning_fed[flower]"')

from lightning_fed.deploy.flower.configured import LocalFlower
from tests.deploy.flower.test_example import example
from tests.deploy.flower.test_local import MAKERS, ROOT, wait_for, written_app
from tests.deploy.processes import needs_linux
from tests.deploy.wire import make_trainer, simulated

SITES = ("north", "south", "bank", "thief")
CLIENTS = ("0", "1", "2,3", "0")
pytestmark = [
    needs_linux,
    pytest.mark.thorough,
    pytest.mark.timeout(1800),  # takes minutes on an idle machine
    pytest.mark.skipif(shutil.which("flower-superlink") is None, reason="no flower-superlink on the path"),
]


class WithKeys(LocalFlower):
    """Flower's processes with the example's certificates, and a key for each SuperNode."""

    def __init__(self, folder: Path, nodes: Sequence[str], certificates: Path) -> None:
        self.certificates = certificates
        authority, server, key = (str(certificates / name) for name in ("ca.crt", "server.pem", "server.key"))
        tls = ["--ssl-ca-certfile", authority, "--ssl-certfile", server, "--ssl-keyfile", key]
        super().__init__(folder, nodes, [*tls, "--enable-supernode-auth"])
        config = self.home / "config.toml"
        config.write_text(config.read_text().replace("insecure = true", f'root-certificates = "{authority}"'))

    def _start(self, name: str, command: Sequence[str]) -> Any:
        own: list[str] = []
        if name.startswith("supernode"):
            key = self.certificates / f"{SITES[int(name.removeprefix('supernode'))]}.key"
            own = ["--root-certificates", str(self.certificates / "ca.crt"), "--auth-supernode-private-key", str(key)]
        return super()._start(name, [*(word for word in command if word != "--insecure"), *own])

    def is_admitted(self, number: int) -> bool:
        """Start a SuperNode, and return whether the SuperLink admits it. If not, the process has ended."""
        name = f"supernode{number}"
        said = len(self.log(name)) if (self.logs / f"{name}.log").is_file() else 0
        self.start_supernode(number)
        while self.supernodes[number].poll() is None:
            if "SuperNode ID: " in self.log(name)[said:]:
                return True
            time.sleep(0.5)
        assert self.supernodes[number].returncode == 1, "as the page says, for Restart=on-failure and health checks"
        assert "Exit Code: 305" in self.log(name)[said:]
        return False


def test_killed_site_with_a_key_rejoins_and_keeps_its_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METHOD", "Scaffold ii")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    keys = tmp_path / "certificates"
    example("certificates").make_certificates(keys, ["localhost", "127.0.0.1"], SITES)
    nodes = [f'client-id="{ids}" state-dir="{tmp_path / name}"' for ids, name in zip(CLIENTS, SITES, strict=True)]
    app, flower = written_app(tmp_path / "app"), WithKeys(tmp_path / "flower", nodes, keys)
    owners = {0: str(keys / "north.pub"), 1: str(keys / "south.pub")}
    (app / "hospital" / "server_app.py").write_text(
        "from lightning_fed.deploy.flower import server_app\n"
        f'app = server_app({MAKERS}, range(4), "last.ckpt", owners={owners})\n'
    )
    try:
        flower.start_superlink()
        assert not flower.is_admitted(3), "a key that is not registered"
        for site in SITES:
            flower.flwr("supernode", "register", str(keys / f"{site}.pub"), "here")
        assert all(flower.is_admitted(number) for number in (3, 0, 1, 2))
        authority = str(keys / "ca.crt")
        assert example("healthcheck").is_healthy(f"https://localhost:{flower.port}/health", authority)
        run, checkpoint = flower.submit(app), flower.folder / "last.ckpt"
        wait_for(flower, run, checkpoint.is_file)
        flower.supernodes[0].kill()
        flower.supernodes[0].wait()
        killed = time.monotonic()
        refused = 0
        while not flower.is_admitted(0):  # a service manager also restarts it repeatedly
            refused += 1
            assert time.monotonic() - killed < 300
            time.sleep(10)
        assert refused, "the SuperLink takes the node to be there until it has missed its heartbeats"
        wait_for(flower, run, lambda: flower.status(run).startswith("finished"))
        assert flower.status(run) == "finished:completed", flower.log("superlink")[-5000:]
        log = flower.flwr("log", run, "here", "--show")
    finally:
        flower.stop()
    assert "is not asked for client 0, whose owner has the key" in log
    assert "round 4 train: 3 of 3 have answered" in log
    assert not list((tmp_path / "thief").glob("*/agreed.json")), "the thief was asked for nothing"
    expected = simulated(partial(make_trainer, "Scaffold ii")).lightning_module.state_dict()
    found = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert all(torch.equal(found[name], expected[name]) for name in expected)
