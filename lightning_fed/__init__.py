"""Federated optimization of ordinary LightningModules."""

from lightning_fed._torchvision import declare_missing_operators

declare_missing_operators()  # before anything imports torchvision, as Lightning does through torchmetrics

from lightning_fed.callbacks import FederatedCallback, RoundProgressBar, RunSummary  # noqa: E402
from lightning_fed.core import ClientError, ClientReport, FederatedError, RoundReport  # noqa: E402
from lightning_fed.data import FederatedDataModule, FederatedDataset  # noqa: E402
from lightning_fed.optim import FederatedOptimizer  # noqa: E402
from lightning_fed.loop import FederatedLoop  # noqa: E402
from lightning_fed.trainer import FederatedTrainer  # noqa: E402

__version__ = "0.1.0"

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
]
