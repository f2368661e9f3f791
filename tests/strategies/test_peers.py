"""Failed exchanges between processes name the process at fault."""

import os
import re
import select
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_fed.strategies import peers as module
from lightning_fed.strategies.peers import Endpoint, Peers, monitored_connections
from tests.helpers.processes import Outcome, in_processes, wait_until


def met(work: Callable[[Peers, int], Any], folder: Path, count: int = 3, limit: float = 5.0) -> list[Outcome]:
    """Run a function in several connected processes."""

    def run() -> Any:
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", rank=rank, world_size=count)
        return work(Peers.meet(rank, count, limit), rank)

    return in_processes(run, folder, count)


def exchange(peers: Peers) -> None:
    with peers.naming():
        dist.barrier()


def test_peers_report_an_ended_process_as_missing(tmp_path: Path) -> None:
    has_seen = tmp_path / "seen"

    def work(peers: Peers, rank: int) -> Any:
        before = sorted(peers.gone())
        exchange(peers)
        if rank == 2:
            return wait_until(has_seen.exists)
        if rank == 1:
            return before
        wait_until(lambda: bool(peers.gone()))
        after = sorted(peers.gone())
        has_seen.touch()
        return before, after

    assert [outcome.value for outcome in met(work, tmp_path)] == [([], [1]), [], None]


@pytest.mark.thorough
def test_process_ended_by_another_failure_is_not_reported_missing(tmp_path: Path) -> None:
    exists = tmp_path / "waits"

    def work(peers: Peers, rank: int) -> Any:
        if rank == 0:
            ended = os.pidfd_open(peers.endpoints[1].pid)
            exists.touch()
            select.select([ended], [], [])
        if rank == 1:
            wait_until(exists.exists)
        if rank < 2:
            exchange(peers)

    first, second, third = met(work, tmp_path)
    assert not third.error
    for rank, outcome in enumerate((first, second)):
        assert re.search(rf"FederatedError: Process {rank} on \S+ has lost process 2 \(pid \d+\) on", outcome.error)


@pytest.mark.thorough
def test_failed_exchange_between_live_processes_keeps_its_error(tmp_path: Path) -> None:
    def work(peers: Peers, rank: int) -> Any:
        if rank == 0:
            with peers.naming():
                raise RuntimeError("of another kind")
        return dist.barrier()

    first, *_ = met(work, tmp_path, limit=0.5)
    assert first.error == "RuntimeError: of another kind"


@pytest.mark.thorough
def test_unreachable_process_warns_at_startup(tmp_path: Path) -> None:
    def run() -> Any:
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", rank=rank, world_size=2)
        if rank == 0:
            module._addresses = lambda: ("192.0.2.1",)  # reserved for documentation
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            peers = Peers.meet(rank, 2, 0.5)
        return [str(w.message) for w in caught], sorted(peers.gone())

    for rank, outcome in enumerate(in_processes(run, tmp_path)):
        ((message,), gone) = outcome.value
        assert f"Process {rank} on" in message
        assert f"has no connection to process {1 - rank} (pid" in message
        assert gone == []


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system does not offer it")
def test_only_connections_opened_inside_are_monitored() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        before = socket.create_connection(listener.getsockname())
        with monitored_connections(7.0):
            inside = socket.create_connection(listener.getsockname())
        after = socket.create_connection(listener.getsockname())
        found = [
            (
                line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                line.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
            )
            for line in (before, inside, after)
        ]
        for line in (before, inside, after):
            line.close()
    assert found == [(0, 0), (1, 7000), (0, 0)]


def test_docs_quote_the_error_message(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/engines.md").read_text()
    quoted = re.findall(r"^    FederatedError: (.*?) \.\.\.$", page, re.MULTILINE | re.DOTALL)
    monkeypatch.setattr(module, "_SETTLE", 0.0)
    of_a, of_b = (
        [Endpoint("node-a", 8000 + rank) for rank in range(4)],
        [Endpoint("node-b", pid) for pid in (8663, 8664)],
    )
    peers = Peers(0, of_a + of_b)
    peers._gone = {4, 5}
    assert [text for text in map(" ".join, map(str.split, quoted)) if str(peers._error()).startswith(text)]
