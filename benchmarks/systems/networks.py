"""The networks of the workloads in PyTorch."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from systems.problem import BLOCKS, Array, Problem

__all__ = ["build", "logits_of"]


def build(problem: Problem) -> nn.Module:
    """Return the network of a workload with its initial parameters."""
    layers = problem.workload.layers
    net: nn.Module = ResNet18(problem.num_classes)
    if layers:
        parts: list[nn.Module] = []
        for fan_in, width in pairwise(layers):
            parts += [nn.Linear(fan_in, width), nn.ReLU()]
        net = nn.Sequential(*parts[:-1])
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), problem.initial(), strict=True):
            parameter.copy_(torch.from_numpy(value))
    return net


def logits_of(net: nn.Module) -> Callable[[Array], Array]:
    """Return a network as a function of NumPy arrays."""
    device = next(net.parameters()).device

    def logits(x: Array) -> Array:
        with torch.no_grad():
            out: Array = net(torch.from_numpy(x).to(device)).cpu().numpy()
        return out

    return logits


class ResNet18(nn.Module):
    """ResNet-18 for images of 32 x 32 pixels: a 3x3 stem without pooling, GroupNorm with two groups."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        stem = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.GroupNorm(2, 64), nn.ReLU()]
        self.body = nn.Sequential(*stem, *(Block(*block) for block in BLOCKS))
        self.head = nn.Linear(512, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, num_classes] of images [B, 3, 32, 32]."""
        out: Tensor = self.head(self.body(x).mean((2, 3)))
        return out


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, fan_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(2, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(2, width)
        self.shortcut: nn.Module = nn.Identity()
        if width != fan_in:
            self.shortcut = nn.Sequential(nn.Conv2d(fan_in, width, 1, stride, bias=False), nn.GroupNorm(2, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the features after the block."""
        h = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(h)) + self.shortcut(x))
