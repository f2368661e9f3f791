"""Who the clients are and what data each of them has."""

from lightning_fed.data.batches import ClientBatches
from lightning_fed.data.cifar import CIFAR10, CIFAR100
from lightning_fed.data.concrete import Concrete
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.dataset import FederatedDataset
from lightning_fed.data.digits import Digits
from lightning_fed.data.folders import ClientFolder, ClientImages
from lightning_fed.data.image_transforms import Flatten, Normalize, RandomCrop, RandomFlip, Shrink, ToFloat
from lightning_fed.data.leaf import FEMNIST, LeafDataModule
from lightning_fed.data.mnist import EMNIST, MNIST
from lightning_fed.data.partition import ByKey, Dirichlet, Iid, Partition, Shards
from lightning_fed.data.picture import SkewTable, skew_table, split_figure
from lightning_fed.data.quadratics import LeastSquares, Quadratics
from lightning_fed.data.sentiment import Sentiment140
from lightning_fed.data.shakespeare import Shakespeare
from lightning_fed.data.shift import FeatureShift
from lightning_fed.data.skew import (
    BalancedDirichlet,
    ClassesPerClient,
    LogNormalSizes,
    PowerLaw,
    QuantitySkew,
    Similarity,
)
from lightning_fed.data.synthetic import Synthetic
from lightning_fed.data.tables import ClientTable

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
