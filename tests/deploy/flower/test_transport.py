"""Tasks reach their nodes and replies the server, whatever messages are lost and whatever nodes come and go."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason='no Flower: pip install "lightning_fed[flower]"')

from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy.flower.transport import FlowerTransport
from tests.deploy.flower.grid import SitesHere, expected, run
from tests.deploy.wire import parameters


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
    module = run(nodes, tmp_path / "last.ckpt", 600.0, 600.0)
    assert moved
    assert (201, "train") in nodes.asked
    assert torch.equal(parameters(module), expected())


def test_a_node_of_a_strange_client_is_logged(nodes: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nodes.nodes[101] = {**nodes.nodes[101], "client-id": "nobody"}
    nodes.nodes[102] = {}
    with caplog.at_level("WARNING", logger="flwr"), pytest.raises(FederatedError, match="have not answered"):
        run(nodes, tmp_path / "last.ckpt", 0.5, 0.1)
    assert "Node 101: it has client nobody, and the run's client_ids are 0, 1, 2, 3." in caplog.text
    assert "Node 102: This SuperNode's client-id is None" in caplog.text


def test_two_clients_that_read_alike_are_refused() -> None:
    with pytest.raises(FederatedError, match="read alike"):
        FlowerTransport(None, [1, "1"], 1.0, 1.0)  # type: ignore[arg-type]
