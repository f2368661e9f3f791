"""Tasks reach their sites, and replies reach the server, whatever FLARE loses. No site is trusted."""

import threading
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy import Absent, Message, Refusal, transport
from lightning_fed.deploy.flare.arrays import packed
from lightning_fed.deploy.flare.transport import AbortedError, FlareTransport
from lightning_fed.deploy.site_process import refusal
from tests.deploy.flare.fake import Flare, expected
from tests.deploy.wire import parameters


def test_run_asks_each_site_once_and_matches_simulation_bits(flare: Flare) -> None:
    assert torch.equal(parameters(flare.run()), expected())
    assert flare.asked[:3] == [("site-1", "register", [0]), ("site-2", "register", [1]), ("site-3", "register", [2, 3])]
    assert not flare.given_back, "nothing is left to take back"


def test_lost_tasks_are_sent_again(flare: Flare) -> None:
    losses = iter(["EXECUTION_EXCEPTION", None, "its task has ended as timeout", None, None, "EXECUTION_EXCEPTION"])
    flare.spoils = lambda site, result: next(losses, None) or result
    assert torch.equal(parameters(flare.run()), expected())
    assert next(losses, "all") == "all"


def test_results_from_other_threads_are_accepted(flare: Flare) -> None:
    send, threads = flare.send, []

    def later(site: str, arrays: Any, done: Any) -> int:
        threads.append(threading.Timer(0.01, send, (site, arrays, done)))
        threads[-1].start()
        return len(threads)

    flare.send = later  # type: ignore[method-assign]
    assert torch.equal(parameters(flare.run(clients_per_round=1)), expected(clients_per_round=1))
    for thread in threads:
        thread.join()


def test_repeatedly_failing_site_is_dropped_and_named(flare: Flare) -> None:
    flare.spoils = lambda site, result: "EXECUTION_EXCEPTION; see its log" if site == "site-3" else result
    with pytest.raises(FederatedError, match=r"'register': 2, 3.*Client 2: its site 'site-3': EXECUTION_EXCEPTION"):
        flare.run()
    assert [site for site, _, _ in flare.asked].count("site-3") == 4
    drops = {"on_client_error": "drop", "max_failed_share": 0.9}
    assert torch.isfinite(parameters(flare.run(**drops))).all()


@pytest.mark.thorough
def test_unresponsive_site_is_named_and_can_return_later(flare: Flare) -> None:
    flare.spoils = lambda site, result: None if site == "site-2" else result
    with pytest.raises(FederatedError, match=r"'register': 1\..*Client 1: no reply arrived for 1 s"):
        flare.run(1.0)
    assert len(flare.given_back) == 1, "its task is taken back"
    heard: list[str] = []

    def silent_for_a_while(site: str, result: Any) -> Any:
        heard.append(site)
        return None if site == "site-2" and len(heard) < 12 else result

    flare.spoils = silent_for_a_while
    flare.asked.clear()
    module = flare.run(1.0, on_client_error="drop", max_failed_share=0.9, clients_per_round=1.0)
    assert torch.isfinite(parameters(module)).all()
    assert ("site-2", "train", [1]) in flare.asked[-3:], "it takes part again"


@pytest.mark.thorough
def test_silent_site_is_awaited_only_if_the_round_requires_it(flare: Flare, caplog: pytest.LogCaptureFixture) -> None:
    """The site returns in the third round, registers, and takes part from the next round on."""
    drops = {"on_client_error": "drop", "clients_per_round": 1.0, "max_failed_share": 0.3}
    flare.spoils = lambda site, result: None if silence(site) else result

    def silence(site: str) -> float:
        return 301.0 * (site == "site-2" and len(flare.asked) < 10)

    flare.silent_for = silence
    flare.run(600.0, **drops)
    assert [phases for site, phases, _ in flare.asked if site == "site-2"] == ["register"] * 4 + ["train"] * 2
    assert len(flare.given_back) == 3
    assert caplog.messages.count("Client 1 does not answer: its site was not connected for 300 s") == 1
    for silent, options in ((("site-2", "site-3"), drops), (("site-2",), {})):  # too many fail, or none may fail
        flare.silent_for = lambda site, silent=silent: 301.0 * (site in silent)  # type: ignore[misc]
        flare.spoils = lambda site, result, silent=silent: None if site in silent else result  # type: ignore[misc]
        caplog.clear()
        with pytest.raises(FederatedError, match="failed in round 0" if options else "not answered to 'register'"):
            flare.run(0.5, **options)
        assert "Client 1 does not answer: no reply arrived for 0.5 s" in caplog.messages


def test_abort_ends_a_waiting_fit(flare: Flare) -> None:
    def aborted(site: str, result: Any) -> None:
        flare.is_aborted = True

    flare.spoils = aborted
    with pytest.raises(AbortedError):
        flare.run()
    assert len(flare.given_back) == 3


def test_large_messages_are_sent_one_at_a_time(flare: Flare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_MOST", 1)
    assert torch.equal(parameters(flare.run()), expected())
    assert max(len(clients) for _, _, clients in flare.asked) == 1


def test_site_cannot_answer_for_another_site(flare: Flare) -> None:
    """Site 3 forges the reply of site 1: its own clients have no reply, and client 0 keeps its site."""
    seen: dict[str, Any] = {}

    def forged(site: str, result: Any) -> Any:
        seen[site] = result
        return dict.fromkeys(result, seen["site-1"]["0"]) if site == "site-3" else result

    flare.spoils = forged
    with pytest.raises(FederatedError, match="'register': 2, 3.*The reply is from client 0"):
        flare.run()


@pytest.mark.parametrize(
    "result",
    [{}, {"0": None}, {"0": [1, 2]}, {"0": np.zeros(3)}, {"0": np.zeros(3, np.uint8)}, {7: np.array(["x"])}],
    ids=["empty", "none", "list", "floats", "no message", "texts"],
)
def test_invalid_result_counts_as_a_refusal(flare: Flare, result: Any) -> None:
    flare.spoils = lambda site, good: result if site == "site-1" else good
    with pytest.raises(FederatedError, match="'register': 0"):
        flare.run()


def test_late_result_of_a_lost_task_is_ignored(flare: Flare) -> None:
    kept: list[Any] = []

    def send(site: str, arrays: Any, done: Any) -> int:
        kept.append(done)
        done("lost" if len(kept) == 1 else packed({"0": refusal(f"answer {len(kept)}")}))
        if len(kept) == 2:
            kept[0](packed({"0": refusal("late")}))
        return len(kept)

    made = FlareTransport(send, kept.remove, {"a": ["x"]}, 5.0, lambda: False)
    come = list(made.exchange({"x": Message({"client": "x"})}, {}))
    assert [answer for answer in come if not isinstance(answer, Absent)] == [Refusal("x", "answer 2")]


def test_client_on_two_sites_is_rejected() -> None:
    with pytest.raises(FederatedError, match="names a client twice"):
        FlareTransport(None, None, {"a": [1], "b": [1]}, 1.0, None)  # type: ignore[arg-type]
