"""Federated optimization of ordinary LightningModules."""

from lightning_fed._torchvision import declare_missing_operators

declare_missing_operators()  # before anything imports torchvision, as Lightning does through torchmetrics

from lightning_fed.callbacks import FederatedCallback, RoundProgressBar, RunSummary
from lightning_fed.core import ClientError, ClientReport, FederatedError, RoundReport
from lightning_fed.data import FederatedDataModule, FederatedDataset
from lightning_fed.optim import FederatedOptimizer
from lightning_fed.loop import FederatedLoop
from lightning_fed.trainer import FederatedTrainer
from lightning_fed._version import __version__

__all__ = [
    "ClientError",
    "ClientReport",
    "FederatedCallback",
    "FederatedDataModule",
    "FederatedDataset",
    "FederatedError",
    "FederatedLoop",
    "FederatedOptimizer",
    "FederatedTrainer",
    "RoundProgressBar",
    "RoundReport",
    "RunSummary",
    "__version__",
]
