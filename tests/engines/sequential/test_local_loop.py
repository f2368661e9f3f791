"""The loop of one client's local epochs: the batches it gets, and the losses of its steps."""

from typing import Any

import pytest
from torch import Tensor

from lightning_fed import FederatedCallback
from lightning_fed.engines.sequential.local_loop import ClientFetcher
from tests.helpers.engines import Ordinary, run


def test_batches_of_each_local_epoch_are_handed_out_in_order() -> None:
    fetcher = ClientFetcher()
    for batches in ([("a", 4), ("b", 4), ("c", 1)], [("d", 2)]):
        fetcher.bind(iter(batches), len(batches))
        found = []
        for batch, index, loader in iter(fetcher):
            found.append((batch, fetcher.examples))
            assert (index, loader) == (len(found) - 1, 0)
            assert fetcher.done == (len(found) == len(batches))
        assert found == batches
    fetcher.bind(iter(()), 0)
    assert fetcher.done
    with pytest.raises(StopIteration):
        next(fetcher)


class Losses(FederatedCallback):
    """Keeps the losses of each client's steps, and its report."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[float], Any]] = []

    def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
        self.seen.append((trainer.fit_loop.epoch_loop.step_losses, client_report))


@pytest.mark.parametrize("accumulated", [1, 2])
def test_every_local_step_has_its_loss_over_the_batches_that_it_accumulates(accumulated: int) -> None:
    losses = Losses()
    run("sequential", max_rounds=1, callbacks=losses, accumulate_grad_batches=accumulated)
    for steps, report in losses.seen:
        batches = -(-report.size // 4)
        assert len(steps) == report.steps == -(-batches // accumulated)
    whole = [report for _, report in losses.seen if report.size % (4 * accumulated) == 0]
    assert whole, "a client whose batches are all full"
    for steps, report in losses.seen:
        if report in whole:
            assert report.loss == pytest.approx(sum(steps) / len(steps), rel=1e-12)


class Skips(Ordinary):
    """Ends each local epoch before its third batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


def test_a_hook_may_skip_the_rest_of_a_local_epoch() -> None:
    losses = Losses()
    run("sequential", Skips, max_rounds=1, local_epochs=2, callbacks=losses)
    for steps, report in losses.seen:
        assert len(steps) == report.steps == 2 * min(2, -(-report.size // 4))


class Sometimes(Ordinary):
    """Returns no loss for the first batch of a local epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return super().training_step(batch, batch_idx) if batch_idx else None


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_a_batch_without_a_loss_is_no_local_step() -> None:
    losses = Losses()
    run("sequential", Sometimes, max_rounds=1, callbacks=losses)
    for steps, report in losses.seen:
        assert len(steps) == report.steps == -(-report.size // 4) - 1 > 0
