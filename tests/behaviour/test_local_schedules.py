"""Schedules by local step, against a plain loop of torch, over engines, interruptions and processes."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR
from torch.utils.data import TensorDataset

from lightning_fed import FederatedCallback, FederatedDataModule, FederatedError
from lightning_fed.algorithms import Algorithm, Ditto, FedAvg, FedCM, FedSpeed, Scaffold
from lightning_fed.callbacks import ClientAccuracy
from lightning_fed.server import FedBuff
from tests.helpers.processes import in_processes
from tests.helpers.training import parameters, same, trainer

SIZES, BATCH, ROUNDS = (7, 4, 2, 6), 2, 4  # 4, 2, 1 and 3 batches an epoch
COHORTS = [(0, 1, 2, 3), (0, 2), (1, 3), (0, 1, 3)]
MODES = ("restart", "continue", "total")


def warm_up(optimizer: Optimizer) -> LambdaLR:
    """Return the schedule of Hugging Face's examples: from a rate of zero up, and then down."""
    return LambdaLR(optimizer, lambda t: t / 3 if t < 3 else max(0.1, (20 - t) / 17))


def apart(optimizer: Optimizer) -> LambdaLR:
    """Return a schedule whose groups have one rate at first, and different ones later."""
    return LambdaLR(optimizer, [lambda t: 0.9**t, lambda t: 1.1**t])


SCHEDULES: dict[str, tuple[Callable[..., Optimizer], Callable[[Optimizer], Any]]] = {
    "warm-up": (partial(SGD, lr=0.2), warm_up),
    "cosine": (partial(SGD, lr=0.2, weight_decay=0.1), partial(CosineAnnealingLR, T_max=9)),
    "one cycle": (partial(SGD, lr=0.2, momentum=0.9), partial(OneCycleLR, max_lr=0.3, total_steps=60)),
    "adam": (partial(Adam, lr=0.1, betas=(0.8, 0.9)), partial(OneCycleLR, max_lr=0.2, total_steps=60)),
    "groups": (partial(SGD, lr=0.2), apart),
}


class Regression(pl.LightningModule):
    """Least squares, with a schedule by local step."""

    def __init__(self, schedule: str = "warm-up", frequency: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)
        self.make, self.make_schedule = SCHEDULES[schedule]
        self.has_groups, self.frequency = schedule == "groups", frequency

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return (self.layer(x)[:, 0] - y).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        optimizer = self.make(groups_of(self.layer, self.has_groups))
        schedule = {"scheduler": self.make_schedule(optimizer), "interval": "step", "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def groups_of(layer: nn.Linear, apart: bool) -> Any:
    return [{"params": [layer.weight]}, {"params": [layer.bias]}] if apart else layer.parameters()


def clients() -> list[TensorDataset]:
    stream = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, generator=stream, dtype=torch.float64)
    return [TensorDataset(draw(n, 3), draw(n)) for n in SIZES]


def data() -> FederatedDataModule:
    return FederatedDataModule(clients=clients(), batch_size=BATCH, shuffle=False)


def drawn(seed: int, round: int) -> tuple[int, ...]:
    return COHORTS[round]


def run(mode: Any, schedule: str = "warm-up", frequency: int = 1, ckpt_path: Any = None, **options: Any) -> Any:
    options = {"local_epochs": 2, "max_rounds": ROUNDS, "sampler": drawn, "precision": "64-true"} | options
    fitted = trainer(local_schedule=mode, **options)
    fitted.fit(Regression(schedule, frequency), data(), ckpt_path=ckpt_path)
    return fitted


def plain_loop(mode: str, schedule: str, method: str = "FedAvg", frequency: int = 1) -> Tensor:
    """Return the model of a plain loop: every client with an optimizer and a schedule of its own."""
    module, sets = Regression(schedule).double(), clients()
    x, total, own = parameters(module).clone(), 0, [0] * len(SIZES)
    c, c_of = torch.zeros_like(x), [torch.zeros_like(x) for _ in SIZES]
    for cohort in COHORTS:
        models, longest, changes = [], 0, []
        for i in cohort:
            nn.utils.vector_to_parameters(x.clone(), module.parameters())
            optimizer = module.make(groups_of(module.layer, module.has_groups))
            scheduler = module.make_schedule(optimizer)
            first = {"restart": 0, "continue": own[i], "total": total}[mode]
            for t in range(first):
                if (t + 1) % frequency == 0:
                    scheduler.step()
            moved, rates, taken = torch.zeros_like(x), torch.zeros_like(x), 0
            for _ in range(2):
                for rows in torch.arange(SIZES[i]).split(BATCH):
                    optimizer.zero_grad()
                    module.training_step(sets[i][rows], 0).backward()
                    corrections = list(torch.split(c - c_of[i], [3, 1]))
                    for p, correction in zip(module.parameters(), corrections, strict=True):
                        assert p.grad is not None
                        p.grad += correction.view_as(p) if method == "Scaffold" else 0.0
                    group_rates = [float(group["lr"]) for group in optimizer.param_groups]
                    rate = torch.tensor([group_rates[0]] * 3 + [group_rates[-1]], dtype=x.dtype)
                    moved += rate * torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
                    rates += rate
                    optimizer.step()
                    taken += 1
                    if (first + taken) % frequency == 0:
                        scheduler.step()
            models.append((SIZES[i], parameters(module).clone()))
            longest, own[i] = max(longest, taken), own[i] + taken
            changes.append(moved / rates - c)
            c_of[i] = c_of[i] + changes[-1] if method == "Scaffold" else c_of[i]
        total += longest
        weights = [1.0 if method == "Scaffold" else float(n) for n, _ in models]
        x = sum(w * y for w, (_, y) in zip(weights, models, strict=True)) / sum(weights)  # type: ignore[assignment]
        if method == "Scaffold":
            c = c + sum(changes) / len(SIZES)
    return x


# every schedule in every mode with one engine, and every mode with both
CASES = [(mode, schedule, "FedAvg") for schedule in SCHEDULES for mode in MODES]
CASES += [(mode, schedule, "Scaffold") for schedule in ("warm-up", "groups", "adam") for mode in MODES]


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*before")
def test_every_mode_is_that_of_a_plain_loop(engine: Any) -> None:
    for mode, schedule, method in CASES:
        if (mode, engine) == ("continue", "vectorized"):
            continue
        algorithm = Scaffold("ii") if method == "Scaffold" else FedAvg()
        found = run(mode, schedule, engine=engine, algorithm=algorithm).fit_loop.state.x
        torch.testing.assert_close(found, plain_loop(mode, schedule, method), rtol=1e-12, atol=1e-13, msg=f"{mode} {schedule} {method}")
