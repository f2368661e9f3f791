"""opacus: its layers with per-example gradients."""

# pip install: opacus

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.public_modules.harness import AGREED, SIZES, PublicCase, Published, needs, thin

needs("opacus")
from opacus.layers import DPGRU, DPLSTM, DPMultiheadAttention
from opacus.validators import ModuleValidator


class Recurrent(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.layer, self.head = layer(4, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = DPMultiheadAttention(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return self.head(self.layer(x, x, x, need_weights=False)[0].mean(0))


def fixed() -> nn.Module:
    """Return a network where opacus has replaced BatchNorm by GroupNorm."""
    return ModuleValidator.fix(nn.Sequential(nn.Flatten(), nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))


def sequences(n: int, seed: int) -> TensorDataset:
    x = torch.randn(n, 5, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.sum((1, 2)) > 0).long())


def clients() -> list[TensorDataset]:
    return [sequences(n, seed) for seed, n in enumerate(SIZES)]


def loss(network: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(network(batch[0]), batch[1])


def make(network: Any) -> Any:
    return lambda: thin(network(), loss)


LOGGED = {"logged": ("train_loss",), "val": lambda: sequences(4, 9)}
CASES = [
    PublicCase("DPLSTM", make(lambda: Recurrent(DPLSTM)), clients, "vectorized", AGREED, **LOGGED),
    PublicCase("DPGRU", make(lambda: Recurrent(DPGRU)), clients, "vectorized", AGREED, **LOGGED),
    PublicCase("DPMultiheadAttention", make(Attention), clients, "vectorized", AGREED, **LOGGED),
    PublicCase("ModuleValidator", make(fixed), clients, "vectorized", AGREED, **LOGGED),
]


class TestPublished(Published):
    cases = CASES
