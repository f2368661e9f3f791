"""Fits in one process: one thread at a time, nested fits, and a script's random numbers between fits."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fed import FederatedCallback, FederatedError
from lightning_fed.trainer import one_thread
from tests.helpers.training import data, seeded, trainer


class Calling(FederatedCallback):
    """Calls a function when a hook is first called."""

    def __init__(self, hook: str, function: Callable[[], Any]) -> None:
        self.function: Callable[[], Any] | None = function
        setattr(self, hook, self.call)

    def call(self, *_: Any) -> None:
        function, self.function = self.function, None
        if function is not None:
            function()


def test_fit_is_rejected_while_another_thread_fits() -> None:
    def fit_in_thread() -> None:
        with ThreadPoolExecutor(1) as pool, pytest.raises(FederatedError, match="another thread of this process"):
            pool.submit(trainer(max_rounds=1).fit, seeded(), data()).result()

    trainer(max_rounds=1, callbacks=Calling("on_round_start", fit_in_thread)).fit(seeded(), data())
    with ThreadPoolExecutor(1) as pool:
        pool.submit(trainer(max_rounds=1).fit, seeded(), data()).result()


def test_forked_process_may_fit_while_a_parent_thread_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_thread, "_fitting", threading.RLock())
    with ThreadPoolExecutor(1) as pool:
        pool.submit(one_thread._fitting.acquire).result()
        with pytest.raises(FederatedError, match="another thread"), one_thread.one_thread():
            pass
        one_thread._forget()
        with one_thread.one_thread():
            pass


def test_fit_inside_a_hook_does_not_affect_the_outer_fit() -> None:
    alone, outer, another = seeded(), seeded(), seeded()  # seeds the global generators
    trainer(max_rounds=2).fit(alone, data())
    inner = Calling("on_train_batch_end", lambda: trainer(max_rounds=1).fit(another, data()))
    trainer(max_rounds=2, callbacks=inner).fit(outer, data())
    assert inner.function is None
    for one, other in zip(alone.parameters(), outer.parameters(), strict=True):
        assert torch.equal(one, other)


def _fail() -> None:
    raise RuntimeError("stop here")


@pytest.mark.parametrize("fails", [False, True], ids=["done", "failed"])
def test_global_random_state_is_restored_after_fit(fails: bool) -> None:
    """Otherwise a random search would try the same candidate repeatedly."""
    run, model, examples = trainer(max_rounds=1), seeded(), data()
    if fails:
        run.callbacks.append(Calling("on_round_end", _fail))

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def seed() -> None:
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)

    seed()
    draw()
    second = draw()
    seed()
    draw()
    if fails:
        with pytest.raises(RuntimeError, match="stop here"):
            run.fit(model, examples)
    else:
        run.fit(model, examples)
    assert draw() == second
