"""lightning_fed, with an ordinary module, data module and callback."""

import logging
import warnings
from typing import Any

import lightning_fed  # first: see lightning_fed.compat.torchvision
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_fed import algorithms
from lightning_fed.core.rounds import RoundReport
from systems.measure import Outcome, Settings, Stopwatch, usable_cores
from systems.networks import build, logits_of
from systems.problem import Problem

__all__ = ["Ticks", "make_method", "run"]


def run(problem: Problem, settings: Settings, stopwatch: Stopwatch) -> Outcome | None:
    """Train by the engine that ``engine="auto"`` takes, on several cores in one process each.

    The strategy starts the other processes by the command line of this one; they return None.
    """
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    on_gpu = settings.accelerator == "gpu"
    module = Module(problem)
    devices = settings.devices or (1 if on_gpu else _processes(problem, module))
    trainer = lightning_fed.FederatedTrainer(
        algorithm=make_method(settings.algorithm), max_rounds=settings.total, local_epochs=problem.workload.epochs,
        sampler=lambda seed, round, population=None: problem.cohort(round), seed=0, engine=settings.engine,
        accelerator=settings.accelerator, devices=devices, strategy="clients" if devices > 1 else "auto",
        callbacks=Ticks(stopwatch), logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, _data(problem))
    if not trainer.is_global_zero:
        return None
    engine = trainer.fit_loop.clients.engine  # which other checkouts have, too, under other names
    config: dict[str, Any] = {
        "version": f"{lightning_fed.__version__}, torch {torch.__version__}",
        "engine": getattr(engine, "name", type(engine).__name__.removesuffix("Engine").lower()),
        "chunk": getattr(engine, "chunk_size", 1),
        "processes": devices,
        "threads": 1,
        "accelerator": settings.accelerator,
    }
    return Outcome(logits_of(module.net), config)


def _processes(problem: Problem, module: "Module") -> int:
    """Return one process per core; one in all where a round is over sooner than several have agreed on it."""
    examples = problem.workload.cohort * len(problem.x) // problem.num_clients
    work = sum(p.numel() for p in module.parameters()) * examples * problem.workload.epochs
    return min(usable_cores(), problem.workload.cohort, 1 + work // 10**5)


class Module(pl.LightningModule):
    """The network of a workload as an ordinary module, with one ``self.log``."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.net = build(problem)
        self.lr = problem.workload.lr

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Ticks(lightning_fed.FederatedCallback):
    """Tick before the first round and after every one, on rank zero."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tick before the first round."""
        self._tick(trainer)

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round_report: RoundReport) -> None:
        """Tick after a round."""
        self._tick(trainer)

    def _tick(self, trainer: pl.Trainer) -> None:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        if trainer.is_global_zero:
            self.stopwatch.tick()


def _data(problem: Problem) -> lightning_fed.FederatedDataModule:
    dataset = TensorDataset(torch.from_numpy(problem.x), torch.from_numpy(problem.y))
    clients = [torch.arange(*problem.rows(c)) for c in range(problem.num_clients)]
    return lightning_fed.FederatedDataModule(
        train=dataset, partition=lambda labels: clients, batch_size=problem.workload.batch
    )


def make_method(name: str) -> algorithms.Algorithm:
    """Return a method by name; Mime's base optimizer is SGD with momentum.

    Raises:
        SystemExit: If there is no method of this name.
    """
    method = getattr(algorithms, name, None)
    if not (isinstance(method, type) and issubclass(method, algorithms.Algorithm)):
        raise SystemExit(f"--algorithm {name}: lightning_fed.algorithms has no method of this name.")
    mimics = name in ("Mime", "MimeLite", "CMime")
    made: algorithms.Algorithm = method(base=algorithms.SGDm()) if mimics else method()
    return made
