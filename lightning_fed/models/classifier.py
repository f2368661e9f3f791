"""The base of all classifiers of this package, the multilayer perceptron, and checks of arguments and batches."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_fed.compat.package import pl
from lightning_fed.core.arguments import check_count, check_number
from lightning_fed.core.errors import FederatedError


class Classifier(pl.LightningModule):
    """A network that returns logits, with cross-entropy loss and SGD.

    It logs ``train_loss``, ``val_loss``, ``val_acc``, ``test_loss`` and ``test_acc``; ``predict_step`` returns classes.
    Loss and accuracy ignore labels of -100, as is usual in PyTorch.

    Checkpoints save the arguments as hyper-parameters, including those of a subclass's ``__init__`` but not ``net``. A
    subclass that builds its network therefore loads with ``load_from_checkpoint(path)``. Otherwise, pass the network
    again: ``Classifier.load_from_checkpoint(path, net=net)``.

    Args:
        net: Any network from inputs [B, ...] to logits [B, num_classes].
        num_classes: The number of classes.
        lr: The learning rate of the local steps.
        momentum: SGD's momentum.
        weight_decay: SGD's weight decay.

    Raises:
        FederatedError: If an argument is not allowed, or a batch does not fit.

    Example:
        >>> model = Classifier(nn.Linear(4, 3), num_classes=3)
        >>> model(torch.zeros(2, 4)).shape
        torch.Size([2, 3])
    """

    def __init__(
        self, net: nn.Module, num_classes: int, lr: float = 0.1, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["net"])
        owner = type(self).__name__
        if not isinstance(net, nn.Module):
            raise FederatedError(f"{owner}(net={net!r}): net must be a torch.nn.Module, from inputs to logits.")
        check_count(owner, "num_classes", num_classes, least=2)
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            check_number(owner, name, value, "[0, inf)")
            self.hparams.setdefault(name, value)  # the command line only saves the arguments of the subclass
        self.net = net
        # Skip torchmetrics' checks: the loss raises for invalid labels.
        accuracy = partial(MulticlassAccuracy, num_classes, average="micro", ignore_index=-100, validate_args=False)
        self.val_acc, self.test_acc = accuracy(), accuracy()

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, num_classes]."""
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Return the loss on a batch."""
        loss = self._loss(*self._logits_and_labels(batch))
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        """Log loss and accuracy on a validation batch."""
        self._evaluate(batch, "val", self.val_acc)

    def test_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        """Log loss and accuracy on a test batch."""
        self._evaluate(batch, "test", self.test_acc)

    def predict_step(self, batch: Tensor | Sequence[Tensor], batch_idx: int) -> Tensor:
        """Return the predicted classes [B] of inputs, or of the inputs in (inputs, labels)."""
        classes: Tensor = self(batch if isinstance(batch, Tensor) else batch[0]).argmax(dim=1)
        return classes

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        hp = self.hparams
        return torch.optim.SGD(self.parameters(), lr=hp["lr"], momentum=hp["momentum"], weight_decay=hp["weight_decay"])

    def _logits_and_labels(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the logits [N, num_classes] and the labels [N] of a batch."""
        x, y = self._pair(batch)
        return self(x), y

    def _pair(self, batch: Any) -> tuple[Tensor, Tensor]:
        if not isinstance(batch, Sequence) or len(batch) != 2:
            raise FederatedError(
                f"{type(self).__name__} got a batch of type {type(batch).__name__} and expects a pair of tensors,"
                " inputs and labels: let the data set, or its collate_fn, return (inputs, labels)."
            )
        return batch[0], batch[1]

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        name = type(self).__name__
        if labels.shape != logits.shape[:1] or labels.is_floating_point():
            raise FederatedError(
                f"{name} got labels of shape {list(labels.shape)} and type {labels.dtype} for logits of shape"
                f" {list(logits.shape)}: give one class number per example, as integers."
            )
        try:
            return F.cross_entropy(logits, labels.long())
        except IndexError as error:
            raise FederatedError(
                f"{name} got a label outside 0, ..., {logits.shape[1] - 1}: renumber the classes, or set num_classes."
            ) from error

    def _evaluate(self, batch: Sequence[Tensor], stage: str, accuracy: MulticlassAccuracy) -> None:
        logits, labels = self._logits_and_labels(batch)
        self.log(f"{stage}_loss", self._loss(logits, labels))
        accuracy.update(logits, labels)
        self.log(f"{stage}_acc", accuracy, prog_bar=True)


class MLPClassifier(Classifier):
    """A multilayer perceptron; without hidden layers, multinomial logistic regression.

    With ``in_features=784, num_classes=62, hidden=[300, 100]`` it is the EMNIST network of Mime (Karimireddy et al.,
    NeurIPS 2021, arXiv:2008.03606). Logging, checkpoints and predictions are as in :class:`Classifier`.

    Args:
        in_features: Numbers per example. Examples [B, ...] are flattened.
        num_classes: The number of classes.
        hidden: Widths of the hidden layers; an empty list gives multinomial logistic regression.
        dropout: The share of activations dropped after each hidden layer.
        lr: The learning rate of the local steps.
        momentum: SGD's momentum.
        weight_decay: SGD's weight decay.

    Raises:
        FederatedError: If an argument is not allowed, or a batch does not fit.

    Example:
        >>> MLPClassifier(in_features=4, num_classes=3, hidden=[8])(
        ...     torch.zeros(2, 4)
        ... ).shape
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
        owner = type(self).__name__
        check_count(owner, "num_classes", num_classes, least=2)
        check_number(owner, "dropout", dropout, "[0, 1)")
        width = check_count(owner, "in_features", in_features)
        widths = check_widths(owner, "hidden", hidden)
        with sized(owner, in_features=in_features, num_classes=num_classes, hidden=hidden):
            net = nn.Sequential(nn.Flatten(), *dense(width, widths, dropout, num_classes))
        super().__init__(net, num_classes, lr, momentum, weight_decay)
        self._in_features = in_features

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, num_classes] of examples [B, ...] with ``in_features`` numbers each."""
        if x.ndim < 2 or x.shape[1:].numel() != self._in_features:
            raise FederatedError(
                f"{type(self).__name__} got inputs of shape {list(x.shape)} and expects [B, ...] with in_features="
                f"{self._in_features} numbers per example: set in_features to what an example holds."
            )
        check_floating(self, x)
        return super().forward(x)


def dense(width: int, widths: Sequence[int], dropout: float, outputs: int) -> list[nn.Module]:
    """Return hidden layers with ReLU and dropout, then the output layer, for inputs [B, width]."""
    layers: list[nn.Module] = []
    for next_width in widths:
        layers += [nn.Linear(width, next_width), nn.ReLU(), nn.Dropout(dropout)]
        width = next_width
    return [*layers, nn.Linear(width, outputs)]


def check_widths(owner: str, name: str, values: Any) -> list[int]:
    """Return an argument as a list; raise unless it is a sequence of positive integers."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise FederatedError(f"{owner}({name}={values!r}): {name} must be a list of positive integers.")
    return [check_count(owner, f"{name}[{i}]", value) for i, value in enumerate(values)]


@contextmanager
def sized(owner: str, **sizes: Any) -> Iterator[None]:
    """Wrap the construction of layers; if memory runs out, raise an error that names the arguments of their size."""
    try:
        yield
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in sizes.items())
        raise FederatedError(f"{owner}({shown}): layers of this size do not fit into memory. Lower them.") from error


def check_floating(module: pl.LightningModule, x: Tensor) -> None:
    """Raise if the inputs' type does not match that of the module's parameters."""
    name = type(module).__name__
    if not x.is_floating_point():
        raise FederatedError(f"{name} got inputs of type {x.dtype}: give floating point numbers, such as x / 255.")
    if torch.float64 in (x.dtype, module.dtype) and x.dtype != module.dtype:
        raise FederatedError(
            f"{name} got inputs of type {x.dtype} for parameters of type {module.dtype}: convert the data, or train"
            " with precision='64-true', which converts both."
        )


def as_images(module: pl.LightningModule, x: Tensor, channels: int, size: int | None = None) -> Tensor:
    """Return images as [B, channels, height, width]; one channel also allows [B, height, width]."""
    if channels == 1 and x.ndim == 3:
        x = x.unsqueeze(1)
    if x.ndim != 4 or x.shape[1] != channels or (size is not None and tuple(x.shape[2:]) != (size, size)):
        sides = "height, width" if size is None else f"{size}, {size}"
        raise FederatedError(
            f"{type(module).__name__} got images of shape {list(x.shape)} and expects [B, {channels}, {sides}]: reshape"
            " the data, or make the model for them."
        )
    check_floating(module, x)
    return x
