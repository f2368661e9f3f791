"""The client that failed among clients trained together."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lightning_fed.core.errors import ClientError
from lightning_fed.engines.base import WorkPlan
from lightning_fed.rounds.failures import Faults, Isolation
from lightning_fed.server.participation import Participant

PLANS = [WorkPlan(Participant(f"c{i}", i, 5, 1, 2), None, (2,)) for i in range(4)]  # type: ignore[arg-type]


class Engine:
    """Records the clients that it trains, and counts calls of undo.

    Args:
        bad: The stored indices of clients that fail.
        together: The most clients that can be trained at once.
    """

    def __init__(self, bad: Sequence[int] = (), together: int = 4) -> None:
        self.bad, self.together = bad, together
        self.trained: list[list[int]] = []
        self.undone = 0

    def savepoint(self) -> Any:
        def undo() -> None:
            self.undone += 1

        return undo

    def train(self, plans: Sequence[WorkPlan]) -> Any:
        indices = [plan.participant.index for plan in plans]
        self.trained.append(indices)
        for index in indices:
            if index in self.bad:
                raise ClientError(f"Client c{index} failed.", f"c{index}")
        if len(plans) > self.together:
            raise ClientError("Clients c0 and others failed.", "c0")
        return tuple(indices)


def run(engine: Engine, drops: bool, plans: Sequence[WorkPlan] = PLANS) -> tuple[Any, dict[int, ClientError]]:
    failed: dict[int, ClientError] = {}
    return Isolation(engine, drops).run(engine.train, plans, failed), failed  # type: ignore[arg-type]


def test_client_with_nan_norm_does_not_hide_an_outlier() -> None:
    faults = Faults(drops=True, max_share=1.0, max_ratio=10.0)
    assert faults.add_outliers({"a": 1.0, "b": float("nan"), "c": 1e9, "d": 1.0}, "an update", torch.ones(2)) == {"c"}
    assert faults.add_outliers({"a": float("nan")}, "an update", torch.ones(2)) == set()


def test_healthy_clients_are_trained_once() -> None:
    engine = Engine()
    assert run(engine, drops=True) == ((0, 1, 2, 3), {})
    assert (engine.trained, engine.undone) == ([[0, 1, 2, 3]], 0)


def test_failed_client_does_not_affect_the_others() -> None:
    engine = Engine(bad=[2])
    result, failed = run(engine, drops=True)
    assert result == (0, 1, 3)
    assert [(index, error.culprit) for index, error in failed.items()] == [(2, "c2")]
    assert engine.trained == [[0, 1, 2, 3], [0], [1], [2], [3], [0, 1, 3]]
    assert engine.undone >= 5, "the chunk, and each client that was tried alone"


@pytest.mark.parametrize("plans", [PLANS, PLANS[:1]], ids=len)
def test_result_is_none_if_all_clients_fail(plans: Sequence[WorkPlan]) -> None:
    result, failed = run(Engine(bad=range(4)), drops=True, plans=plans)
    assert result is None
    assert sorted(failed) == list(range(len(plans)))


def test_run_raises_the_error_of_the_failed_client() -> None:
    engine = Engine(bad=[1])
    with pytest.raises(ClientError, match="Client c1 failed"):
        run(engine, drops=False)
    assert engine.undone == 0


@pytest.mark.parametrize("drops", [True, False])
def test_no_client_is_dropped_if_none_fails_alone(drops: bool) -> None:
    with pytest.raises(ClientError, match="c0 and others"):
        run(Engine(together=3), drops=drops)


@pytest.mark.parametrize("drops", [True, False])
def test_error_not_caused_by_a_client_is_raised_immediately(drops: bool) -> None:
    engine = Engine()

    def train(plans: Sequence[WorkPlan]) -> Any:
        engine.trained.append([])
        raise ClientError("The disk is full.")

    with pytest.raises(ClientError, match="disk is full"):
        Isolation(engine, drops).run(train, PLANS, {})  # type: ignore[arg-type]
    assert len(engine.trained) == 1


def test_search_for_failed_clients_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(bad=[2])
    isolation = Isolation(engine, True)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            isolation.run(engine.train, PLANS, {})
    assert sum("one by one" in record.getMessage() for record in caplog.records) == 1
