"""anomalib: its LightningModules, unchanged, with networks that start from random parameters."""

# pip install: anomalib requests

from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import Dataset

from tests.public_modules.harness import FLOAT32, SIZES, PublicCase, Published, needs

needs("anomalib", lightning="lightning")
from anomalib.data import ImageBatch, ImageItem
from anomalib.models import Fastflow, Fre, Ganomaly
from anomalib.pre_processing import PreProcessor
from torchvision.transforms.v2 import Resize


class Pictures(Dataset):
    """Pictures without defects, in the format of anomalib's data sets."""

    def __init__(self, n: int, seed: int) -> None:
        self.x = torch.rand(n, 3, 64, 64, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> ImageItem:
        return ImageItem(image=self.x[index], gt_label=torch.tensor(0))


def clients() -> list[Pictures]:
    return [Pictures(n, seed) for seed, n in enumerate(SIZES)]


def alone(cls: type, **options: Any) -> Any:
    """Return a model without the callbacks that preprocess, draw and score pictures."""
    size = PreProcessor(transform=Resize((64, 64)))
    none = {"post_processor": False, "evaluator": False, "visualizer": False}
    return cls(pre_processor=size, pre_trained=False, **none, **options)


def by_sgd(cls: type) -> type:
    """Return a model trained by SGD: Adam divides nearly zero gradients, including rounding errors, by themselves."""

    class BySGD(cls):  # type: ignore[misc, valid-type]
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.model.parameters(), lr=1e-5)

    return BySGD


def case(name: str, module: Any, by_hand: bool = True) -> PublicCase:
    return PublicCase(
        name,
        module,
        clients,
        "sequential",
        "PreProcessor.on_train_batch_start is called for every batch",
        collate=ImageBatch.collate,
        logged=("train_loss",),
        by_hand=by_hand,
        **FLOAT32,
    )


def ganomaly() -> Any:
    """Return a model with manual optimization of a generator and a discriminator."""
    none = {"post_processor": False, "evaluator": False, "visualizer": False}
    size = PreProcessor(transform=Resize((64, 64)))
    return Ganomaly(batch_size=4, n_features=4, latent_vec_size=4, pre_processor=size, **none)


FASTFLOW = {"backbone": "resnet18", "flow_steps": 2}
FRE = {"backbone": "resnet18", "layer": "layer2", "input_dim": 2048, "latent_dim": 4}
CASES = [
    case("Fastflow", lambda: alone(Fastflow, **FASTFLOW), by_hand=False),
    case("Fastflow by SGD", lambda: alone(by_sgd(Fastflow), **FASTFLOW)),
    case("Fre", lambda: alone(Fre, **FRE), by_hand=False),
    case("Fre by SGD", lambda: alone(by_sgd(Fre), **FRE)),
    replace(
        case("Ganomaly", ganomaly, by_hand=False),
        reason="the only one that runs modules with manual optimization",
        logged=(),
    ),
]


class TestPublished(Published):
    cases = CASES
