"""The loop of one client's local epochs: batches that are handed to it, losses of its steps, and processes that share
them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fed import FederatedCallback
from lightning_fed.engines.sequential.local_loop import ClientFetcher, SplitResults
from tests.helpers.engines import Ordinary, run
from tests.helpers.training import Net


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


def results_of(*values: tuple[float, int]) -> SplitResults:
    """Return what a process has collected of a client."""
    results = SplitResults(torch.device("cpu"))
    with results.of_client(Net()):
        for value, size in values:
            results.log("training_step", "loss", torch.tensor(value), batch_size=size)
    return results


def test_a_clients_means_are_those_of_all_processes_also_where_one_had_no_example() -> None:
    processes = [results_of((2.0, 1), (5.0, 2)), results_of((1.0, 3)), results_of()]
    parts = [results.outline_client() for results in processes]
    for results in processes:
        results.merge_client(parts)
        assert results.close_client() == {"loss": (2 + 10 + 3) / 6}


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
