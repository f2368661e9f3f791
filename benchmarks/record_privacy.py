"""Measure the cost of record-level privacy on clients: CPU seconds of a round with and without per-example gradients.

    python benchmarks/record_privacy.py

Two clients of 128 examples train for one epoch on batches of 32, with an MLP of 0.1 million parameters and with
``MnistCNN`` of 1.7 million. Each number is the median of the rounds after the first, on one thread.
"""

import argparse
import itertools
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning_fed
import pytorch_lightning as pl
import torch
from torch.utils.data import TensorDataset

from lightning_fed.models import MLPClassifier, MnistCNN
from lightning_fed.server import ClientPrivacy

__all__ = ["main", "seconds"]

CLIENTS, EXAMPLES, BATCH = 2, 128, 32
MODELS: dict[str, Callable[[], pl.LightningModule]] = {
    "MLP": lambda: MLPClassifier(in_features=784, hidden=(128,), num_classes=10, lr=0.1),
    "MnistCNN": lambda: MnistCNN(lr=0.1),
}
HOW: dict[str, ClientPrivacy | None] = {
    "ordinary": None,
    "private": ClientPrivacy(1.0, 1.0, 1e-3, "shuffle"),
    "private, Poisson batches": ClientPrivacy(1.0, 1.0, 1e-3),
    "private, 8 examples at once": ClientPrivacy(1.0, 1.0, 1e-3, "shuffle", examples_at_once=8),
    "private, one by one": ClientPrivacy(1.0, 1.0, 1e-3, "shuffle", examples_at_once=1),
}


def seconds(model: pl.LightningModule, privacy: ClientPrivacy | None, rounds: int) -> float:
    """Return the median CPU seconds of the rounds after the first."""
    starts: list[float] = []

    class Clock(lightning_fed.FederatedCallback):
        def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
            starts.append(time.process_time())

    inputs, labels = torch.randn(CLIENTS, EXAMPLES, 1, 28, 28), torch.randint(10, (CLIENTS, EXAMPLES))
    sets = [TensorDataset(x, y) for x, y in zip(inputs, labels, strict=True)]
    trainer = lightning_fed.FederatedTrainer(
        client_privacy=privacy, local_epochs=1, max_rounds=rounds + 2, seed=0, logger=False, callbacks=[Clock()],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(model, lightning_fed.FederatedDataModule(clients=sets, batch_size=BATCH))
    return statistics.median(b - a for a, b in itertools.pairwise(starts[1:]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="rounds that are measured")
    given = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    for name in ("pytorch_lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"| CPU seconds of a round | {' | '.join(MODELS)} |\n|{' --- |' * (len(MODELS) + 1)}")
    for name, privacy in HOW.items():
        cells = [f"{seconds(make(), privacy, given.rounds):.2f}" for make in MODELS.values()]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
