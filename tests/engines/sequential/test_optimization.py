"""Batches that are accumulated make the step of one batch of all their examples."""

import torch

from lightning_fed.algorithms import Algorithm, Mime, Scaffold
from tests.helpers.engines import Record, assert_close, run, state_of
from tests.helpers.training import data


def ends_of(algorithm: Algorithm, accumulated: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return the final state and the clients' mean losses, where every step sees four examples."""
    record = Record()
    t = run(
        "sequential",
        datamodule=lambda: data((12, 8, 16, 4), batch_size=4 // accumulated),
        algorithm=algorithm,
        accumulate_grad_batches=accumulated,
        callbacks=[record],
    )
    return state_of(t), [report.loss for report in record.reports]


def test_second_gradients_and_losses_are_those_of_the_whole_batch() -> None:
    for algorithm in (Mime(), Scaffold()):
        (whole, losses), (parts, of_parts) = (ends_of(algorithm, accumulated) for accumulated in (1, 2))
        assert_close(parts, whole)
        torch.testing.assert_close(torch.tensor(of_parts), torch.tensor(losses), rtol=1e-6, atol=1e-9)
