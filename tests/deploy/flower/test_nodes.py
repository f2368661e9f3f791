"""Tasks reach their nodes, and replies reach the server, even if messages are lost and nodes come and go."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason='no Flower: pip install "lightning_fed[flower]"')

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy import Absent, Message
from lightning_fed.deploy.flower.server import FlowerTransport
from tests.deploy.flower.grid import SitesHere, expected, run
from tests.deploy.wire import parameters


def test_run_with_lost_messages_and_crashes_matches_simulation_bits(nodes: Any, tmp_path: Path) -> None:
    nodes.to_lose = ["train", "query", "train", "train"]
    nodes.to_fail = ["query", "train"]
    module = run(nodes, tmp_path / "last.ckpt")
    assert not nodes.to_lose
    assert not nodes.to_fail
    assert SitesHere.ends_with == {os.getppid()}, "a ClientApp does not outlive its SuperNode"
    assert torch.equal(parameters(module), expected())


@pytest.mark.thorough
def test_node_returning_with_a_new_id_gets_its_clients_back(
    nodes: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answer, moved = nodes._replies, []

    def replies(key: str) -> list[Any]:
        message = nodes.waiting[key]
        node = message.metadata.dst_node_id
        if node == 101 and message.metadata.message_type == "train" and not moved:
            moved.append(key)  # the node ends with the task, and both ids are listed for a while
            nodes.nodes[201] = nodes.nodes[101]
            return []
        if node == 101 and moved:
            return []
        if node == 201 and message.metadata.message_type == "query":
            looks = iter(range(5))
            nodes.get_node_ids = lambda: list(nodes.nodes) if next(looks, None) is not None else gone()
        return answer(key)

    def gone() -> list[int]:
        assert (201, "train") not in nodes.asked, "the old node is still there"
        nodes.nodes.pop(101)
        del nodes.get_node_ids
        return list(nodes.nodes)

    nodes._replies = replies
    with caplog.at_level("INFO", logger="lightning_fed.deploy"):
        module = run(nodes, tmp_path / "last.ckpt", 600.0, 600.0)
    assert moved
    assert (201, "train") in nodes.asked
    assert caplog.text.count("Node 201 is not asked for client 1, which belongs to node 101 for as long as") == 1
    assert "Node 201 has the clients [1]." in caplog.text
    assert torch.equal(parameters(module), expected())


def test_second_claim_to_a_client_is_ignored(nodes: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nodes.nodes[300] = {"client-id": "3,0", "state-dir": str(tmp_path / "thief"), "method": "another"}
    with caplog.at_level("WARNING", logger="lightning_fed.deploy"):
        module = run(nodes, tmp_path / "last.ckpt", 20.0)
    assert {kind for node, kind in nodes.asked if node == 300} == {"query"}
    assert torch.equal(parameters(module), expected())
    for client, owner in ((3, 102), (0, 100)):
        assert caplog.text.count(f"Node 300 is not asked for client {client}, which belongs to node {owner} for") == 1


def public_key(file: Path) -> bytes:
    """Write a new public key as ssh-keygen writes it, and return it as Flower keeps it."""
    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    file.write_bytes(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b" bank\n")
    return public_key_to_bytes(key)


@pytest.mark.thorough
def test_unreadable_message_is_logged_and_requested_again(
    nodes: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pull, broken = nodes.pull_messages, []

    def garbled(keys: list[str]) -> Any:
        is_train = any(nodes.waiting[key].metadata.message_type == "train" for key in keys if key in nodes.waiting)
        found = pull(keys)
        if is_train and not broken:
            broken.append(keys)
            raise ValueError("Expecting value:\nline 1")
        return found

    nodes.pull_messages = garbled
    with caplog.at_level("WARNING", logger="lightning_fed.deploy"):
        module = run(nodes, tmp_path / "last.ckpt")
    assert broken
    assert r"Flower cannot read a message of a node: ValueError: Expecting value:\nline 1" in caplog.text
    assert torch.equal(parameters(module), expected())


@pytest.mark.thorough
def test_owned_client_is_asked_only_from_the_node_with_its_key(
    nodes: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {100: public_key(tmp_path / "bank.pub"), 101: public_key(tmp_path / "clinic.pub")}
    nodes.nodes = {99: {**nodes.nodes[100], "state-dir": str(tmp_path / "thief")}, **nodes.nodes}  # listed first
    nodes.get_nodes = lambda: [NodeInfo(node_id=node, public_key=keys.get(node, b"other")) for node in nodes.nodes]
    with caplog.at_level("WARNING", logger="lightning_fed.deploy"):
        module = run(nodes, tmp_path / "last.ckpt", 20.0, owners={0: tmp_path / "bank.pub", 1: tmp_path / "clinic.pub"})
    assert {kind for node, kind in nodes.asked if node == 99} == {"query"}
    assert torch.equal(parameters(module), expected())
    file = tmp_path / "bank.pub"
    assert f"Node 99 is not asked for client 0, whose owner has the key {file}, and the node has another" in caplog.text


def test_owners_must_be_known_clients_with_public_keys(tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match=r"owners names client 'bnk', which is not one of client_ids"):
        FlowerTransport(None, ["bank"], 1.0, 1.0, {"bnk": "bank.pub"})  # type: ignore[arg-type]
    (tmp_path / "bank.key").write_text("secret")
    for file in (tmp_path / "bank.key", tmp_path / "bank.pub"):
        with pytest.raises(FederatedError, match=rf"owners\['bank'\] = '{file}' is not the file of a public key"):
            FlowerTransport(None, ["bank"], 1.0, 1.0, {"bank": file})  # type: ignore[arg-type]


@pytest.mark.thorough
def test_node_with_an_unknown_client_is_logged(nodes: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nodes.nodes[101] = {**nodes.nodes[101], "client-id": "no\nbody"}
    nodes.nodes[102] = {}
    with (
        caplog.at_level("WARNING", logger="lightning_fed.deploy"),
        pytest.raises(FederatedError, match="have not answered"),
    ):
        run(nodes, tmp_path / "last.ckpt", 0.5, 0.1)
    assert r"Node 101: it has client no\nbody, and the run's client_ids are 0, 1, 2, 3." in caplog.text
    assert "Node 102: This SuperNode's client-id is None" in caplog.text


def test_registrations_arrive_before_the_last_reply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport = FlowerTransport(None, [0, 1], 10.0, 10.0)  # type: ignore[arg-type]
    task, late = (Message({"client": client, "phase": "train", "round": 0}) for client in (0, 1))
    sent: list[list[Any]] = []
    for name, result in (("_query_nodes", []), ("_pull", [task, late])):
        monkeypatch.setattr(transport, name, lambda *_, result=result: result)
    monkeypatch.setattr(transport, "_send", lambda missing: sent.append(list(missing)))
    come = [one.client for one in transport.exchange({0: task}, {1: late}) if not isinstance(one, Absent)]
    assert come == [1, 0]
    assert sent == [[1, 0]], "a message to a node ends where the next task is too large"


def test_client_ids_with_equal_text_are_rejected() -> None:
    with pytest.raises(FederatedError, match="read alike"):
        FlowerTransport(None, [1, "1"], 1.0, 1.0)  # type: ignore[arg-type]
