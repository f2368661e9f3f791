"""The ServerApp, without Flower's processes: checkpoints, timeouts, late nodes and refusals."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason='no Flower: pip install "lightning_fed[flower]"')
from filelock import FileLock

from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy import saved_run
from lightning_fed.deploy.flower import server
from tests.deploy.flower.grid import SitesHere, expected, run
from tests.deploy.wire import parameters
from tests.helpers.optional import needs_pyarrow


def rounds_in(checkpoint: Path) -> int:
    return int(torch.load(checkpoint, weights_only=True)["loops"]["fit_loop"]["state_dict"]["round"])


def test_run_resumes_from_its_checkpoint(nodes: Any, tmp_path: Path) -> None:
    checkpoint = tmp_path / "folder" / "last.ckpt"
    run(nodes, checkpoint, max_rounds=2)
    assert rounds_in(checkpoint.with_name("last.previous.ckpt")) == 1
    assert rounds_in(checkpoint) == 2
    SitesHere.end()
    asked = len(nodes.asked)
    assert torch.equal(parameters(run(nodes, checkpoint)), expected())
    assert len(nodes.asked) > asked
    asked = len(nodes.asked)
    module = run(nodes, checkpoint, 600.0, 600.0)
    assert torch.equal(parameters(module), expected()), "a run that is done stays so"
    assert [kind for _, kind in nodes.asked[asked:]] == ["query"] * 3 + [
        "train"
    ] * 3  # one message greets each of the nodes


def test_two_runs_cannot_share_a_checkpoint(nodes: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(saved_run, "_PATIENCE", 0.1)
    checkpoint = tmp_path / "last.ckpt"
    with (
        FileLock(f"{checkpoint}.lock"),
        pytest.raises(FederatedError, match="Another run works with .*last.ckpt"),
    ):
        run(nodes, checkpoint)
    assert not nodes.asked
    run(nodes, checkpoint, max_rounds=1)


@pytest.mark.thorough
def test_unresponsive_client_is_named(nodes: Any, tmp_path: Path) -> None:
    del nodes.nodes[101]
    said = "1 client has not answered to 'register': 1.*Client 1: no node was connected for 0.5 s"
    with pytest.raises(FederatedError, match=said):
        run(nodes, tmp_path / "last.ckpt", 0.5, 0.1)
    module = run(nodes, tmp_path / "last.ckpt", 0.5, 0.1, on_client_error="drop", max_failed_share=0.9)
    assert torch.isfinite(parameters(module)).all()


@pytest.mark.thorough
def test_late_node_joins_from_the_next_round(nodes: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    late, answer = nodes.nodes.pop(101), nodes._replies

    def replies(key: str) -> list[Any]:
        if nodes.waiting[key].metadata.group_id == "train 1":
            nodes.nodes[101] = late
        return answer(key)

    nodes._replies = replies
    with caplog.at_level("INFO", logger="lightning_fed.deploy"):
        drops = {"on_client_error": "drop", "max_failed_share": 0.9}
        run(nodes, tmp_path / "last.ckpt", 2.0, 0.1, clients_per_round=1.0, **drops)
    rounds = dict(line.split(": loss ") for line in caplog.messages if line.startswith("Round "))
    assert rounds["Round 1"].endswith(", clients 0, 2, 3.")
    assert rounds["Round 4"].endswith(", clients 0, 1, 2, 3.")


def test_refusal_reason_of_a_site_reaches_the_server(nodes: Any, tmp_path: Path) -> None:
    with pytest.raises(
        FederatedError, match="'register': 0, 1, 2, 3.*Client 0: The site of client 0 has other settings than.*seed"
    ):
        run(nodes, tmp_path / "last.ckpt", seed=5)


def test_run_options_are_validated() -> None:
    assert server.seconds_in({"phase-timeout": 5, "other": "x"}) == [5.0, 60.0, 300.0]
    for wrong in (0, -1.0, "5", True):
        with pytest.raises(FederatedError, match="configuration.ask-again=.*: ask-again must be .* in .0, inf"):
            server.seconds_in({"ask-again": wrong})


@needs_pyarrow
def test_sites_agree_on_words_through_flower(nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.app import Context, RecordDict

    from lightning_fed.deploy.flower import client_app, server_app
    from tests.deploy import words

    monkeypatch.setattr(server, "end_with", SitesHere.ends_with.add)  # this process is not a ServerApp
    for name in ("handlers", "propagate", "level"):
        package = logging.getLogger("lightning_fed.deploy")
        monkeypatch.setattr(package, name, getattr(package, name))
    nodes.app, nodes.nodes = client_app(*words.NAMES, words.DATA), {}
    for number, client in enumerate(words.WARDS):
        path = tmp_path / f"{client}.csv"
        words.write(path, [client])
        at = {"client-id": client, "table": str(path), "state-dir": str(tmp_path / client), "share-words": "ward"}
        nodes.nodes[200 + number] = at
    checkpoint = tmp_path / "last.ckpt"
    app = server_app(*words.NAMES, list(words.WARDS), checkpoint, words.VAL, agree_on=["ward"])
    run_config = {"phase-timeout": 60.0, "ask-again": 60.0}
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=run_config, series_id=1)
    app(nodes, context)
    state = torch.load(checkpoint, weights_only=True)["loops"]["fit_loop"]["state_dict"]
    assert state["sites"]["words"] == words.AGREED
