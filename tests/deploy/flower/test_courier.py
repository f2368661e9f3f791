"""Tasks reach their nodes and replies the server, whatever messages are lost and whatever nodes come and go."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason='no Flower: pip install "lightning_fed[flower]"')
from flwr.supercore.task_identity import TaskIdentity

from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy.flower import client, client_app, courier, server
from tests.deploy.flower.grid import NodesHere, SitesHere, expected, run
from tests.deploy.flower.task import DATA, NAMES
from tests.deploy.wire import parameters


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return three nodes with four clients, for SCAFFOLD."""
    monkeypatch.setenv("METHOD", "Scaffold ii")
    for name, value in (("_run_id", 1), ("_node_id", 1), ("_task_id", 1)):
        monkeypatch.setattr(TaskIdentity, name, value)  # whose process this is, as Flower sets it
    monkeypatch.setattr(client, "SiteProcess", SitesHere)
    monkeypatch.setattr(client, "end_with", SitesHere.ends_with.add)  # this process is no ClientApp
    monkeypatch.setattr(server, "_PAUSE", 0.0)
    monkeypatch.setattr(courier, "_BACK_OFF", 0.0)
    configs = [{"client-id": ids, "state-dir": str(tmp_path / f"site{n}")} for n, ids in enumerate((0, 1, "2,3"))]
    yield NodesHere(client_app(*NAMES, DATA), {100 + n: config for n, config in enumerate(configs)})
    SitesHere.end()


def test_a_run_through_lost_messages_and_crashes_has_the_bits_of_the_simulation(nodes: Any, tmp_path: Path) -> None:
    nodes.to_lose = ["train", "query", "train", "train"]
    nodes.to_fail = ["query", "train"]
    module = run(nodes, tmp_path / "last.ckpt")
    assert not nodes.to_lose
    assert not nodes.to_fail
    assert SitesHere.ends_with == {os.getppid()}, "a ClientApp does not outlive its SuperNode"
    assert torch.equal(parameters(module), expected())


def test_a_node_that_comes_back_under_another_id_is_asked_again(nodes: Any, tmp_path: Path) -> None:
    answer, moved = nodes._replies, []

    def replies(key: str) -> list[Any]:
        message = nodes.waiting[key]
        if message.metadata.dst_node_id == 101 and message.metadata.message_type == "train" and not moved:
            moved.append(key)  # the node ends with the task; for a while both ids seem to be there
            nodes.nodes[201] = nodes.nodes[101]
            return []
        return answer(key)

    nodes._replies = replies
    module = run(nodes, tmp_path / "last.ckpt", server.Options(600.0, 600.0))
    assert moved
    assert (201, "train") in nodes.asked
    assert torch.equal(parameters(module), expected())


def test_a_node_of_a_strange_client_is_logged(nodes: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nodes.nodes[101] = {**nodes.nodes[101], "client-id": "nobody"}
    nodes.nodes[102] = {}
    with caplog.at_level("WARNING", logger="flwr"), pytest.raises(FederatedError, match="have not answered"):
        run(nodes, tmp_path / "last.ckpt", server.Options(0.5, 0.1))
    assert "Node 101: it has client nobody, and the run's client_ids are 0, 1, 2, 3." in caplog.text
    assert "Node 102: This SuperNode's client-id is None" in caplog.text


def test_two_clients_that_read_alike_are_refused() -> None:
    with pytest.raises(FederatedError, match="read alike"):
        courier.Courier(None, [1, "1"], 1.0, 1.0)  # type: ignore[arg-type]
