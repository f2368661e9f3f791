"""Measure the cost of options: CPU milliseconds of a round with and without each option, in each engine.

    python benchmarks/options.py

In each round, 10 of 20 clients with 200 examples take 10 steps of SGD on batches of 20 with an MLP of 784, 300, 100 and
62 units. Every option is measured in fits that alternate with fits without it, on one thread.
"""

import argparse
import itertools
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import lightning_fed
import pytorch_lightning as pl
import torch
from torch.utils.data import TensorDataset

from lightning_fed.callbacks import ClientModels
from lightning_fed.models import MLPClassifier
from lightning_fed.server import OortSampler, OptimalClientSampling, PowerOfChoiceSampler, UpdateNormSampler

__all__ = ["main", "milliseconds"]

CLIENTS, COHORT, STEPS, BATCH = 20, 10, 10, 20


class Scheduled(MLPClassifier):
    """The model with a schedule per local step."""

    def configure_optimizers(self) -> Any:
        """Return SGD with a rate that falls from step to step."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=100)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class OwnRate(lightning_fed.FederatedCallback):
    """Set a learning rate for each client."""

    def on_client_start(self, trainer: Any, pl_module: Any, round: int, client_id: Any) -> None:
        """Set the client's rate."""
        trainer.optimizers[0].param_groups[0]["lr"] = 0.05 / (1 + client_id % 2)


class Losses(lightning_fed.FederatedCallback):
    """Keep the clients' losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
        """Keep a loss."""
        self.losses.append(client_report.loss)


def model(cls: type[MLPClassifier] = MLPClassifier) -> pl.LightningModule:
    """Return the network with seeded weights."""
    torch.manual_seed(0)
    return cls(in_features=784, hidden=(300, 100), num_classes=62, lr=0.05)


def adapted() -> pl.LightningModule:
    """Return the network with adapters of rank 8 in all layers."""
    import peft

    module = model()
    layers = [name for name, part in module.net.named_modules() if isinstance(part, torch.nn.Linear)]
    module.net = peft.get_peft_model(module.net, peft.LoraConfig(r=8, target_modules=layers))
    return module


ENGINES = ("sequential", "vectorized")
OPTIONS: dict[str, Callable[[], tuple[pl.LightningModule, dict[str, Any]]]] = {
    '`local_schedule="restart"`': lambda: (model(Scheduled), {"local_schedule": "restart"}),
    '`local_schedule="total"`': lambda: (model(Scheduled), {"local_schedule": "total"}),
    '`local_schedule="continue"`': lambda: (model(Scheduled), {"local_schedule": "continue"}),
    "`on_client_start` sets each client's rate": lambda: (model(), {"callbacks": OwnRate()}),
    "`on_client_end` keeps each client's loss": lambda: (model(), {"callbacks": Losses()}),
    '`ClientModels("local")`, every round': lambda: (
        model(),
        {"callbacks": ClientModels("local", folder=tempfile.mkdtemp(dir=SCRATCH.name))},
    ),
    "`PowerOfChoiceSampler`, 15 candidates": lambda: (model(), {"sampler": PowerOfChoiceSampler(COHORT, 15)}),
    '`PowerOfChoiceSampler`, `losses="last"`': lambda: (
        model(),
        {"sampler": PowerOfChoiceSampler(COHORT, 15, losses="last")},
    ),
    "`OortSampler`": lambda: (model(), {"sampler": OortSampler(COHORT)}),
    "`UpdateNormSampler`": lambda: (model(), {"sampler": UpdateNormSampler(COHORT)}),
    "`OptimalClientSampling`": lambda: (model(), {"aggregator": OptimalClientSampling(COHORT // 2)}),
}
WITHOUT: dict[str, Callable[[], pl.LightningModule]] = {}  # the module without an option, if it differs
if find_spec("peft") is not None:
    OPTIONS |= {f'`lora="{lora}"`': lambda lora=lora: (adapted(), {"lora": lora}) for lora in ("frozen_a", "exact")}
    WITHOUT = {name: adapted for name in OPTIONS if "lora" in name}
SCRATCH = tempfile.TemporaryDirectory()


def milliseconds(module: pl.LightningModule, engine: str, rounds: int, **options: Any) -> list[float]:
    """Return the CPU milliseconds of each round after the second."""
    starts: list[float] = []

    class Clock(lightning_fed.FederatedCallback):
        def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
            starts.append(1e3 * time.process_time())

    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(CLIENTS, STEPS * BATCH, 784, generator=random)
    labels = torch.randint(62, (CLIENTS, STEPS * BATCH), generator=random)
    clients = [TensorDataset(x, y) for x, y in zip(inputs, labels, strict=True)]
    callbacks = [Clock(), *([options.pop("callbacks")] if "callbacks" in options else [])]
    cohort = {} if "sampler" in options else {"clients_per_round": COHORT}
    trainer = lightning_fed.FederatedTrainer(
        engine=engine, local_steps=STEPS, max_rounds=rounds + 3, seed=0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", callbacks=callbacks,
        **cohort, **options,
    )  # fmt: skip
    trainer.fit(module, lightning_fed.FederatedDataModule(clients=clients, batch_size=BATCH))
    return [b - a for a, b in itertools.pairwise(starts[2:])]


def compare(name: str, engine: str, rounds: int, turns: int) -> str:
    """Return a cell: milliseconds with and without an option and their ratio, or the engine that trains instead."""
    if engine == "vectorized" and "each client's rate" in name:
        return "trains with `sequential`"
    without: list[float] = []
    with_it: list[float] = []
    for _ in range(turns):
        without += milliseconds(WITHOUT.get(name, model)(), engine, rounds)
        module, options = OPTIONS[name]()
        with_it += milliseconds(module, engine, rounds, **options)
    before, after = statistics.median(without), statistics.median(with_it)
    return f"{after:.1f} / {before:.1f} = {after / before:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="rounds of a fit that are measured")
    parser.add_argument("--turns", type=int, default=3, help="how many fits of each kind")
    given = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(f"| CPU ms of a round with / without | {' | '.join(f'`{engine}`' for engine in ENGINES)} |")
    print(f"|{' --- |' * (len(ENGINES) + 1)}")
    for name in OPTIONS:
        cells = [compare(name, engine, given.rounds, given.turns) for engine in ENGINES]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
