"""Networks with all common kinds of layers give the same result in the vectorized and the sequential engine."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fed.algorithms import Mime, Scaffold, SGDm
from tests.helpers.engines import Ordinary, assert_agree, full_batches, run
from tests.helpers.selection import few
from tests.helpers.training import CLASSES, FEATURES


class Layers(Ordinary):
    """A network whose layers get the six features of an example in a given shape."""

    def __init__(self, make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.body, self.shape = make(), shape
            with torch.no_grad():
                width = self.body(torch.zeros(2, *shape)).flatten(1).shape[1]
            self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.view(len(x), *self.shape)).flatten(1))


class Residual(nn.Module):
    """A block with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm(self.conv(x)))


class Attention(nn.Module):
    """Self-attention between the features."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(2, 2, batch_first=True), nn.LayerNorm(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.attention(x, x, x, need_weights=False)[0])


class Characters(nn.Module):
    """An embedding of integers made from the features."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding((x.abs() * 4).long().clamp(max=7))


class Gated(nn.Module):
    """A recurrent network written as a plain loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(1 + 4, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.new_zeros(len(x), 4)
        for i in range(x.shape[1]):
            new, gate = self.cell(torch.cat([x[:, i], hidden], 1)).chunk(2, dim=1)
            hidden = hidden + torch.sigmoid(gate) * (torch.tanh(new) - hidden)
        return hidden


ROW, PICTURE, SEQUENCE = (FEATURES,), (1, 2, 3), (FEATURES, 1)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "two linear layers": (lambda: nn.Sequential(nn.Linear(FEATURES, 8, bias=False), nn.GELU(), nn.Linear(8, 5)), ROW),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 4), nn.ELU()), ROW),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(1, 4, 2), nn.ReLU()), PICTURE),
    "strided convolution": (lambda: nn.Sequential(nn.Conv2d(1, 4, 2, stride=2, padding=1), nn.SiLU()), PICTURE),
    "convolution of groups": (lambda: nn.Sequential(nn.Conv2d(1, 4, 2), nn.Conv2d(4, 4, 1, groups=2)), PICTURE),
    "convolution along time": (lambda: nn.Sequential(nn.Conv1d(1, 3, 2), nn.Tanh()), (1, FEATURES)),
    "transposed convolution": (lambda: nn.Sequential(nn.ConvTranspose2d(1, 3, 2), nn.LeakyReLU()), PICTURE),
    "pools": (lambda: nn.Sequential(nn.Conv2d(1, 4, 1), nn.MaxPool2d(2, 1), nn.AdaptiveAvgPool2d(1)), PICTURE),
    "average pool": (lambda: nn.Sequential(nn.Conv2d(1, 4, 1), nn.AvgPool2d((1, 2))), PICTURE),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(1, 4, 1), nn.GroupNorm(2, 4), nn.ReLU()), PICTURE),
    "instance norm": (lambda: nn.Sequential(nn.Conv2d(1, 3, 1), nn.InstanceNorm2d(3, affine=True)), PICTURE),
    "residual blocks": (lambda: nn.Sequential(nn.Conv2d(1, 4, 1), Residual(), Residual()), PICTURE),
    "attention": (Attention, (3, 2)),
    "embedding": (Characters, ROW),
    "recurrence": (Gated, SEQUENCE),
    "learnt slope": (lambda: nn.Sequential(nn.Linear(FEATURES, 4), nn.PReLU(4)), ROW),
    "bilinear upsampling": (lambda: nn.Sequential(nn.Conv2d(1, 2, 1), nn.Upsample(scale_factor=2)), PICTURE),
}
METHODS = {"Scaffold": Scaffold(), "Mime": Mime(SGDm())}


@pytest.mark.filterwarnings("error:Local steps run untraced")
@pytest.mark.parametrize(
    ("network", "method"),
    few(
        [pytest.param(network, method, id=f"{network}-{method}") for network in NETWORKS for method in METHODS],
        [
            "embedding-Scaffold",
            "residual blocks-Scaffold",
        ],
    ),
)
def test_vectorized_engine_matches_sequential_for_all_layers(network: str, method: str) -> None:
    make = partial(Layers, *NETWORKS[network])
    options: dict[str, Any] = {"make": make, "datamodule": full_batches, "algorithm": METHODS[method]}
    options["max_rounds"] = 2
    assert_agree(run("sequential", **options), run("vectorized", **options))
