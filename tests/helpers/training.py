"""Small modules and trainers that the tests share."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from lightning_fed import FederatedCallback, FederatedDataModule, FederatedTrainer

FEATURES, CLASSES = 6, 3


class Net(pl.LightningModule):
    """An MLP with dropout and two parameter groups."""

    def __init__(self, lr: float = 0.1, dropout: float = 0.3, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        x, y = batch
        out = self(x)
        self.log("val_loss", F.cross_entropy(out, y), prog_bar=True)
        self.log("val_acc", (out.argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.body.parameters()}, {"params": self.head.parameters(), "lr": 0.5 * self.hparams.lr}]
        hp = self.hparams
        return torch.optim.SGD(groups, lr=hp.lr, momentum=hp.momentum, weight_decay=hp.weight_decay)


def classification(n: int, seed: int) -> TensorDataset:
    """Return a small separable problem whose inputs are shifted by the seed."""
    stream = torch.Generator().manual_seed(seed)
    x = torch.randn(n, FEATURES, generator=stream) + 0.3 * torch.randn(FEATURES, generator=stream)
    w = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(99))
    return TensorDataset(x, (x @ w).argmax(1))


def clients(sizes: Sequence[int] = (13, 8, 21, 5, 16, 9)) -> list[TensorDataset]:
    """Return clients of these sizes."""
    return [classification(n, seed=i) for i, n in enumerate(sizes)]


def data(
    sizes: Sequence[int] = (13, 8, 21, 5, 16, 9), batch_size: int = 4, val: Dataset | None = None, **kwargs: Any
) -> FederatedDataModule:
    """Return a data module over :func:`clients` with a validation set."""
    return FederatedDataModule(
        clients=clients(sizes), val=classification(12, 77) if val is None else val, batch_size=batch_size, **kwargs
    )


QUIET: Mapping[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}


def trainer(**kwargs: Any) -> FederatedTrainer:
    """Return a quiet trainer, by default with three clients a round and one local epoch."""
    local = {} if "local_steps" in kwargs or "local_epochs" in kwargs else {"local_epochs": 1}
    drawn = {} if "sampler" in kwargs or "clients_per_round" in kwargs else {"clients_per_round": 3}
    return FederatedTrainer(**{**QUIET, "max_rounds": 3, "seed": 0, **local, **drawn, **kwargs})


def seeded(module: type[pl.LightningModule] = Net, **kwargs: Any) -> Any:
    """Return a module with the same initial parameters in every call."""
    torch.manual_seed(0)
    return module(**kwargs)


def parameters(module: nn.Module) -> Tensor:
    """Return all parameters as one vector."""
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def fit(
    model: pl.LightningModule | None = None, datamodule: FederatedDataModule | None = None, **kwargs: Any
) -> Tensor:
    """Fit and return the server parameters."""
    model = seeded() if model is None else model
    ckpt_path = kwargs.pop("ckpt_path", None)
    trainer(**kwargs).fit(model, data() if datamodule is None else datamodule, ckpt_path=ckpt_path)
    return parameters(model)


def rounds_in(path: str | Path) -> int:
    """Return a checkpoint's number of completed rounds."""
    return int(torch.load(path, weights_only=True)["loops"]["fit_loop"]["state_dict"]["round"])


class Trajectory(FederatedCallback):
    """Records a run: cohorts, server models and client states by round, and clients' own models."""

    def __init__(self) -> None:
        self.cohorts: list[tuple[Any, ...]] = []
        self.models: list[Tensor] = []
        self.states: list[dict[int, dict[str, Tensor]]] = []
        self.ends: list[dict[Any, Tensor]] = []

    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        self.ends.append({})

    def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
        self.ends[-1][client_report.client_id] = parameters(pl_module).clone()

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        self.cohorts.append(round_report.cohort)
        self.models.append(parameters(pl_module).clone())
        self.states.append(trainer.fit_loop.state.clients.state_dict())


def same(a: Any, b: Any) -> bool:
    """Return whether two state dicts agree bit for bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple):
        return isinstance(b, type(a)) and len(a) == len(b) and all(same(*pair) for pair in zip(a, b, strict=True))
    return type(a) is type(b) and a == b
