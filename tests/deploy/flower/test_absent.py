"""Clients without a node: a phase stops waiting for them after a while if the round can continue without them."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason='no Flower: pip install "lightning_fed[flower]"')

from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.deploy.flower import server
from tests.deploy.flower.grid import run

DROPS = {"on_client_error": "drop", "clients_per_round": 1.0}
LIMIT, TIMEOUT = 300.0, 3600.0


class Clock:
    """A clock that advances only while the transport sleeps, and then runs the due events."""

    def __init__(self) -> None:
        self.now, self.events = 0.0, list[tuple[float, Any]]()

    def sleep(self, seconds: float) -> None:
        self.now += 1000 * seconds  # a pause of 0.01 s takes 10 s
        while self.events and self.events[0][0] <= self.now:
            self.events.pop(0)[1]()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: made.now, sleep=made.sleep))
    return made


def at(nodes: Any, group: str, happens: Any) -> None:
    """Call ``happens`` once, when the server first looks for a reply to a phase."""
    answer, to_do = nodes._replies, [happens]

    def replies(key: str) -> Any:
        if to_do and key in nodes.waiting and nodes.waiting[key].metadata.group_id == group:
            to_do.pop()()
        return answer(key)

    nodes._replies = replies


def cohorts(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text.split("clients ")[1].split(", loss")[0] for text in caplog.messages if text.startswith("Round ")]


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="lightning_fed.deploy")


@pytest.mark.thorough
def test_departed_node_delays_a_run_by_one_limit(
    nodes: Any, tmp_path: Any, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    at(nodes, "train 1", lambda: nodes.nodes.pop(101))
    run(nodes, tmp_path / "last.ckpt", TIMEOUT, 60.0, absent_after=LIMIT, **DROPS)
    assert cohorts(caplog) == ["0, 1, 2, 3"] + ["0, 2, 3"] * 4
    assert LIMIT < clock.now < LIMIT + 200
    assert caplog.messages.count("Client 1 does not answer: no node was connected for 300 s") == 1


def test_missing_node_delays_a_run_by_one_limit(
    nodes: Any, tmp_path: Any, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    del nodes.nodes[101]
    run(nodes, tmp_path / "last.ckpt", TIMEOUT, 60.0, absent_after=LIMIT, **DROPS)
    assert cohorts(caplog) == ["0, 2, 3"] * 5
    assert LIMIT < clock.now < LIMIT + 200


@pytest.mark.thorough
def test_returning_node_is_asked_and_awaited_again(
    nodes: Any, tmp_path: Any, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    gone = nodes.nodes[101]
    at(nodes, "train 1", lambda: nodes.nodes.pop(101))
    at(nodes, "train 2", lambda: nodes.nodes.update({201: gone}))
    run(nodes, tmp_path / "last.ckpt", TIMEOUT, 60.0, absent_after=LIMIT, **DROPS)
    assert cohorts(caplog) == ["0, 1, 2, 3", "0, 2, 3", "0, 2, 3", "0, 1, 2, 3", "0, 1, 2, 3"]


def test_slow_node_is_awaited(nodes: Any, tmp_path: Any, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    del nodes.nodes[101]
    answer = nodes._replies
    nodes._replies = lambda key: [] if key in nodes.waiting and slow(nodes.waiting[key]) else answer(key)
    asked = dict[str, float]()

    def slow(message: Any) -> bool:
        is_long = message.metadata.dst_node_id == 100 and message.metadata.group_id.startswith("train")
        return is_long and clock.now - asked.setdefault(message.object_id, clock.now) < 10 * LIMIT

    run(nodes, tmp_path / "last.ckpt", TIMEOUT, 600.0, absent_after=LIMIT, max_rounds=2, **DROPS)
    assert cohorts(caplog) == ["0, 2, 3"] * 2
    assert 20 * LIMIT < clock.now < 2 * TIMEOUT
    assert nodes.asked.count((100, "query")) == 5  # one to identify it, then two a round at doubling intervals


@pytest.mark.thorough
def test_server_started_before_its_nodes_waits_for_them(
    nodes: Any, tmp_path: Any, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Too many clients are absent for a round to continue. The first arrival does not end the wait for others."""
    late = dict(nodes.nodes)
    nodes.nodes.clear()
    clock.events = [
        (1000.0 + 300 * number, lambda node=node: nodes.nodes.update({node: late[node]}))
        for number, node in enumerate(late)
    ]
    run(nodes, tmp_path / "last.ckpt", TIMEOUT, 60.0, absent_after=LIMIT, max_failed_share=0.4, **DROPS)
    assert cohorts(caplog) == ["0, 1, 2, 3"] * 5
    assert 1600.0 <= clock.now < TIMEOUT


def test_run_waits_for_a_node_that_has_not_identified_itself(
    nodes: Any, tmp_path: Any, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """The node may be working for another run."""
    answer = nodes._replies
    nodes._replies = lambda key: [] if is_busy(key) else answer(key)

    def is_busy(key: str) -> bool:
        return key in nodes.waiting and nodes.waiting[key].metadata.dst_node_id == 101 and clock.now < 1000.0

    run(nodes, tmp_path / "last.ckpt", TIMEOUT, 60.0, absent_after=LIMIT, **DROPS)
    assert cohorts(caplog) == ["0, 1, 2, 3"] * 5


@pytest.mark.parametrize("share", [None, 0.1])
def test_run_that_requires_missing_clients_waits_for_the_full_phase(
    share: float | None, nodes: Any, tmp_path: Any, clock: Clock
) -> None:
    at(nodes, "train 1", lambda: nodes.nodes.pop(101))
    drops = {} if share is None else {**DROPS, "max_failed_share": share}
    error = FederatedError if share is None else ClientError
    with pytest.raises(error, match="1"):
        run(nodes, tmp_path / "last.ckpt", TIMEOUT, 60.0, absent_after=LIMIT, **drops)
    assert clock.now > TIMEOUT
