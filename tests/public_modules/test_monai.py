"""monai: its networks, losses, data sets and random transforms."""

# pip install: monai

import torch
from torch import Tensor, nn

from tests.public_modules.harness import AGREED, SIZES, PublicCase, Published, needs, thin

needs("monai")
from monai.data import CacheDataset, Dataset
from monai.losses import DiceCELoss, DiceLoss
from monai.networks.nets import BasicUNet, SegResNet, UNet
from monai.transforms import Compose, EnsureTyped, RandFlipd, RandGaussianNoised, RandRotate90d


def examples(n: int, seed: int) -> list[dict[str, Tensor]]:
    x = torch.randn(n, 1, 16, 16, generator=torch.Generator().manual_seed(seed))
    return [{"image": one, "label": (one > 0).float()} for one in x]


def clients(transform: object = None) -> list[Dataset]:
    return [Dataset(examples(n, seed), transform) for seed, n in enumerate(SIZES)]


def augmented() -> list[Dataset]:
    """Return clients whose transforms keep their own random states."""
    keys = ["image", "label"]
    random = [RandFlipd(keys, prob=0.5), RandRotate90d(keys, prob=0.5), RandGaussianNoised(["image"], prob=0.5)]
    return clients(Compose([*random, EnsureTyped(keys, track_meta=False)]))


def cached() -> list[CacheDataset]:
    typed = EnsureTyped(["image", "label"], track_meta=False)
    return [CacheDataset(examples(n, seed), typed, progress=False) for seed, n in enumerate(SIZES)]


def loss(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found = network(batch["image"])
    return DiceCELoss(to_onehot_y=True, softmax=True)(found, batch["label"])


def unet() -> object:
    return thin(UNet(2, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,), num_res_units=1), loss)


def binary_loss(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return DiceLoss(sigmoid=True)(network(batch["image"]), batch["label"])


def segresnet() -> object:
    net = SegResNet(2, init_filters=8, in_channels=1, out_channels=1, blocks_down=(1, 1), blocks_up=(1,))
    return thin(net, binary_loss)


def with_batch_norm() -> object:
    return thin(BasicUNet(2, 1, 2, features=(4, 4, 4, 4, 4, 4), norm="batch"), loss)


ONE_HOT = r"a tensor that all clients share is changed by an in-place operation, in utils\.py"
LOGGED = {"logged": ("train_loss",), "val": lambda: Dataset(examples(4, 9))}
CASES = [
    PublicCase("UNet and DiceCELoss", unet, clients, "sequential", ONE_HOT, **LOGGED),
    PublicCase("SegResNet and CacheDataset", segresnet, cached, "vectorized", AGREED, **LOGGED),
    PublicCase(
        "BasicUNet with BatchNorm", with_batch_norm, clients, "sequential", "moves running statistics", **LOGGED
    ),
    PublicCase("UNet and random transforms", unet, augmented, "sequential", ONE_HOT, by_hand=False, **LOGGED),
]


class TestPublished(Published):
    cases = CASES
