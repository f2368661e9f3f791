"""Compare a federated round with a plain PyTorch loop over the same batches, in one process and on one thread.

    python benchmarks/round_overhead.py --json

Workload: MLP 784-300-100-62, batches of 20, 10 local steps a client, one ``self.log`` in ``training_step``, FedAvg. The
two loops take turns, round by round. The figures are medians over the rounds.
"""

import argparse
import json
import logging
import statistics
import time
import warnings

import lightning_fed  # first: see lightning_fed.compat.torchvision
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed.algorithms import FedAvg
from lightning_fed.core.rounds import RoundReport

CLIENTS, STEPS, BATCH = 10, 10, 20


def network() -> nn.Sequential:
    """Return the MLP of the workload."""
    return nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 62))


class Model(pl.LightningModule):
    """An ordinary module with one ``self.log``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.05)


def plain_round(model: nn.Module, clients: list[TensorDataset]) -> None:
    """Run FedAvg in minimal PyTorch: train each client from x, then take the mean."""
    params = list(model.parameters())
    x = [p.detach().clone() for p in params]
    total = [torch.zeros_like(p) for p in params]
    optimizer = torch.optim.SGD(params, lr=0.05)
    for client in clients:
        with torch.no_grad():
            for p, value in zip(params, x, strict=True):
                p.copy_(value)
        data, target = client.tensors
        for rows in torch.randperm(len(client)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(data[rows]), target[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            for value, p in zip(total, params, strict=True):
                value.add_(p, alpha=1 / len(clients))
    with torch.no_grad():
        for p, value in zip(params, total, strict=True):
            p.copy_(value)


class TakeTurns(lightning_fed.FederatedCallback):
    """Run a plain round after each federated one, and keep both times."""

    def __init__(self, clients: list[TensorDataset], warmup: int) -> None:
        self.clients, self.warmup, self.model = clients, warmup, network()
        self.federated: list[float] = []
        self.plain: list[float] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock of the first round."""
        self.started = time.perf_counter()

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round_report: RoundReport) -> None:
        """Time a plain round."""
        federated = time.perf_counter() - self.started
        started = time.perf_counter()
        plain_round(self.model, self.clients)
        if round_report.round >= self.warmup:
            self.federated.append(federated)
            self.plain.append(time.perf_counter() - started)
        self.started = time.perf_counter()


def measure(rounds: int) -> dict[str, float]:
    """Run the workload and return the figures."""
    torch.set_num_threads(1)
    stream = torch.Generator().manual_seed(0)
    clients = [
        TensorDataset(
            torch.randn(STEPS * BATCH, 784, generator=stream), torch.randint(62, (STEPS * BATCH,), generator=stream)
        )
        for _ in range(CLIENTS)
    ]
    timer = TakeTurns(clients, warmup=5)
    trainer = lightning_fed.FederatedTrainer(
        algorithm=FedAvg(), max_rounds=rounds + 5, local_epochs=1, callbacks=timer, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(Model(), lightning_fed.FederatedDataModule(clients=clients, batch_size=BATCH))
    steps = CLIENTS * STEPS
    federated, plain = statistics.median(timer.federated), statistics.median(timer.plain)
    return {
        "ratio": round(federated / plain, 3),
        "ms_per_step": round(1e3 * federated / steps, 4),
        "ms_per_step_plain": round(1e3 * plain / steps, 4),
        "ms_per_step_min": round(1e3 * min(timer.federated) / steps, 4),
        "ms_per_step_plain_min": round(1e3 * min(timer.plain) / steps, 4),
        "rounds": rounds,
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="rounds to time, after 5 to warm up")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)  # keep the output pure JSON
    figures = measure(args.rounds)
    if args.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:24} {value}")


if __name__ == "__main__":
    main()
