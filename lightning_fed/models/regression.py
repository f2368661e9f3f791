"""Regression, and problems with a known optimum, as ordinary LightningModules."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError

from lightning_fed.compat.package import pl
from lightning_fed.core.arguments import check_count, check_flags, check_number, check_numbers
from lightning_fed.core.errors import FederatedError
from lightning_fed.models.classifier import sized


class _KnownOptimum(pl.LightningModule):
    """A model that can compare its parameters with a known optimum, flat [P]."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss on a batch."""
        loss = self._loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the loss on a validation batch, and the distance from the optimum."""
        self._evaluate(batch, "val")
        if (optimum := self.hparams["optimum"]) is not None:
            x = nn.utils.parameters_to_vector(self.parameters())
            self.log("val_distance", torch.linalg.vector_norm(x - x.new_tensor(optimum)), prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the loss on a test batch."""
        self._evaluate(batch, "test")

    def _evaluate(self, batch: tuple[Tensor, Tensor], stage: str) -> None:
        self.log(f"{stage}_loss", self._loss(batch), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        hp = self.hparams
        return torch.optim.SGD(self.parameters(), lr=hp["lr"], weight_decay=hp.get("weight_decay", 0.0))

    @abstractmethod
    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean loss of a batch."""


class LinearRegression(_KnownOptimum):
    """A zero-initialized linear map, trained with SGD on half the mean squared error.

    It logs ``train_loss``, ``val_loss``, ``val_mae``, ``test_loss`` and ``test_mae`` (the mean absolute error), and
    ``val_distance`` if the optimum is given. Its parameters have PyTorch's default type; float64 data need
    ``Trainer(precision="64-true")``.

    Args:
        in_features: Numbers per example. Examples [B, ...] are flattened.
        out_features: Numbers per target. Targets have shape [B, out_features].
        lr: The learning rate of the local steps.
        bias: Whether there is an intercept.
        weight_decay: SGD's weight decay.
        optimum: The minimizer as one flat list: the weight's rows, then the bias. ``val_distance`` is the Euclidean
            distance of the parameters from it.

    Raises:
        FederatedError: If an argument is not allowed, ``optimum`` does not fit the parameters, or targets do not fit
            the predictions.

    Example:
        >>> LinearRegression(in_features=4, out_features=2)(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int = 1,
        lr: float = 0.1,
        bias: bool = True,
        weight_decay: float = 0.0,
        optimum: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        owner = type(self).__name__
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            check_number(owner, name, value, "[0, inf)")
        check_count(owner, "in_features", in_features)
        check_count(owner, "out_features", out_features)
        check_flags(owner, bias=bias)
        with sized(owner, in_features=in_features, out_features=out_features):
            self.linear = nn.Linear(in_features, out_features, bias=bias)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        count = sum(parameter.numel() for parameter in self.parameters())
        if optimum is not None and len(check_numbers(owner, "optimum", optimum)) != count:
            raise FederatedError(
                f"LinearRegression(optimum=...) holds {len(optimum)} numbers and the model has {count} parameters: give"
                " the weight's rows, then the bias, or set bias=False."
            )
        self.val_mae, self.test_mae = MeanAbsoluteError(), MeanAbsoluteError()

    def forward(self, x: Tensor) -> Tensor:
        """Return predictions [B, out_features]."""
        predictions: Tensor = self.linear(x.flatten(1))
        return predictions

    def _evaluate(self, batch: tuple[Tensor, Tensor], stage: str) -> None:
        super()._evaluate(batch, stage)
        x, y = batch
        error = self.val_mae if stage == "val" else self.test_mae
        error.update(self(x), y)
        self.log(f"{stage}_mae", error)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        predictions = self(x)
        if predictions.shape != y.shape:  # [B] against [B, 1] would broadcast to [B, B]
            raise FederatedError(
                f"LinearRegression got targets of shape {list(y.shape)} for predictions of shape"
                f" {list(predictions.shape)}. Give targets [B, out_features]."
            )
        return 0.5 * F.mse_loss(predictions, y)


class Quadratic(_KnownOptimum):
    """One float64 parameter x with SGD; the loss is the mean of a x^2 / 2 + b x over a batch of rows (a, b).

    With a list of initial values x is a vector [d], a and b are [B, d], and the loss is summed over the coordinates. It
    logs ``train_loss``, ``val_loss`` and ``test_loss``, and ``val_distance`` if the optimum is given.

    Args:
        x0: The initial x: a number, or one per coordinate.
        lr: The learning rate of the local steps.
        optimum: The minimizer, the same in every coordinate. ``val_distance`` is the distance of x from it.

    Raises:
        FederatedError: If an argument is not allowed, or the rows and x differ in the number of coordinates.

    Example:
        >>> model = Quadratic(x0=3.0)
        >>> model(torch.tensor([2.0, 0.0]), torch.tensor([1.0, -1.0])).tolist()
        [12.0, -3.0]
    """

    def __init__(self, x0: float | Sequence[float] = 1.0, lr: float = 0.1, optimum: float | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        check_number(self, "lr", lr, "[0, inf)")
        is_list = isinstance(x0, Sequence) and not isinstance(x0, str)
        x = check_numbers(self, "x0", x0) if is_list else check_number(self, "x0", x0)
        if optimum is not None:
            check_number(self, "optimum", optimum)
        self.x = nn.Parameter(torch.tensor(x, dtype=torch.float64))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the loss of each row [B]."""
        if a.shape[1:] != self.x.shape or b.shape != a.shape:  # other shapes might broadcast
            raise FederatedError(
                f"Quadratic got rows of shapes {list(a.shape)} and {list(b.shape)} for x of shape {list(self.x.shape)}:"
                " give x0 as many numbers as a client's second derivatives."
            )
        losses = 0.5 * a * self.x.square() + b * self.x
        return losses.reshape(len(losses), -1).sum(1)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss: Tensor = self(*batch).mean()
        return loss
