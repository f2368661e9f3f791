"""Count kernels, host reads and copies to the device in a warm round, and compare them with a plain loop.

    python benchmarks/device_counts.py                    # three minutes; from the root of a checkout
    python benchmarks/device_counts.py --case shared --method FedAvg Mime --engine sequential --kernels

The device is the counting test device of ``tests/devices``, which is built on first use. It is not a GPU, and these
are counts, not times. On a GPU, each kernel is a launch, and each host read waits for all launched kernels. A foreach
operator is one kernel there. Here, it counts once per tensor.

A case is 12 clients, 10 a round, one local epoch in 10 batches of 20. The plain loop trains the clients of a cohort one
after another on batches that it copies to the device. It keeps the losses there until the end of a client, and then
averages the models.
"""

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning_fed  # first: see lightning_fed.compat.torchvision
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from lightning_fed import algorithms
from lightning_fed.algorithms import Algorithm

__all__ = ["CASES", "METHODS", "Case", "count", "main", "plain"]

CLIENTS, COHORT, EXAMPLES, BATCH, FEATURES, CLASSES, ROUND = 12, 10, 200, 20, 16, 6, 2
ENGINES = ("sequential", "vectorized")
METHODS: dict[str, Callable[[], Algorithm]] = {
    "FedAvg": algorithms.FedAvg,
    "FedProx": lambda: algorithms.FedProx(0.1),
    "Scaffold": algorithms.Scaffold,
    "FedDyn": lambda: algorithms.FedDyn(0.1),
    "Mime": lambda: algorithms.Mime(algorithms.SGDm()),
}
COLUMNS = ("kernels", "host reads", "to device", "bytes to device")

Counts = dict[str, int]


@dataclass(frozen=True)
class Case:
    """Data and a network.

    Attributes:
        what: A description in words.
        sizes: The clients' numbers of examples, repeated.
        is_shared: Whether clients are subsets of one data set instead of separate data sets.
        options: Options of the data module.
        make: A function that makes the network.
    """

    what: str
    sizes: tuple[int, ...] = (EXAMPLES,)
    is_shared: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    make: Callable[[], nn.Module] = lambda: nn.Sequential(
        nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, CLASSES)
    )

    def clients(self) -> list[Any]:
        """Return the clients' data sets."""
        stream = torch.Generator().manual_seed(0)
        sizes = [self.sizes[i % len(self.sizes)] for i in range(CLIENTS)]
        x = torch.randn(sum(sizes), FEATURES, generator=stream)
        y = (x @ torch.randn(FEATURES, CLASSES, generator=stream)).argmax(1)
        if self.is_shared:
            whole = TensorDataset(x, y)
            return [Subset(whole, rows.tolist()) for rows in torch.arange(len(x)).split(sizes)]
        return [TensorDataset(*pair) for pair in zip(x.split(sizes), y.split(sizes), strict=True)]


class Residual(nn.Module):
    """A network of linear layers, as deep as a ResNet-18. It has 52 parameters with 153,000 numbers in all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 96)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(96, 96), nn.GroupNorm(8, 96), nn.ReLU(), nn.Linear(96, 96)) for _ in range(8)
        )
        self.head = nn.Linear(96, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = self.first(x)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.head(x)


CASES = {
    "shared": Case("clients cut out of one data set", is_shared=True),
    "own": Case("clients that are data sets of their own"),
    "unequal": Case("as own, of 100 to 287 examples", sizes=tuple(range(100, 300, 17))),
    "longest": Case("as own, of 300 examples: as many batches as the longest client of unequal", sizes=(300,)),
    "pinned": Case("as shared, with pin_memory=True", is_shared=True, options=(("pin_memory", True),)),
    "deep": Case("as shared, a residual network of 52 parameters", is_shared=True, make=Residual),
}


class Model(pl.LightningModule):
    """A network with one ``self.log``."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = case.make()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _Counting(lightning_fed.FederatedCallback):
    """Count the device's operations in one round."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.found: Counts = {}

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == ROUND:
            self.counter = self.device.counted()
            self.found = self.counter.__enter__()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == ROUND:
            self.counter.__exit__(None, None, None)


def _device() -> tuple[Any, Callable[[], dict[str, Any]]]:
    """Return the test device, and a function that returns a trainer's arguments for this device."""
    root = str(Path(__file__).parents[1])
    if root not in sys.path:
        sys.path.append(root)
    from tests.devices import mini
    from tests.devices.mini.lightning import on_mini

    return mini, on_mini


def count(method: str, engine: str, case: Case, **options: Any) -> Counts:
    """Return the counts of a warm round of a method.

    Args:
        method: One of :data:`METHODS`.
        engine: "sequential" or "vectorized".
        case: Data and network.
        options: More arguments of the trainer.
    """
    mini, on_mini = _device()
    watch = _Counting(mini)
    trainer = lightning_fed.FederatedTrainer(**{
        "algorithm": METHODS[method](), "max_rounds": ROUND + 1, "clients_per_round": COHORT, "local_epochs": 1,
        "seed": 3, "engine": engine, "callbacks": watch, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, **on_mini(), **options,
    })  # fmt: skip
    trainer.fit(Model(case), lightning_fed.FederatedDataModule(case.clients(), batch_size=BATCH, **dict(case.options)))
    return _summed(watch.found)


def plain(case: Case) -> Counts:
    """Return the counts of a round of FedAvg in a plain loop."""
    mini, _ = _device()
    device = torch.device("mini", 0)
    model = Model(case).to(device)
    optimizer: Any = model.configure_optimizers()
    params = list(model.parameters())
    with mini.counted() as found:
        start = [p.detach().clone() for p in params]
        total = [torch.zeros_like(p) for p in params]
        clients = case.clients()[:COHORT]
        for data in clients:
            with torch.no_grad():
                torch._foreach_copy_(params, start)
            losses = []
            for rows in torch.randperm(len(data)).split(BATCH):
                x, y = (t.to(device) for t in data[rows.tolist()])
                optimizer.zero_grad()
                loss = F.cross_entropy(model.net(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            torch.stack(losses).tolist()
            torch._foreach_add_(total, [p.detach() for p in params], alpha=1 / len(clients))
        with torch.no_grad():
            torch._foreach_copy_(params, total)
    return _summed(found)


def _summed(found: Counts) -> Counts:
    return {**found, "host reads": found.get("scalar to host", 0) + found.get("to host", 0)}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the counts as a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES), help="all by default")
    parser.add_argument("--method", nargs="+", choices=list(METHODS), default=list(METHODS), help="all by default")
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=list(ENGINES), help="both by default")
    parser.add_argument("--kernels", action="store_true", help="list the kernels of each row")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    print("\n".join(f"- {name}: {CASES[name].what}" for name in args.case))
    print(f"\n| case | method | engine | {' | '.join(COLUMNS)} |\n|{' --- |' * (3 + len(COLUMNS))}")
    for name in args.case:
        _print_row(args, name, "FedAvg", "plain loop", plain(CASES[name]))
        for method in args.method:
            for engine in args.engine:
                _print_row(args, name, method, engine, count(method, engine, CASES[name]))
    return 0


def _print_row(args: argparse.Namespace, case: str, method: str, engine: str, found: Counts) -> None:
    print(f"| {case} | {method} | {engine} | {' | '.join(f'{found.get(key, 0):,}' for key in COLUMNS)} |", flush=True)
    for key in sorted(found, key=found.__getitem__, reverse=True) if args.kernels else ():
        if key.startswith("kernel "):
            print(f"      {found[key]:5} {key.removeprefix('kernel aten::')}")


if __name__ == "__main__":
    sys.exit(main())
