"""Who the clients are and what data each of them has."""

from lightning_fed.data.batches import ClientBatches
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.dataset import FederatedDataset
from lightning_fed.data.digits import Digits
from lightning_fed.data.partition import ByKey, Dirichlet, Iid, Partition, Shards
from lightning_fed.data.picture import SkewTable, skew_table, split_figure
from lightning_fed.data.quadratics import LeastSquares, Quadratics
from lightning_fed.data.skew import (
    BalancedDirichlet,
    ClassesPerClient,
    LogNormalSizes,
    PowerLaw,
    QuantitySkew,
    Similarity,
)
from lightning_fed.data.synthetic import Synthetic

__all__ = [
    "BalancedDirichlet",
    "ByKey",
    "ClassesPerClient",
    "ClientBatches",
    "Digits",
    "Dirichlet",
    "FederatedDataModule",
    "FederatedDataset",
    "Iid",
    "LeastSquares",
    "LogNormalSizes",
    "Partition",
    "PowerLaw",
    "Quadratics",
    "QuantitySkew",
    "Shards",
    "Similarity",
    "SkewTable",
    "Synthetic",
    "skew_table",
    "split_figure",
]
