"""pytorch-optimizer: local optimizers that keep counts, rates and flags in their parameter groups."""

# pip install: pytorch-optimizer

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from tests.public_modules.harness import SIZES, PublicCase, Published, needs, refusal, thin

needs("pytorch_optimizer")
from lightning_fed import FederatedError
from pytorch_optimizer import SPAM, AdaBelief, DAdaptAdam, Lookahead, Muon, Prodigy, ScheduleFreeAdamW


def examples(n: int, seed: int) -> TensorDataset:
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :3].argmax(1))


def clients() -> list[TensorDataset]:
    return [examples(n, seed) for seed, n in enumerate(SIZES)]


def trained_by(build: Callable[[nn.Module], torch.optim.Optimizer]) -> Any:
    """Return a module that trains with an optimizer."""
    network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    module = thin(network, lambda net, batch: F.cross_entropy(net(batch[0]), batch[1]))
    module.configure_optimizers = lambda: build(network)
    return module


def muon(network: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer with its two kinds of groups: matrices, and all others, which it trains by AdamW."""
    kinds: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for p in network.parameters():
        kinds[p.ndim > 1].append(p)
    return Muon([{"params": params, "use_muon": is_matrix} for is_matrix, params in kinds.items()])


def schedule_free(network: nn.Module) -> torch.optim.Optimizer:
    optimizer = ScheduleFreeAdamW(network.parameters(), lr=0.01)
    optimizer.train()
    return optimizer


def lookahead(network: nn.Module) -> torch.optim.Optimizer:
    return Lookahead(torch.optim.Adam(network.parameters()))


BUILDERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdaBelief": lambda network: AdaBelief(network.parameters(), lr=0.01),
    "DAdaptAdam": lambda network: DAdaptAdam(network.parameters()),
    "Muon": muon,
    "Prodigy": lambda network: Prodigy(network.parameters()),
    "ScheduleFreeAdamW": schedule_free,
}


def case(name: str, build: Callable[[nn.Module], torch.optim.Optimizer], **options: Any) -> PublicCase:
    why = "is not elementwise, or not known to be"
    return PublicCase(
        name, lambda: trained_by(build), clients, "sequential", why, val=lambda: examples(4, 9), **options
    )


CASES = [case(name, build, logged=("train_loss",)) for name, build in BUILDERS.items()]


class TestPublished(Published):
    cases = CASES


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lookahead, "instead of 'param_groups'"),
        (lambda network: SPAM(network.parameters()), "state is not empty"),
    ],
    ids=["Lookahead", "SPAM"],
)
def test_optimizer_that_keeps_state_elsewhere_is_rejected(build: Any, reason: str) -> None:
    assert reason in refusal(case("rejected", build))


def test_count_in_a_parameter_group_cannot_be_kept() -> None:
    from lightning_fed import FederatedDataModule, FederatedTrainer

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = FederatedTrainer(
        max_rounds=1, local_epochs=1, local_optimizer_state="keep", enable_model_summary=False, **quiet
    )
    with pytest.raises(FederatedError, match="AdaBelief changes the option 'step' of a parameter group"):
        trainer.fit(trained_by(BUILDERS["AdaBelief"]), FederatedDataModule(clients(), batch_size=4))
