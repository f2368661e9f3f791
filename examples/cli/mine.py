"""A user's module and data module for the command line: see ``run.yaml`` next to this file."""

from collections.abc import Sequence

from lightning_fed import FederatedDataModule
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_fed.data import Partition


class Net(pl.LightningModule):
    """A network with one hidden layer. The command line takes its options from the annotations of ``__init__``."""

    def __init__(self, width: int = 32, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Return the loss on a batch."""
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        """Log the accuracy on a batch."""
        accuracy = (self.net(batch[0]).argmax(dim=1) == batch[1]).float().mean()
        self.log("val_acc", accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of the clients' steps."""
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


class MyData(FederatedDataModule):
    """The digits of scikit-learn. ``setup`` loads the data to split among clients, and the validation data."""

    def __init__(self, partition: Partition, batch_size: int = 16) -> None:
        super().__init__(batch_size=batch_size)
        self.partition = partition

    def setup(self, stage: str) -> None:
        """Load the data. Here, scikit-learn includes them. Other data may come from files."""
        digits = load_digits()
        inputs = torch.tensor(digits.data, dtype=torch.float32) / 16
        labels = torch.tensor(digits.target)
        self.train = TensorDataset(inputs[:1500], labels[:1500])
        self.val = TensorDataset(inputs[1500:], labels[1500:])
