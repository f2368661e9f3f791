"""Small classifiers for the quickstart and the examples: ordinary LightningModules with nothing federated in them."""

from collections.abc import Sequence

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MLPClassifier"]


class MLPClassifier(pl.LightningModule):
    """A multilayer perceptron with cross-entropy loss and SGD.

    It logs ``train_loss``, ``val_loss``, ``val_acc``, ``test_loss`` and ``test_acc``; ``predict_step`` returns classes.

    Args:
        in_features: Numbers per example; examples [B, ...] are flattened.
        num_classes: The number of classes.
        hidden: Widths of the hidden layers; none gives multinomial logistic regression.
        dropout: The share of activations dropped after each hidden layer.
        lr: The learning rate of the local steps.
        momentum: SGD's momentum.
        weight_decay: SGD's weight decay.

    Example:
        >>> MLPClassifier(in_features=4, num_classes=3, hidden=[8])(torch.zeros(2, 4)).shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        in_features: int = 64,
        num_classes: int = 10,
        hidden: Sequence[int] = (64,),
        dropout: float = 0.0,
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        layers: list[nn.Module] = [nn.Flatten()]
        for width in hidden:
            layers += [nn.Linear(in_features, width), nn.ReLU(), nn.Dropout(dropout)]
            in_features = width
        self.net = nn.Sequential(*layers, nn.Linear(in_features, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, num_classes]."""
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss on a batch."""
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log loss and accuracy on a validation batch."""
        self._evaluate(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log loss and accuracy on a test batch."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Tensor | Sequence[Tensor], batch_idx: int) -> Tensor:
        """Return the predicted classes [B] of bare inputs, or of the inputs in (inputs, labels)."""
        classes: Tensor = self(batch if isinstance(batch, Tensor) else batch[0]).argmax(dim=1)
        return classes

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        hp = self.hparams
        return torch.optim.SGD(self.parameters(), lr=hp["lr"], momentum=hp["momentum"], weight_decay=hp["weight_decay"])

    def _evaluate(self, batch: tuple[Tensor, Tensor], stage: str) -> None:
        x, y = batch
        logits = self(x)
        self.log(f"{stage}_loss", F.cross_entropy(logits, y))
        self.log(f"{stage}_acc", (logits.argmax(dim=1) == y).float().mean(), prog_bar=True)
