"""Nodes of a Flower run in this process. Flower is imported lazily, since it may be missing."""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return three nodes with four clients, for SCAFFOLD."""
    from flwr.supercore.task_identity import TaskIdentity

    from lightning_fed.deploy.flower import client, client_app, server
    from tests.deploy.flower.grid import NodesHere, SitesHere
    from tests.deploy.task import DATA, NAMES

    monkeypatch.setenv("METHOD", "Scaffold ii")
    for name, value in (("_run_id", 1), ("_node_id", 1), ("_task_id", 1)):
        monkeypatch.setattr(TaskIdentity, name, value)  # Flower sets these ids in its processes
    monkeypatch.setattr(client, "SiteProcess", SitesHere)
    monkeypatch.setattr(client, "end_with", SitesHere.ends_with.add)  # this process is not a ClientApp
    monkeypatch.setattr(server, "_PAUSE", 0.01)
    monkeypatch.setattr(server, "_BACK_OFF", 0.0)
    configs = [{"client-id": ids, "state-dir": str(tmp_path / f"site{n}")} for n, ids in enumerate((0, 1, "2,3"))]
    yield NodesHere(client_app(*NAMES, DATA), {100 + n: config for n, config in enumerate(configs)})
    SitesHere.end()
