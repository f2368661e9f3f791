"""The stages of a round: drawn, run, restarted without a failed client that others depend on, and left."""

from collections import Counter
from typing import Any

import pytest
import torch

from lightning_fed import FederatedCallback, FederatedDataModule
from lightning_fed.algorithms import FedAvg, Mime
from tests.helpers.engines import Ordinary, Record, run
from tests.helpers.training import clients


class Hooks(Record):
    """Counts hooks, and records whether a round is current in them."""

    def __init__(self) -> None:
        super().__init__()
        self.called: Counter[str] = Counter()
        self.current_round: list[bool] = []

    def note(self, name: str, trainer: Any) -> None:
        self.called[name] += 1
        self.current_round.append(trainer.fit_loop.run_state.rounds.current_round is not None)

    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        self.note("start", trainer)

    def on_round_restart(self, trainer: Any, pl_module: Any, round: int) -> None:
        self.note("restart", trainer)

    def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
        super().on_client_end(trainer, pl_module, client_report)
        self.note("client", trainer)

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        super().on_round_end(trainer, pl_module, round_report)
        self.note("end", trainer)


def with_invalid(bad: int | None) -> FederatedDataModule:
    """Return clients. The client ``bad``, if any, has invalid data."""
    parts = clients((8, 12, 8, 4))
    if bad is not None:
        parts[bad].tensors[0][0] = float("nan")
    return FederatedDataModule(parts, batch_size=4)


def fitted(hooks: FederatedCallback, bad: int | None, **options: Any) -> torch.Tensor:
    given = {"max_rounds": 1, "limit_val_batches": 0, "on_client_error": "drop", **options}
    return run("sequential", Ordinary, lambda: with_invalid(bad), callbacks=hooks, **given).fit_loop.state.x


@pytest.mark.filterwarnings("ignore:Client 2")
def test_round_restarts_without_a_client_whose_gradient_others_use() -> None:
    hooks, without = Hooks(), Hooks()
    x = fitted(hooks, 2, algorithm=Mime())
    expected = fitted(
        without, None, algorithm=Mime(), clients_per_round=None, sampler=lambda seed, round: hooks.rounds[0].cohort
    )
    assert hooks.called == {"start": 1, "restart": 1, "client": 3, "end": 1}
    assert list(hooks.rounds[0].failed) == [2]
    assert hooks.rounds[0].dropped == (2,)
    torch.testing.assert_close(x, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:Client 2")
def test_client_that_fails_in_local_work_needs_no_restart() -> None:
    hooks = Hooks()
    fitted(hooks, 2, algorithm=FedAvg())
    assert hooks.called == {"start": 1, "client": 3, "end": 1}
    assert list(hooks.rounds[0].failed) == [2]


def test_server_half_exists_during_client_work_and_is_released_after() -> None:
    hooks = Hooks()
    fitted(hooks, None, max_rounds=2)
    assert hooks.current_round == [False, *[True] * 4, False] * 2


def test_empty_round_logs_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    hooks = Hooks()
    options = {"clients_per_round": None, "sampler": lambda seed, round: [] if round == 1 else [0, 3]}
    with caplog.at_level("INFO"):
        fitted(hooks, None, max_rounds=2, **options)
    assert torch.equal(*hooks.x)
    assert [report.cohort for report in hooks.rounds] == [(0, 3), ()]
    assert "Nobody takes part in round 1: it changes nothing." in caplog.text
