"""segmentation-models-pytorch: its networks and losses."""

# pip install: segmentation-models-pytorch

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.public_modules.harness import SIZES, PublicCase, Published, needs, thin

smp = needs("segmentation_models_pytorch")
SMALL = {"encoder_name": "mobilenet_v2", "encoder_weights": None, "encoder_depth": 3, "in_channels": 1, "classes": 2}


def pictures(n: int, seed: int) -> TensorDataset:
    x = torch.randn(n, 1, 32, 32, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 0] > 0).long())


def clients() -> list[TensorDataset]:
    return [pictures(n, seed) for seed, n in enumerate(SIZES)]


def loss_of(criterion: nn.Module, network: nn.Module, batch: list[Tensor]) -> Tensor:
    x, mask = batch
    return criterion(network(x), mask)


def unet() -> object:
    dice = smp.losses.DiceLoss(mode="multiclass")
    return thin(
        smp.Unet(decoder_channels=(8, 8, 4), **SMALL), lambda network, batch: loss_of(dice, network, batch), lr=0.01
    )


def fpn() -> object:
    focal = smp.losses.FocalLoss(mode="multiclass")
    net = smp.FPN(
        decoder_pyramid_channels=8, decoder_segmentation_channels=32, decoder_dropout=0.0, upsampling=1, **SMALL
    )
    return thin(net, lambda network, batch: loss_of(focal, network, batch), lr=0.01)


LOGGED = {"logged": ("train_loss",), "val": lambda: pictures(4, 9)}
CASES = [
    PublicCase("Unet and DiceLoss", unet, clients, "sequential", "moves running statistics", **LOGGED),
    PublicCase("FPN and FocalLoss", fpn, clients, "sequential", "moves running statistics", **LOGGED),
]


class TestPublished(Published):
    cases = CASES
