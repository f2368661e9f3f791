"""Gradient checkpointing: the backward pass recomputes activations, and nothing else changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_fed import FederatedError
from lightning_fed.algorithms import FedAvg, FedDane, Mime, Scaffold
from tests.helpers.selection import covering
from tests.helpers.training import Net, data, fit, seeded, trainer

METHODS = {"FedAvg": FedAvg, "SCAFFOLD": Scaffold, "Mime": Mime, "FedDANE": lambda: FedDane(mu=0.1)}


class Checkpointed(Net):
    """Checkpoints its body, which has dropout, and so keeps none of its activations."""

    def __init__(self, reentrant: bool | None = False, dropout: float = 0.3) -> None:
        super().__init__(dropout=dropout)
        self.reentrant, self.passes, self.steps = reentrant, 0, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Do not count validation passes."""

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return super().forward(x)
        if self.reentrant:
            x = x.clone().requires_grad_()  # without such an input, a segment gets no gradients
        return self.head(checkpoint(self._body, x, use_reentrant=self.reentrant))

    def _body(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.body(x)


@pytest.mark.parametrize(("method", "reentrant"), covering([*METHODS], [False, True]))
def test_results_equal_run_without_gradient_checkpointing(method: str, reentrant: bool) -> None:
    ends, models = [], []
    for made in (reentrant, None):
        models.append(seeded(Checkpointed, reentrant=made))
        ends.append(fit(models[-1], algorithm=METHODS[method]()))
    assert torch.equal(ends[0], ends[1])  # dropout's masks too: checkpointing restores the generators
    assert models[0].passes == 2 * models[0].steps > 0  # every step computes its activations twice


@pytest.mark.thorough
def test_resumed_run_has_identical_bits(tmp_path: Path) -> None:
    straight = fit(seeded(Checkpointed), algorithm=Scaffold())
    half = trainer(algorithm=Scaffold(), max_rounds=1)
    half.fit(seeded(Checkpointed), data())
    half.save_checkpoint(tmp_path / "half.ckpt")
    assert torch.equal(fit(seeded(Checkpointed), algorithm=Scaffold(), ckpt_path=tmp_path / "half.ckpt"), straight)


@pytest.mark.thorough
@pytest.mark.parametrize("reentrant", [False, True])
def test_vectorized_engine_rejects_gradient_checkpointing(reentrant: bool) -> None:
    class Stateless(Checkpointed):
        training_step = Net.training_step

        def _body(self, x: Tensor) -> Tensor:
            return self.body(x)

    with pytest.raises(FederatedError, match="it cannot be run for several clients at once"):
        fit(seeded(Stateless, reentrant=reentrant), engine="vectorized")
    auto = fit(seeded(Stateless, reentrant=reentrant), engine="auto")
    assert torch.equal(auto, fit(seeded(Stateless, reentrant=reentrant)))
