"""scvi-tools: its training plans, LightningModules around models of gene expression."""

# pip install: scvi-tools

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tests.public_modules.harness import FLOAT32, SIZES, PublicCase, Published, needs

needs("scvi", lightning="lightning")
from scvi import REGISTRY_KEYS
from scvi.module import VAE
from scvi.train import TrainingPlan


class Cells(Dataset):
    """Counts of genes, under the names of scvi's loaders."""

    def __init__(self, n: int, seed: int) -> None:
        self.counts = torch.poisson(torch.full((n, 6), 3.0), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        zero = torch.zeros(1)
        return {REGISTRY_KEYS.X_KEY: self.counts[index], REGISTRY_KEYS.BATCH_KEY: zero, REGISTRY_KEYS.LABELS_KEY: zero}


def clients() -> list[Cells]:
    return [Cells(n, seed) for seed, n in enumerate(SIZES)]


def plan() -> Any:
    net = VAE(6, n_batch=1, n_hidden=8, n_latent=2, use_batch_norm="none", use_layer_norm="both", dropout_rate=0.0)
    return TrainingPlan(net, n_epochs_kl_warmup=4, lr=0.01)


CASES = [
    PublicCase(
        "TrainingPlan",
        plan,
        clients,
        "sequential",
        "it updates the metric 'train_metrics.0'",
        val=lambda: Cells(4, 9),
        logged=("train_loss",),
        draws=True,
        **FLOAT32,
    ),
]


class TestPublished(Published):
    cases = CASES
