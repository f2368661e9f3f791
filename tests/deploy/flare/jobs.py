"""FLARE jobs that use the tests' functions, and a simulator that runs them."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_fed.deploy.flare.configured import simulator
from lightning_fed.deploy.site_process import socket_of
from tests.deploy.flare.fake import SITES
from tests.deploy.processes import pid_of
from tests.deploy.wire import make_trainer, simulated

ROOT = Path(__file__).parents[3]
MAKERS = {"make_trainer": "tests.deploy.task:make_trainer", "make_model": "tests.deploy.task:make_model"}
SCRIPT = """
from lightning_fed.deploy.flare import serve_site
serve_site({make_trainer!r}, {make_model!r}, "tests.deploy.task:make_data", {sites!r}, {state_dir!r})
"""


def written_job(folder: Path, external: bool = False, min_clients: int = len(SITES), **controller: Any) -> Path:
    """Write a job whose checkpoint and states are in the same folder, and return the job's folder."""
    job = folder / "job"
    for made in (job / "app" / "config", job / "app" / "custom"):
        made.mkdir(parents=True)
    script = SCRIPT.format(**MAKERS, sites=SITES, state_dir=str(folder / "sites"))
    (job / "app" / "custom" / "serve.py").write_text(script)
    own = {"command": ["python", "-u", "custom/serve.py"]} if external else {"task_script_path": "serve.py"}
    mode = "external_process" if external else "in_process"
    executor = {
        "path": "nvflare.app_common.executors.client_api_executor.ClientAPIExecutor",
        "args": {"execution_mode": mode, "params_exchange_format": "numpy", **own},
    }
    checkpoint = {"checkpoint": str(folder / "last.ckpt"), "client_ids": [0, 1, 2, 3], "sites": SITES}
    workflow = {
        "id": "rounds",
        "path": "lightning_fed.deploy.flare.RoundsController",
        "args": {**MAKERS, **checkpoint, **controller},
    }
    files = {
        "meta.json": {"name": "job", "min_clients": min_clients, "deploy_map": {"app": ["@ALL"]}, "resource_spec": {}},
        "app/config/config_fed_server.json": {"format_version": 2, "workflows": [workflow]},
        "app/config/config_fed_client.json": {
            "format_version": 2,
            "executors": [{"tasks": ["train"], "executor": executor}],
        },
    }
    for name, content in files.items():
        (job / name).write_text(json.dumps(content))
    return job


@contextmanager
def running(folder: Path, method: str) -> Iterator[Any]:
    """Run a written job in FLARE's simulator, with its own workspace."""
    environment = {**os.environ, "METHOD": method, "PYTHONPATH": str(ROOT)}
    with simulator(folder / "job", folder / "workspace", list(SITES), environment) as process:
        yield process


def rounds_in(checkpoint: Path) -> int:
    """Return the number of completed rounds in a checkpoint, or 0 without one."""
    if not checkpoint.is_file():
        return 0
    saved = torch.load(checkpoint, weights_only=True, map_location="meta", mmap=True)
    return int(saved["loops"]["fit_loop"]["state_dict"]["round"])


def site_processes(folder: Path) -> dict[str, int]:
    """Return the ids of the sites' resident processes, without sites that have none."""
    found = {}
    for name in SITES:
        try:
            found[name] = pid_of(socket_of(folder / "sites" / name))
        except OSError:
            continue
    return found


def check_bits(checkpoint: Path, method: str) -> None:
    expected = simulated(partial(make_trainer, method)).lightning_module.state_dict()
    found = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
