"""A real SuperLink and SuperNodes on this machine. The test kills a SuperNode and a site's process during the run."""

import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason='no Flower: pip install "lightning_fed[flower]"')

from lightning_fed.deploy.flower.configured import LocalFlower
from lightning_fed.deploy.site_process import socket_of
from tests.deploy import processes
from tests.deploy.processes import is_alive, needs_linux, pid_of
from tests.deploy.wire import make_trainer, simulated

ROOT = Path(__file__).parents[3]
PROJECT = """
[project]
name = "app"
version = "1.0.0"
dependencies = []

[tool.flwr.app]
publisher = "tests"

[tool.flwr.app.components]
serverapp = "hospital.server_app:app"
clientapp = "hospital.client_app:app"

[tool.flwr.app.config]
ask-again = 20
"""
MAKERS = '"tests.deploy.task:make_trainer", "tests.deploy.task:make_model"'
APPS = {
    "__init__": "",
    "server_app": f"""
from lightning_fed.deploy.flower import server_app
app = server_app({MAKERS}, range(4), "last.ckpt")
""",
    "client_app": f"""
from lightning_fed.deploy.flower import client_app
app = client_app({MAKERS}, "tests.deploy.task:make_data")
""",
}


def written_app(folder: Path) -> Path:
    (folder / "hospital").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    for name, content in APPS.items():
        (folder / "hospital" / f"{name}.py").write_text(content)
    return folder


def wait_for(flower: LocalFlower, run: str, seen: Any) -> None:
    """Wait until ``seen`` returns True, and fail if the run finishes first."""
    looks = 0
    while not seen():
        time.sleep(0.5)
        looks += 1
        if looks % 40 == 0:
            assert not flower.status(run).startswith("finished"), flower.log("superlink")[-5000:]


@needs_linux
def test_stopping_flower_ends_child_processes(tmp_path: Path) -> None:
    """For example, a ServerApp that is still starting outlives its SuperLink."""
    flower = LocalFlower(tmp_path, [])
    flower.superlink = flower._start("superlink", ["bash", "-c", "sleep 1000 & echo $!; exec sleep 1000"])
    while not flower.log("superlink").strip():
        time.sleep(0.05)
    child = int(flower.log("superlink"))
    assert is_alive(child)
    flower.stop()
    processes.wait_for(lambda: not is_alive(child))
    assert flower.superlink.poll() is not None


@needs_linux
@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("flower-superlink") is None, reason="no flower-superlink on the path")
@pytest.mark.parametrize("method", ["Scaffold ii", "Mime"])
def test_run_with_killed_processes_matches_simulation_bits(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METHOD", method)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    sites = [tmp_path / f"site{number}" for number in range(3)]
    nodes = [f'client-id="{ids}" state-dir="{site}"' for ids, site in zip(("0", "1", "2,3"), sites, strict=True)]
    with LocalFlower(tmp_path / "flower", nodes) as flower:
        checkpoint = flower.folder / "last.ckpt"
        run = flower.submit(written_app(tmp_path / "app"))
        wait_for(flower, run, checkpoint.is_file)
        resident, other = pid_of(socket_of(sites[0])), pid_of(socket_of(sites[1]))
        os.kill(resident, signal.SIGKILL)
        flower.supernodes[1].kill()
        flower.supernodes[1].wait()
        flower.start_supernode(1)
        wait_for(flower, run, lambda: not is_alive(other))  # a resident process ends with its SuperNode
        while not (status := flower.status(run)).startswith("finished"):
            time.sleep(5)
        assert status == "finished:completed", flower.log("superlink")[-5000:]
        last = [pid_of(socket_of(site)) for site in sites if socket_of(site).exists()]
    for pid in last:
        wait = time.monotonic() + 120
        while is_alive(pid):
            assert time.monotonic() < wait
            time.sleep(0.1)
    expected = simulated(partial(make_trainer, method)).lightning_module.state_dict()
    found = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
