"""The apps for Flower, without Flower's processes: records, lost messages, nodes that come and go, restarts."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason='no Flower: pip install "lightning_fed[flower]"')

from filelock import FileLock
from flwr.app import ArrayRecord, RecordDict
from flwr.app.message.recorddict import RecordDict as Inflated
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.task_identity import TaskIdentity

from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy import FederatedServer, Message
from lightning_fed.deploy.flower import client, client_app, courier, server
from lightning_fed.deploy.flower.records import clients_in, packed, unpacked, who
from lightning_fed.deploy.flower.resident import Resident, called, clients_of, named, state_dir_of
from tests.deploy.flower_grid import NodesHere
from tests.deploy.flower_task import DATA, NAMES
from tests.deploy.site_models import model
from tests.deploy.wire import make_trainer, parameters, simulated

ROOT = Path(__file__).parent.parent.parent
QUICK = server.Options(phase_timeout=600.0, ask_again=0.0)


def test_importing_the_apps_of_a_site_imports_no_pytorch() -> None:
    heavy = ("torch", "pytorch_lightning", "lightning", "safetensors", "sklearn")
    probe = f"""
import sys
from lightning_fed.deploy.flower import client_app
app = client_app({NAMES[0]!r}, {NAMES[1]!r}, {DATA!r})
print([name for name in sys.modules if name.split(".")[0] in {heavy}])
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_messages_come_through_records_as_they_are() -> None:
    tensors = {"a": torch.randn(3, dtype=torch.float64), "b": torch.tensor(2.5), "c": torch.arange(4) > 1}
    content = Message({"client": "x", "round": 3}, tensors).to_bytes()
    messages, refused = unpacked(packed({"0": content, "1": b"\0"}, {"2": "ill"}))
    assert messages == {"0": content, "1": b"\0"}
    assert refused == {"2": "ill"}
    assert Message.from_bytes(messages["0"]).tensors["a"].dtype == torch.float64
    assert unpacked(RecordDict()) == ({}, {})
    assert unpacked(RecordDict({"messages": ArrayRecord()})) == ({}, {})
    assert clients_in(who([3, "north"])) == ["3", "north"]
    assert clients_in(RecordDict()) == []


def test_flower_cuts_a_large_message_into_pieces() -> None:
    content = bytes(range(256)) * (FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE // 100)
    record = packed({"0": content})
    pieces = [part.deflate() for part in get_all_nested_objects(record).values()]
    assert len(pieces) > 3
    assert max(map(len, pieces)) < FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE + 1000
    inflated = Inflated.inflate(record.deflate(), record.children)
    assert unpacked(inflated)[0] == {"0": content}


def test_a_node_names_its_clients() -> None:
    assert clients_of({"client-id": 3}) == [3]
    assert clients_of({"client-id": "north"}) == ["north"]
    assert clients_of({"client-id": "0, 12,007"}) == [0, 12, "007"]
    for wrong in ({}, {"client-id": ""}, {"client-id": "a,,b"}, {"client-id": True}):
        with pytest.raises(ValueError, match="client-id"):
            clients_of(wrong)
    assert state_dir_of({"client-id": "a/b"}).name == "a_b"
    assert state_dir_of({"client-id": 1, "state-dir": "/srv/site"}) == Path("/srv/site")


def test_functions_are_found_by_name() -> None:
    assert named("make_model", model) == "tests.deploy.site_models:model"
    assert called(named("make_model", model)) is model
    for wrong in (lambda: None, "no name", "module:", partial(model)):
        with pytest.raises(FederatedError, match="make_model.*at the top of a module"):
            named("make_model", wrong)
    with pytest.raises(FederatedError, match="has no function 'nobody'|has no function nobody"):
        called("tests.deploy.site_models:nobody")


class SitesHere:
    """Resident processes that are none: they answer in this one."""

    open: dict[str, Resident] = {}
    ends_with: set[int] = set()

    def __init__(self, makers: Any, node_config: Any) -> None:
        spec = {"makers": makers, "node_config": dict(node_config), "parent": 0, "paths": []}
        key = json.dumps(spec, sort_keys=True)
        self.resident = self.open.setdefault(key, Resident(spec))

    def answer(self, tasks: dict[str, bytes]) -> tuple[dict[str, bytes], dict[str, str]]:
        found = {key: self.resident.answer(task) for key, task in tasks.items()}
        replies = {key: content for key, (kind, content) in found.items() if kind == b"R"}
        return replies, {key: content.decode() for key, (kind, content) in found.items() if kind == b"E"}

    @classmethod
    def end(cls) -> None:
        for resident in cls.open.values():
            resident._leave()
        cls.open = {}


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


def run(grid: NodesHere, checkpoint: Path, options: server.Options = QUICK, **trainer: Any) -> Any:
    module = model()
    with FederatedServer(make_trainer("Scaffold ii", **trainer), module, range(4)) as driven:
        server.run_server(driven, grid, checkpoint, options)
    return module


def expected(**options: Any) -> torch.Tensor:
    return parameters(simulated(partial(make_trainer, "Scaffold ii", **options)).lightning_module)


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


def test_a_run_goes_on_from_its_checkpoint(nodes: Any, tmp_path: Path) -> None:
    checkpoint = tmp_path / "folder" / "last.ckpt"
    run(nodes, checkpoint, max_rounds=2)
    SitesHere.end()
    asked = len(nodes.asked)
    assert torch.equal(parameters(run(nodes, checkpoint)), expected())
    assert len(nodes.asked) > asked
    asked = len(nodes.asked)
    module = run(nodes, checkpoint, server.Options(600.0, 600.0))
    assert torch.equal(parameters(module), expected()), "a run that is done stays so"
    assert [kind for _, kind in nodes.asked[asked:]] == ["query"] * 3 + [
        "train"
    ] * 3  # a message for each node, to greet


def test_two_runs_do_not_work_with_one_checkpoint(nodes: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(server, "_PATIENCE", 0.1)
    checkpoint = tmp_path / "last.ckpt"
    with (
        FileLock(f"{checkpoint}.lock"),
        pytest.raises(FederatedError, match="Another run works with .*last.ckpt"),
    ):
        run(nodes, checkpoint)
    assert not nodes.asked
    run(nodes, checkpoint, max_rounds=1)


def test_who_does_not_answer_in_time_is_named(nodes: Any, tmp_path: Path) -> None:
    del nodes.nodes[101]
    with pytest.raises(FederatedError, match="1 clients have not answered to 'hello': 1"):
        run(nodes, tmp_path / "last.ckpt", server.Options(0.5, 0.1))
    module = run(nodes, tmp_path / "last.ckpt", server.Options(0.5, 0.1), on_client_error="drop", max_failed_share=0.9)
    assert torch.isfinite(parameters(module)).all()


def test_a_node_that_comes_late_takes_part_from_the_next_round_on(
    nodes: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    late, answer = nodes.nodes.pop(101), nodes._replies

    def replies(key: str) -> list[Any]:
        if nodes.waiting[key].metadata.group_id == "train 1":
            nodes.nodes[101] = late
        return answer(key)

    nodes._replies = replies
    with caplog.at_level("INFO", logger="flwr"):
        drops = {"on_client_error": "drop", "max_failed_share": 0.9}
        run(nodes, tmp_path / "last.ckpt", server.Options(2.0, 0.1), clients_per_round=1.0, **drops)
    assert "Round 1: clients [0, 2, 3]," in caplog.text
    assert "Round 4: clients [0, 1, 2, 3]," in caplog.text


def test_why_a_site_refuses_reaches_the_server(nodes: Any, tmp_path: Path) -> None:
    with pytest.raises(
        FederatedError, match="'hello': 0, 1, 2, 3.*0 says: The site of client 0 does not run what.*seed"
    ):
        run(nodes, tmp_path / "last.ckpt", seed=5)


def test_a_node_of_a_strange_client_is_logged(nodes: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nodes.nodes[101] = {**nodes.nodes[101], "client-id": "nobody"}
    nodes.nodes[102] = {}
    with caplog.at_level("WARNING", logger="flwr"), pytest.raises(FederatedError, match="have not answered"):
        run(nodes, tmp_path / "last.ckpt", server.Options(0.5, 0.1))
    assert "Node 101: it has client nobody, and the run's client_ids are 0, 1, 2, 3." in caplog.text
    assert "Node 102: This SuperNode's client-id is None" in caplog.text


def test_options_of_the_run_are_checked() -> None:
    assert server.options_of({"phase-timeout": 5, "other": "x"}) == server.Options(5.0, 60.0)
    for wrong in (0, -1.0, "5", True):
        with pytest.raises(FederatedError, match="ask-again = .* must be a positive number of seconds"):
            server.options_of({"ask-again": wrong})
    with pytest.raises(FederatedError, match="read alike"):
        courier.Courier(None, [1, "1"], 1.0, 1.0)  # type: ignore[arg-type]
