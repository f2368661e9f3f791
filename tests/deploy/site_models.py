"""A module that the server and its sites build identically."""

from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import StepLR

from tests.helpers.training import CLASSES, FEATURES


class Net(pl.LightningModule):
    """A network with dropout, and a schedule by rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 8), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(8, CLASSES)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x.to(self.dtype)), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=0.01)
        return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, step_size=2, gamma=0.5)}


def model() -> Net:
    """Return the module, always with the same parameters."""
    torch.manual_seed(0)
    return Net()
