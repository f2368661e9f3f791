"""Overhead of a local step, counted and not timed: Python calls and operators.

If a change lowers a count, lower it here. A count should not grow without a reason.
"""

import gc
import sys
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fed import FederatedCallback, FederatedDataModule
from lightning_fed.algorithms import Algorithm, FedAvg, Mime, Scaffold
from tests.helpers.selection import few
from tests.helpers.training import CLASSES, FEATURES, clients, trainer


@dataclass(frozen=True)
class Cost:
    """Counts of one unit of work.

    Attributes:
        calls: Calls of Python functions.
        operators: Operators of ATen.
    """

    calls: float
    operators: float


BATCH = 4
COUNTS: dict[tuple[str, str], tuple[Cost, Cost]] = {
    # (engine, method): costs of a local step of one client, or of all at once if vectorized, and of a client;
    # "vectorized, 1" takes one client at a time, as with large models
    ("sequential", "FedAvg"): (Cost(99, 57), Cost(208, 23)),
    ("sequential", "Scaffold"): (Cost(124, 73), Cost(254, 37)),
    ("sequential", "Mime"): (Cost(331, 145), Cost(616, 115)),
    ("vectorized", "FedAvg"): (Cost(22, 60), Cost(35, 7)),
    ("vectorized", "Scaffold"): (Cost(22, 61), Cost(34, 7)),
    ("vectorized", "Mime"): (Cost(22, 113), Cost(62, 12)),
    ("vectorized, 1", "FedAvg"): (Cost(17, 32), Cost(316, 34)),
    ("vectorized, 1", "Scaffold"): (Cost(17, 33), Cost(370, 78)),
    ("vectorized, 1", "Mime"): (Cost(17, 61), Cost(596, 105)),
}
SLACK = 1.05  # counts differ slightly between versions of Python, PyTorch and Lightning
METHODS: dict[str, Algorithm] = {"FedAvg": FedAvg(), "Scaffold": Scaffold(), "Mime": Mime()}


class Model(pl.LightningModule):
    """A multilayer perceptron with one ``self.log``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, CLASSES))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Operators(TorchDispatchMode):
    """Counts operators, including those of backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Count(FederatedCallback):
    """Counts the costs of a round's local work and server step, after a first round that traces the steps.

    The second round counts calls of Python functions. The third one counts operators.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.mode = Operators()

    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        if round == 1:
            gc.collect()
            gc.disable()  # collecting garbage of other tests can run Python code
            sys.setprofile(self._seen)
        elif round == 2:
            self.mode.__enter__()

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        if round_report.round == 1:
            sys.setprofile(None)
            gc.enable()
        elif round_report.round == 2:
            self.mode.__exit__(None, None, None)

    def _seen(self, frame: Any, event: str, argument: Any) -> None:
        self.calls += event == "call"


@lru_cache
def counted(engine: str, method: str, cohort: int, steps: int) -> Cost:
    """Return the counts of a round of ``cohort`` clients that take ``steps`` local steps each."""
    torch.manual_seed(0)
    count = Count()
    name, _, chunk_size = engine.partition(", ")
    run = trainer(
        engine=name,
        chunk_size=int(chunk_size) if chunk_size else None,
        algorithm=METHODS[method],
        callbacks=count,
        max_rounds=3,
        clients_per_round=cohort,
        local_steps=steps,
        limit_val_batches=0,
    )
    run.fit(Model(), FederatedDataModule(clients((8 * BATCH,) * cohort), batch_size=BATCH))
    return Cost(count.calls, count.mode.count)


def per_step_and_client(engine: str, method: str) -> tuple[Cost, Cost]:
    """Return the counts of one more step and of one more client."""
    few, many, more = (astuple(counted(engine, method, *size)) for size in ((4, 5), (4, 15), (8, 5)))
    together = 1 if engine == "vectorized" else 4  # step executions for one local step of the four clients
    step = [(b - a) / (10 * together) for a, b in zip(few, many, strict=True)]
    own = [0.0, 0.0] if engine == "vectorized" else [5 * s for s in step]  # the steps of one more client
    client = [(b - a) / 4 - s for a, b, s in zip(few, more, own, strict=True)]
    return Cost(*step), Cost(*client)


@pytest.mark.parametrize(
    ("engine", "method"),
    few(
        [pytest.param(engine, method, id=f"{engine}-{method}") for engine, method in COUNTS],
        ["sequential-FedAvg", "vectorized-FedAvg", "vectorized, 1-FedAvg"],
    ),
)
def test_step_and_client_overhead_does_not_increase(engine: str, method: str) -> None:
    for found, allowed in zip(per_step_and_client(engine, method), COUNTS[engine, method], strict=True):
        assert found.calls <= allowed.calls * SLACK
        assert found.operators <= allowed.operators * SLACK


def test_vectorized_step_costs_less_than_four_sequential_steps() -> None:
    (alone, _), (together, _) = (per_step_and_client(engine, "FedAvg") for engine in ("sequential", "vectorized"))
    assert together.operators < 4 * alone.operators


def test_counts_are_deterministic() -> None:
    before = counted("sequential", "FedAvg", 4, 5)
    counted.cache_clear()
    assert counted("sequential", "FedAvg", 4, 5) == before
