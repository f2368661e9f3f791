"""Flower Datasets: its partitioners split an in-memory data set of the package datasets."""

# pip install: datasets seaborn
# pip install: --no-deps flwr-datasets

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.public_modules.harness import AGREED, PublicCase, Published, needs, thin

needs("flwr_datasets")
import datasets
from flwr_datasets import partitioner as by


def table() -> datasets.Dataset:
    x = torch.randn(48, 5, generator=torch.Generator().manual_seed(0))
    writers = [f"writer {i * i // 10 % 4}" for i in range(48)]
    columns = {"x": x.tolist(), "label": x[:, :3].argmax(1).tolist(), "writer": writers}
    return datasets.Dataset.from_dict(columns)


def dealt_by(partitioner: Any) -> list[Any]:
    partitioner.dataset = table()
    return [partitioner.load_partition(i).remove_columns("writer").with_format("torch") for i in range(4)]


def loss(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(network(batch["x"]), batch["label"])


def classifier() -> Any:
    return thin(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)), loss)


PARTITIONERS = {
    "IidPartitioner": lambda: by.IidPartitioner(num_partitions=4),
    "DirichletPartitioner": lambda: by.DirichletPartitioner(4, "label", alpha=1.0, min_partition_size=3, seed=1),
    "PathologicalPartitioner": lambda: by.PathologicalPartitioner(4, "label", num_classes_per_partition=2),
    "NaturalIdPartitioner": lambda: by.NaturalIdPartitioner("writer"),
}
CASES = [
    PublicCase(
        name,
        classifier,
        lambda make=make: dealt_by(make()),
        "vectorized",
        AGREED,
        logged=("train_loss",),
        val=lambda: table().remove_columns("writer").with_format("torch"),
    )
    for name, make in PARTITIONERS.items()
]


class TestPublished(Published):
    cases = CASES
