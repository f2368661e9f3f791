"""Train several kinds of modules with ``import lightning as L``, without pytorch_lightning installed.

Each engine that takes a module trains it with Lightning's callbacks and loggers, and resumes from its checkpoint.
"""

import importlib.util
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning_fed  # before Lightning, as the README says
import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.utils.data import TensorDataset

from lightning_fed.algorithms import Scaffold
from lightning_fed.data import Dirichlet


class Module(L.LightningModule):
    """A classifier of 8 x 8 images around any network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss on a batch."""
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the accuracy on a batch."""
        self.log("val_acc", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        """Return SGD, with a rate that falls from round to round."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Hooked(Module):
    """A module with a hook per batch and its own callback."""

    batches = 0

    def on_train_batch_end(self, *_: Any) -> None:
        """Count a batch."""
        type(self).batches += 1

    def configure_callbacks(self) -> list[L.Callback]:
        """Return a callback that stops a run without improvement."""
        return [EarlyStopping("val_acc", mode="max", patience=5)]


class Rows(nn.Module):
    """A recurrent network that reads an image row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.out(self.lstm(images)[0][:, -1])
        return logits


def _convolution() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10)
    )


ZOO: dict[str, Callable[[], Module]] = {
    "dense": lambda: Module(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))),
    "convolution": lambda: Module(_convolution()),
    "recurrent": lambda: Module(Rows()),
    "hooked": lambda: Hooked(nn.Sequential(nn.Flatten(), nn.Linear(64, 10))),
}
STEPPED_TOGETHER = {"dense"}  # the modules that the vectorized engine takes


def _fit(module: Module, engine: str, rounds: int, start: str | None = None) -> str:
    """Train a module, and return its last checkpoint."""
    torch.manual_seed(0)
    images = torch.rand(280, 8, 8)
    labels = images.mean(1).argmax(1)
    data = lightning_fed.FederatedDataModule(
        train=TensorDataset(images[:240], labels[:240]),
        val=TensorDataset(images[240:], labels[240:]),
        partition=Dirichlet(num_clients=6, alpha=1.0),
    )
    keeper = ModelCheckpoint(monitor="val_acc", mode="max", save_last=True)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    trainer = lightning_fed.FederatedTrainer(
        algorithm=Scaffold(),
        max_rounds=rounds,
        clients_per_round=3,
        local_epochs=1,
        engine=engine,
        callbacks=[keeper, LearningRateMonitor("epoch")],
        logger=[CSVLogger("csv"), TensorBoardLogger("boards")],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data, ckpt_path=start)
    assert trainer.fit_loop.round == rounds
    assert not any(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))
    return keeper.last_model_path


def main() -> None:
    """Train and resume every module with every engine that takes it, and check the package's lazy imports."""
    assert importlib.util.find_spec("pytorch_lightning") is None, "this shows nothing where the other package is"
    for name, make in ZOO.items():
        for engine in ("sequential", "vectorized") if name in STEPPED_TOGETHER else ("sequential",):
            last = _fit(make(), engine, rounds=2)
            assert Path(last).is_file()
            _fit(make(), engine, rounds=3, start=last)
            print(f"{name}, engine={engine!r}: trained and resumed")
    assert Hooked.batches > 0
    lazy = runpy.run_path(str(Path(__file__).parents[1] / "tests" / "package" / "test_lazy_imports.py"))
    lazy["test_imports_are_lazy_and_package_is_ready_after_pytorch"]()


if __name__ == "__main__":
    main()
