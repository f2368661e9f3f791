"""chemprop: its MPNN on batches of molecules from its own loader."""

# pip install: chemprop

from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.public_modules.harness import FLOAT32, SIZES, PublicCase, Published, needs, refusal

needs("chemprop", lightning="lightning")
from chemprop import nn as parts
from chemprop.data import MoleculeDatapoint, MoleculeDataset, build_dataloader
from chemprop.models import MPNN

SMILES = ["C", "CC", "CCO", "c1ccccc1", "CC(=O)O", "CCN", "C#N", "CCCl", "OCCO", "CC(C)O", "c1ccncc1", "CCOC"]


def molecules(n: int, seed: int) -> MoleculeDataset:
    points = [(SMILES[(i * (seed + 1) + seed) % len(SMILES)], 0.1 * i + seed) for i in range(n)]
    return MoleculeDataset([MoleculeDatapoint.from_smi(smi, [y]) for smi, y in points])


def clients() -> list[MoleculeDataset]:
    return [molecules(n, seed) for seed, n in enumerate(SIZES)]


def loader(dataset: MoleculeDataset) -> DataLoader:
    return build_dataloader(dataset, batch_size=4, shuffle=False)


class WithSGD(MPNN):
    """The published module with SGD: Adam would turn the rounding errors of BatchNorm's zero gradients into steps."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def mpnn(cls: type[MPNN], batch_norm: bool = False) -> Any:
    head = parts.RegressionFFN(input_dim=8, hidden_dim=8)
    return cls(parts.BondMessagePassing(d_h=8, depth=2), parts.MeanAggregation(), head, batch_norm=batch_norm)


OPTIONS = {"loader": loader, "val": lambda: loader(molecules(4, 9)), **FLOAT32}
GRAPHS = "needs batches of tensors only, found a BatchMolGraph"
CASES = [
    PublicCase("MPNN", lambda: mpnn(MPNN), clients, "sequential", GRAPHS, **OPTIONS, local_schedule="total"),
    PublicCase("MPNN with BatchNorm", lambda: mpnn(WithSGD, True), clients, "sequential", GRAPHS, **OPTIONS),
]


class TestPublished(Published):
    cases = CASES


def test_schedule_that_counts_steps_is_rejected() -> None:
    assert "interval" in refusal(PublicCase("MPNN", lambda: mpnn(MPNN), clients, "sequential", GRAPHS, **OPTIONS))
