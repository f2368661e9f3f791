"""torchgeo: its tasks, LightningModules for pictures of the earth."""

# pip install: torchgeo requests

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tests.public_modules.harness import SIZES, PublicCase, Published, needs

needs("torchgeo", lightning="lightning")
from torchgeo.trainers import ClassificationTask, RegressionTask, SemanticSegmentationTask


class Pictures(Dataset):
    """Dictionaries of pictures and targets, in the format of torchgeo's data sets."""

    def __init__(self, n: int, seed: int, answer: str) -> None:
        self.x = torch.randn(n, 2, 32, 32, generator=torch.Generator().manual_seed(seed))
        mean = self.x.mean((1, 2, 3))
        self.answer = answer
        self.y = {"label": mean if answer == "real" else (mean > 0).long(), "mask": (self.x[:, 0] > 0).long()}

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        key = "mask" if self.answer == "mask" else "label"
        return {"image": self.x[index], key: self.y[key][index]}


def clients(answer: str) -> list[Pictures]:
    return [Pictures(n, seed, answer) for seed, n in enumerate(SIZES)]


STATISTICS = "moves running statistics"


def case(name: str, module: Any, answer: str, reason: str = STATISTICS) -> PublicCase:
    return PublicCase(
        name,
        module,
        lambda: clients(answer),
        "sequential",
        reason,
        val=lambda: Pictures(4, 9, answer),
        logged=("train_loss",),
        tolerance=(1e-9, 1e-9),
    )


SMALL = {"in_channels": 2, "lr": 0.001}
CASES = [
    case(
        "ClassificationTask",
        lambda: ClassificationTask("test_resnet", num_classes=2, task="multiclass", **SMALL),
        "class",
    ),
    case("RegressionTask", lambda: RegressionTask("test_resnet", **SMALL), "real"),
    case(
        "SemanticSegmentationTask",
        lambda: SemanticSegmentationTask("fcn", num_filters=4, num_classes=2, task="multiclass", **SMALL),
        "mask",
        "it updates the metric 'train_metrics.MulticlassAccuracy'",
    ),
]


class TestPublished(Published):
    cases = CASES
