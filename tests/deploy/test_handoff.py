"""A job that is driven from outside."""

import threading
from typing import Any

import pytest

from lightning_fed.deploy.handoff import Handoff


def test_a_job_pauses_with_items_and_goes_on_with_values() -> None:
    seen: list[Any] = []

    def job() -> None:
        seen.append(handoff.pause("a"))
        seen.append(handoff.pause("b"))

    handoff = Handoff(job)
    assert [handoff.resume(value) for value in ("not taken", 1, 2, 3)] == ["a", "b", None, None]
    assert seen == [1, 2]
    assert handoff.is_done


def test_an_error_of_the_job_reaches_its_driver_once() -> None:
    def job() -> None:
        handoff.pause(1)
        raise KeyboardInterrupt("now")

    handoff = Handoff(job)
    assert handoff.resume() == 1
    with pytest.raises(KeyboardInterrupt, match="now"):
        handoff.resume()
    assert (handoff.resume(), handoff.is_done) == (None, True)


def test_a_job_that_is_closed_ends_where_it_has_paused_and_cleans_up() -> None:
    seen: list[str] = []

    def job() -> None:
        try:
            handoff.pause(1)
            seen.append("goes on")
        except Exception:
            seen.append("is taken for an error")
        finally:
            seen.append("cleans up")

    before = threading.active_count()
    handoff = Handoff(job)
    handoff.resume()
    handoff.close()
    assert (seen, threading.active_count(), handoff.resume()) == (["cleans up"], before, None)
    never = Handoff(job)
    never.close()
    assert never.resume() is None  # it never begins
