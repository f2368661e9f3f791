"""Clients and their data: data modules, partitions and data sets."""

from lightning_fed.data.batches.batches import ClientBatches
from lightning_fed.data.batches.transforms import Flatten, Normalize, RandomCrop, RandomFlip, Shrink, ToFloat
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.dataset import FederatedDataset
from lightning_fed.data.datasets.concrete import Concrete
from lightning_fed.data.datasets.digits import Digits
from lightning_fed.data.datasets.images import CIFAR10, CIFAR100, EMNIST, MNIST
from lightning_fed.data.datasets.leaf import FEMNIST, LeafDataModule
from lightning_fed.data.datasets.sentiment import Sentiment140
from lightning_fed.data.datasets.shakespeare import Shakespeare
from lightning_fed.data.datasets.synthetic import LeastSquares, Quadratics, Synthetic
from lightning_fed.data.feature_shift import FeatureShift
from lightning_fed.data.files.folders import ClientFolder, ClientImages
from lightning_fed.data.files.tables import ClientTable
from lightning_fed.data.partitions import (
    BalancedDirichlet,
    ByKey,
    ClassesPerClient,
    Dirichlet,
    Iid,
    LogNormalSizes,
    Partition,
    PowerLaw,
    QuantitySkew,
    Shards,
    Similarity,
)
from lightning_fed.data.skew_report import SkewTable, skew_table, split_figure

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "EMNIST",
    "FEMNIST",
    "MNIST",
    "BalancedDirichlet",
    "ByKey",
    "ClassesPerClient",
    "ClientBatches",
    "ClientFolder",
    "ClientImages",
    "ClientTable",
    "Concrete",
    "Digits",
    "Dirichlet",
    "FeatureShift",
    "FederatedDataModule",
    "FederatedDataset",
    "Flatten",
    "Iid",
    "LeafDataModule",
    "LeastSquares",
    "LogNormalSizes",
    "Normalize",
    "Partition",
    "PowerLaw",
    "Quadratics",
    "QuantitySkew",
    "RandomCrop",
    "RandomFlip",
    "Sentiment140",
    "Shakespeare",
    "Shards",
    "Shrink",
    "Similarity",
    "SkewTable",
    "Synthetic",
    "ToFloat",
    "skew_table",
    "split_figure",
]
