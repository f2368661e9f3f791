"""An ordinary LightningModule whose parts and training_step depend on a configuration."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fed import FederatedCallback
from tests.fuzz.configuration import Configuration
from tests.fuzz.data import CLASSES, FEATURES, VOCABULARY

__all__ = ["LR", "FuzzModule", "SetsPerClient", "SetsPerRound", "factor", "make_module", "unpacked"]

LR = 0.1
WIDTH = 6

OPTIMIZERS: dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=LR),
    "decay": partial(torch.optim.SGD, lr=LR, weight_decay=0.1),
    "momentum": partial(torch.optim.SGD, lr=LR, momentum=0.8),
    "nesterov": partial(torch.optim.SGD, lr=LR, momentum=0.8, nesterov=True, weight_decay=0.01),
    # A large eps keeps optimizers from dividing the rounding errors of zero gradients by their own size.
    "adam": partial(torch.optim.Adam, lr=LR, eps=0.1, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=LR, eps=0.1, weight_decay=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=LR, eps=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=LR, eps=0.1),
}


def factor(kind: str, index: int, round: int = 0) -> float:
    """Return the factor of a client's or round's setting."""
    if kind == "one":  # the other clients keep the initial value
        return 0.5 if index == 0 else 1.0
    if kind == "distinct":
        return 1.0 / (1 + index)
    return 1.0 + 0.25 * round if kind == "round" else 1.0


def unpacked(batch: Any) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a batch."""
    return (batch["x"], batch["y"]) if isinstance(batch, dict) else (batch[0], batch[1])


def make_module(c: Configuration) -> "FuzzModule":
    """Return the module of a configuration, with the same initial parameters every time."""
    torch.manual_seed(c.number)
    kind = Indexed if c.attribute == "index" or c.output == "skip" else FuzzModule
    return kind(c) if c.steps == "trainer" else type("OwnSteps", (OwnSteps, kind), {})(c)


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(VOCABULARY, 4), kind(4, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(self.embedding(x))[0][:, -1]


class _Bag(nn.Module):
    """The mean of embeddings with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.embedding(x).mean(1))


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(2, 4), nn.Linear(12, WIDTH)
        self.attention, self.norm = nn.MultiheadAttention(4, 2, batch_first=True), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.view(-1, 3, 2))
        return self.out(self.norm(h + self.attention(h, h, h, need_weights=False)[0]).flatten(1))


class _Counting(nn.Module):
    """A layer with a buffer that its forward pass updates."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        if self.training and self.in_place:
            self.seen.add_(1)
        elif self.training:
            self.seen = self.seen + 1
        return h


def _body(kind: str) -> nn.Module:
    if kind == "conv":
        layers = nn.Conv2d(1, 4, 2, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(48, WIDTH)
        return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), *layers, nn.Tanh())
    if kind in ("gru", "lstm"):
        return _Recurrent(nn.GRU if kind == "gru" else nn.LSTM)
    if kind in ("attention", "sparse"):
        return _Attention() if kind == "attention" else _Bag()
    if kind == "wide":  # more than 65,536 parameters: the vectorized engine then takes one client at a time
        return nn.Sequential(nn.Linear(FEATURES, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, WIDTH))
    if kind == "linear":
        return nn.Linear(FEATURES, WIDTH)
    extra = {"batchnorm": [nn.BatchNorm1d(8)], "dropout": [nn.Dropout(0.3)]}.get(kind, [])
    return nn.Sequential(nn.Linear(FEATURES, 8), *extra, nn.Tanh(), nn.Linear(8, WIDTH), nn.Tanh())


class FuzzModule(pl.LightningModule):
    """A classifier, or a regressor, of one configuration.

    Args:
        c: The configuration.
    """

    def __init__(self, c: Configuration) -> None:
        super().__init__()
        self.c, self.alpha = c, 1.0
        self.body, self.head = _body(c.network), nn.Linear(WIDTH, CLASSES)
        if c.tied:
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.second.weight = self.first.weight
        if c.frozen:
            self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        if c.unused:
            self.unused = nn.Linear(2, 2)
        if c.scalar:
            self.scale = nn.Parameter(torch.ones(()))
        if c.loss == "weighted":
            self.register_buffer("class_weights", torch.tensor([0.5, 1.0, 2.0]))
        kind, _, how = c.buffer.partition(" ")
        if kind == "inner":
            self.counting = _Counting(how == "add_")
        elif kind != "none":
            self.register_buffer("seen", torch.zeros((), dtype=torch.long if kind == "int" else torch.float))

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        if self.c.tied:
            h = h + torch.tanh(self.second(torch.tanh(self.first(h))))
        if self.c.frozen:
            h = h + 0.3 * self.fixed(h)
        if self.c.buffer.startswith("inner"):
            h = self.counting(h)
        return self.scale * self.head(h) if self.c.scalar else self.head(h)

    def training_step(self, batch: Any, batch_idx: int) -> Any:  # reading the index would prevent tracing
        c, (x, y) = self.c, unpacked(batch)
        out = self(x)
        loss = self._loss(out, y)
        if c.attribute in ("read", "one", "distinct", "round"):
            loss = loss * (0.7 + 0.3 * self.alpha)
        elif c.attribute == "epoch":
            loss = loss * (1 + 0.1 * self.current_epoch)
        if c.buffer_read and c.buffer != "none":
            seen = self.counting.seen if c.buffer.startswith("inner") else self.seen
            loss = loss * (1 + 0.01 * seen.to(loss.dtype))
        self._move_buffer(x)
        self._write(loss, out, y)
        return {"loss": loss, "out": out.detach()} if c.output == "dict" else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = unpacked(batch)
        self.log("val_loss", self._loss(self(x), y), batch_size=len(y))

    def configure_optimizers(self) -> Any:
        trained = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [{"params": [p for _, p in trained]}]
        if self.c.groups:
            groups = [
                {"params": [p for name, p in trained if not name.startswith("head.")]},
                {"params": [p for name, p in trained if name.startswith("head.")], "lr": 0.5 * LR},
            ]
        optimizer = OPTIMIZERS[self.c.optimizer](groups)
        if self.c.schedule == "none":
            return optimizer
        if self.c.schedule == "step":
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]
        if self.c.schedule == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
            return [optimizer], [{"scheduler": plateau, "monitor": "server/update_norm"}]
        slower = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))  # rounds, or steps
        return [optimizer], [{"scheduler": slower, "interval": "step" if self.c.schedule == "each step" else "epoch"}]

    def _loss(self, out: Tensor, y: Tensor) -> Tensor:
        kind = self.c.loss
        if kind == "mse":
            return F.mse_loss(out, y.to(out.dtype))
        if kind == "sum":
            return 0.2 * F.cross_entropy(out, y, reduction="sum")
        if kind == "weighted":
            return F.cross_entropy(out, y, weight=self.class_weights.to(out.dtype))
        return F.cross_entropy(out, y, label_smoothing=0.1 if kind == "smooth" else 0.0)

    def _move_buffer(self, x: Tensor) -> None:
        kind, _, how = self.c.buffer.partition(" ")
        if kind in ("none", "inner"):
            return
        step = x.float().mean().detach().to(self.seen.dtype) if kind == "batch" else 1
        if how == "add_":
            self.seen.add_(step)
        else:
            self.seen = self.seen + step

    def _write(self, loss: Tensor, out: Tensor, y: Tensor) -> None:
        kind, loss = self.c.log, loss.detach()
        if kind in ("loss", "several"):
            self.log("train_loss", loss)
        elif kind == "bar":
            self.log("train_loss", loss, prog_bar=True, on_step=False, on_epoch=True)
        elif kind == "step":
            self.log("train_loss", loss, on_step=True, on_epoch=True)
        elif kind == "batch_size":
            self.log("train_loss", loss, batch_size=len(y))
        elif kind == "tokens":
            self.log("per_token", loss, batch_size=5 * len(y) + 1)
        elif kind == "number":
            self.log("examples", float(len(y)))
            self.log("train_loss", loss)
        if kind in ("several", "dict"):
            classes = y.argmax(1) if self.c.loss == "mse" else y
            accuracy = (out.argmax(1) == classes).to(out.dtype).mean()
            if kind == "several":
                self.log("accuracy", accuracy, batch_size=len(y), prog_bar=True)
                self.log("size", out.detach().square().mean())
            else:
                self.log_dict({"accuracy": accuracy, "twice": 2 * loss}, batch_size=len(y))


class Indexed(FuzzModule):
    """A FuzzModule whose training_step reads the index of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = super().training_step(batch, batch_idx)
        if self.c.output == "skip" and batch_idx % 3 == 1:
            return None
        if self.c.attribute != "index":
            return out
        scale = 1 + 0.1 * batch_idx
        return {**out, "loss": scale * out["loss"]} if isinstance(out, dict) else scale * out


class OwnSteps(FuzzModule):
    """A FuzzModule that steps its optimizer itself, or two: one for the head and one for the rest."""

    def __init__(self, c: Configuration) -> None:
        super().__init__(c)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = super().training_step(batch, batch_idx)
        if out is None:
            return None
        found: Any = self.optimizers()
        optimizers = found if isinstance(found, list) else [found]
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(out["loss"] if isinstance(out, dict) else out)
        for optimizer in optimizers:
            optimizer.step()
        return out

    def configure_optimizers(self) -> Any:
        if self.c.steps == "own":
            return super().configure_optimizers()
        trained = [(name.startswith("head."), p) for name, p in self.named_parameters() if p.requires_grad]
        parts = ([{"params": [p for own, p in trained if own is is_head]}] for is_head in (False, True))
        rates = LR, 0.5 * LR if self.c.groups else LR
        return [OPTIMIZERS[self.c.optimizer]([{**group, "lr": lr}]) for (group,), lr in zip(parts, rates, strict=True)]


class SetsPerClient(FederatedCallback):
    """Sets an attribute, or the local rate, of every client before it works.

    Args:
        c: The configuration.
    """

    def __init__(self, c: Configuration) -> None:
        self.c = c

    def on_client_start(self, trainer: Any, pl_module: Any, round: int, client_id: Any) -> None:
        index = list(trainer.datamodule.client_ids).index(client_id)
        if self.c.attribute in ("one", "distinct"):
            pl_module.alpha = factor(self.c.attribute, index)
        if self.c.client_lr != "none":
            groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
            for group, share in zip(groups, (1.0, 0.5 if self.c.groups else 1.0), strict=False):
                group["lr"] = LR * share * factor(self.c.client_lr, index)


class SetsPerRound(FederatedCallback):
    """Sets an attribute before every round."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.alpha = factor("round", 0, trainer.current_epoch)
