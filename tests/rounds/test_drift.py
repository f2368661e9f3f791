"""The drift that a round reports, however alike the clients' changes are."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedCallback, FederatedDataModule
from lightning_fed.algorithms import FedAvg, FedDyn, FedNova
from lightning_fed.server import CoordinateMedian, TopK
from tests.helpers.processes import in_processes
from tests.helpers.selection import few
from tests.helpers.training import trainer

P, SIZES = 500, (3, 1, 2, 4, 1)
RATIOS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)


class Linear(pl.LightningModule):
    """Its gradient is the mean of the rows of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(P, generator=torch.Generator().manual_seed(5)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (batch[0] @ self.w).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Drifts(FederatedCallback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        self.values.append(round_report.drift)


def directions(ratio: float) -> Tensor:
    """Return each client's change [S, P]: a common one, and one of its own that is smaller by the ratio."""
    stream = torch.Generator().manual_seed(7)
    return torch.randn(P, generator=stream) + ratio * torch.randn(len(SIZES), P, generator=stream)


def drift(ratio: float, **options: Any) -> float:
    clients = [TensorDataset(row.repeat(n, 1)) for row, n in zip(directions(ratio), SIZES, strict=True)]
    seen = Drifts()
    options = {"clients_per_round": 1.0, "local_steps": 1, "max_rounds": 1, "weighting": "examples", **options}
    trainer(callbacks=seen, **options).fit(Linear(), FederatedDataModule(clients=clients, batch_size=4))
    return seen.values[-1]


def expected(ratio: float, weights: tuple[int, ...] = SIZES) -> float:
    d, w = directions(ratio).double(), torch.tensor(weights).double()[:, None] / sum(weights)
    return float((w * (d - (w * d).sum(0)).square()).sum().sqrt())


@pytest.mark.parametrize("ratio", few(RATIOS, [1e-3, 1e-6]))
@pytest.mark.parametrize("options", [{"engine": "sequential"}, {"engine": "vectorized", "chunk_size": 2}], ids=str)
def test_it_is_the_spread_of_the_changes_at_every_ratio(options: dict[str, Any], ratio: float) -> None:
    assert drift(ratio, **options) == pytest.approx(expected(ratio), rel=1e-2)


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": FedNova()},
        {"algorithm": FedAvg(), "aggregator": CoordinateMedian(), "weighting": None},
        {"algorithm": FedAvg(), "compression": TopK(0.5)},
        {"algorithm": FedDyn(0.1), "weighting": None},
    ],
    ids=str,
)
def test_whatever_becomes_of_the_changes(options: dict[str, Any]) -> None:
    weights = (1,) * len(SIZES) if "weighting" in options else SIZES
    assert drift(1e-4, **options) == pytest.approx(expected(1e-4, weights), rel=1e-2)


def test_it_vanishes_where_all_clients_change_alike() -> None:
    assert drift(0.0) < 1e-7 * float(torch.linalg.vector_norm(directions(0.0)[0]))  # gradients are rounded


@pytest.mark.parametrize("options", few([{}, {"engine": "vectorized"}, {"compression": TopK(0.5)}], [{}]), ids=str)
def test_two_processes_find_it_too(options: dict[str, Any], tmp_path: Path) -> None:
    for outcome in in_processes(partial(drift, 1e-5, strategy="clients", devices=2, **options), tmp_path):
        assert outcome.value == pytest.approx(expected(1e-5), rel=1e-2), outcome.trace


def test_a_process_without_clients_does_not_disturb_it(tmp_path: Path) -> None:
    run = partial(drift, 1e-5, strategy="clients", devices=2, sampler=lambda seed, round: [0], clients_per_round=None)
    for outcome in in_processes(run, tmp_path):
        assert outcome.value == 0, outcome.trace
