"""A small model works with one thread, and the number of threads is restored afterwards."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from lightning_fed.trainer import threads
from lightning_fed.trainer.threads import SMALL, is_small, threads_for
from tests.helpers.training import Net, data, trainer

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _two_by_default(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make two threads PyTorch's default, as on a machine with two cores and no user settings."""
    monkeypatch.setattr(threads, "_SET_BY_USER", False)
    monkeypatch.setattr(threads, "_AT_IMPORT", 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


class Counting(pl.Callback):
    """Records the number of threads in every stage, and fails in a round if asked to."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.seen: set[int] = set()

    def on_validation_start(self, *_: Any) -> None:
        self.seen.add(torch.get_num_threads())

    def on_train_batch_start(self, *_: Any) -> None:
        self.seen.add(torch.get_num_threads())
        if self.fails:
            raise RuntimeError("stop here")


@pytest.mark.parametrize(
    ("make", "small"),
    [
        (lambda: nn.Linear(64, 64), True),
        (lambda: nn.LSTM(16, 16), True),
        (lambda: nn.Linear(1, SMALL // 2 - 1), True),
        (lambda: nn.Linear(1, SMALL // 2), False),
        (lambda: nn.Conv2d(1, 2, 3), False),
        (lambda: nn.LazyLinear(2), False),
    ],
)
def test_small_models_are_detected_by_their_parameters(make: Callable[[], nn.Module], small: bool) -> None:
    assert is_small(make()) is small


def test_small_model_trains_and_evaluates_on_one_thread(caplog: pytest.LogCaptureFixture) -> None:
    counting, model = Counting(), Net()
    made = trainer(max_rounds=2, callbacks=[counting])
    made.fit(model, data())
    made.validate(model, data())
    assert counting.seen == {1}
    assert torch.get_num_threads() == 2
    assert caplog.text.count("takes 1 thread instead of PyTorch's 2") == 1


def test_number_of_threads_is_restored_after_a_failed_run() -> None:
    counting = Counting(fails=True)
    with pytest.raises(Exception, match="stop here"):
        trainer(max_rounds=1, callbacks=[counting]).fit(Net(), data())
    assert counting.seen == {1}
    assert torch.get_num_threads() == 2


def test_number_of_threads_set_during_the_run_is_kept() -> None:
    with threads_for(Net(), CPU):
        torch.set_num_threads(3)
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("how", ["environment", "after import", "before import", "gpu", "large"])
def test_user_set_or_required_threads_are_kept(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "environment":
        monkeypatch.setattr(threads, "_SET_BY_USER", True)
    elif how == "after import":
        monkeypatch.setattr(threads, "_AT_IMPORT", 1)
    elif how == "before import":
        torch.set_num_threads(5)
        monkeypatch.setattr(threads, "_AT_IMPORT", 5)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    before = torch.get_num_threads()
    device = torch.device("cuda" if how == "gpu" else "cpu")
    with threads_for(nn.Conv1d(1, 1, 1) if how == "large" else Net(), device) as changed:
        assert changed is None
        assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before
