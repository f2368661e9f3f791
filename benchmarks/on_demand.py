"""The problem of the load runs: any number of clients, made on demand, and a network of any size."""

import lightning_fed  # first: see lightning_fed.compat.torchvision
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed.core.types import ClientId

__all__ = ["BATCH", "CLASSES", "EXAMPLES", "FEATURES", "Network", "Population"]

EXAMPLES, FEATURES, CLASSES, BATCH = 16, 20, 10, 8


class Population(lightning_fed.FederatedDataModule):
    """Clients with 16 examples of 20 features each, a function of the client's number. An epoch has two batches.

    Args:
        num_clients: The number of clients.
    """

    def __init__(self, num_clients: int) -> None:
        super().__init__(val=_examples(-1), batch_size=BATCH)
        self.num_clients = num_clients

    def client_dataset(self, client_id: ClientId) -> TensorDataset:
        """Return a client's examples."""
        return _examples(int(client_id))

    def client_size(self, client_id: ClientId) -> int:
        """Return a client's number of examples without making them."""
        return EXAMPLES


def _examples(number: int) -> TensorDataset:
    x: Tensor = torch.randn(EXAMPLES, FEATURES, generator=torch.Generator().manual_seed(number + 1))
    return TensorDataset(x, x[:, :CLASSES].argmax(1))


class Network(pl.LightningModule):
    """A classifier with one ``self.log``.

    Args:
        parameters: The approximate number of parameters. The width of two equal hidden layers is chosen to match. 0 is
            for a linear classifier, which has 210.
    """

    def __init__(self, parameters: int = 0) -> None:
        super().__init__()
        # width^2 + (FEATURES + CLASSES + 2) width + CLASSES = parameters
        half = (FEATURES + CLASSES + 2) / 2
        width = round((half**2 + max(parameters - CLASSES, 0)) ** 0.5 - half)
        hidden = [nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()] if width else []
        self.net = nn.Sequential(*hidden, nn.Linear(width or FEATURES, CLASSES))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the loss."""
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)
