"""Gradients beside the local steps leave nothing behind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fed.algorithms import Algorithm, FedAvg, FedDane, Mime, MimeMVR, Scaffold, SGDm
from tests.helpers.engines import Ordinary, run, state_of

METHODS: dict[str, Callable[[], Algorithm]] = {
    "Mime": lambda: Mime(SGDm()),
    "MimeMVR": lambda: MimeMVR(0.1),
    "SCAFFOLD, option i": lambda: Scaffold(option="i"),
    "FedDANE": lambda: FedDane(mu=0.1),
}


class Counts(Ordinary):
    """Assigns a new tensor to its buffer in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen = self.seen + 1
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("method", METHODS)
def test_an_assigned_buffer_counts_local_steps_alone(method: str) -> None:
    counted = [
        state_of(run("sequential", Counts, algorithm=make()))["buffer.seen"] for make in (METHODS[method], FedAvg)
    ]
    assert torch.equal(*counted)
    assert float(counted[0]) > 0
