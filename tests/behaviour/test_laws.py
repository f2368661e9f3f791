"""Every engine draws random numbers from the right distribution, with new ones per client, step and round.

The tests infer a run's draws from the moves of the parameters: the loss is linear in them, and each example has its own
parameters. Bounds have a chance of error below 1e-6, with fixed seeds. In 30 draws of 500 numbers, the tests detect
three faults 19 times in 20. They are a correlation of 0.4 between two draws, a mean 7 % of the standard deviation off,
and a normal variance 10 % off.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Gamma, Poisson
from torch.utils.data import TensorDataset

from lightning_fed import FederatedCallback, FederatedDataModule
from lightning_fed.algorithms import SGD, FedAvg, FedSAM, Mime
from tests.helpers.selection import few
from tests.helpers.training import trainer

CLIENTS, STEPS, ROUNDS, N = 5, 3, 2, 500
SIGMAS = 6.5  # the chance that one of 435 correlations exceeds this is 4e-8


class Draws(pl.LightningModule):
    """Multiplies the parameters of each example by the numbers that a function draws."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.w, self.draw = nn.Parameter(torch.ones(STEPS, N)), draw

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        w = (batch[0] @ self.w)[0]
        return (self.draw(w) * w).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Moves(FederatedCallback):
    """Records how far every client moves the parameters."""

    def __init__(self) -> None:
        self.moves: dict[tuple[int, Any], Tensor] = {}

    def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
        y, _ = trainer.fit_loop.client_model
        self.moves[trainer.fit_loop.round, client_report.client_id] = trainer.fit_loop.state.x - y


def moves(draw: Callable[[Tensor], Tensor], algorithm: Any = None, **options: Any) -> Tensor:
    """Return the drawn numbers [rounds x clients, steps, N], for a method that adds nothing to the gradient."""
    seen, eye = Moves(), torch.eye(STEPS, dtype=torch.float64)
    own = {"algorithm": algorithm or FedAvg(), "max_rounds": ROUNDS, "precision": "64-true", "limit_val_batches": 0}
    datamodule = FederatedDataModule(clients=[TensorDataset(eye)] * CLIENTS, batch_size=1)
    trainer(callbacks=[seen], clients_per_round=None, local_epochs=1, **own, **options).fit(Draws(draw), datamodule)
    return torch.stack(list(seen.moves.values())).view(-1, STEPS, N)


def mixed(w: Tensor) -> Tensor:
    return torch.rand(w.shape).to(w)[torch.randperm(N)]


# the draw for parameters w, its mean and its standard deviation
LAWS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "dropout": (lambda w: F.dropout(torch.ones_like(w), 0.3), 1.0, math.sqrt(0.3 / 0.7)),
    "a mask that no client owns": (lambda w: torch.rand(N).to(w) < 0.25, 0.25, math.sqrt(3 / 16)),
    "a mask in place": (lambda w: torch.empty_like(w).bernoulli_(0.25), 0.25, math.sqrt(3 / 16)),
    "noise": (lambda w: torch.randn(N).to(w), 0.0, 1.0),
    "integers": (lambda w: torch.randint(10, (N,)), 4.5, math.sqrt(99 / 12)),
    "a permutation": (mixed, 0.5, math.sqrt(1 / 12)),
    "categories": (lambda w: torch.multinomial(torch.ones(4), N, replacement=True), 1.5, math.sqrt(15 / 12)),
    "gumbel softmax": (lambda w: F.gumbel_softmax(torch.stack([0 * w, 0 * w], 1), hard=True)[:, 0].detach(), 0.5, 0.5),
    "a gamma variable": (lambda w: Gamma(torch.full_like(w, 4.0), 1.0).rsample(), 4.0, 2.0),
    "a count": (lambda w: Poisson(torch.full_like(w, 4.0)).sample(), 4.0, 2.0),
}
CHUNKS = [("sequential", None), ("vectorized", 1), ("vectorized", 3), ("vectorized", 5)]


@pytest.mark.parametrize(
    ("name", "engine", "chunk_size"),
    few(
        [pytest.param(name, *chunk, id=f"{name}-{chunk[0]}-{chunk[1]}") for name in LAWS for chunk in CHUNKS],
        ["dropout-vectorized-3"],
    ),
)
def test_every_step_draws_independently_from_its_distribution(name: str, engine: str, chunk_size: int | None) -> None:
    draw, mean, std = LAWS[name]
    drawn = moves(draw, engine=engine, chunk_size=chunk_size).reshape(-1, N)
    z = (drawn - mean) / std
    n = z.numel()
    kurtosis = float((z**4).mean())
    assert abs(float(z.mean())) < SIGMAS / n**0.5
    assert abs(float((z**2).mean()) - 1) < SIGMAS * ((kurtosis - 1) / n) ** 0.5 + 1e-9
    correlation = torch.corrcoef(drawn).fill_diagonal_(0)
    assert float(correlation.abs().max()) < SIGMAS / N**0.5


@pytest.mark.parametrize(
    ("name", "engine", "chunk_size"),
    few(
        [pytest.param(name, *chunk, id=f"{name}-{chunk[0]}-{chunk[1]}") for name in LAWS for chunk in CHUNKS],
        ["dropout-vectorized-3"],
    ),
)
def test_second_gradient_of_a_step_reuses_the_random_numbers(name: str, engine: str, chunk_size: int | None) -> None:
    draw, chunk = LAWS[name][0], {"engine": engine, "chunk_size": chunk_size}
    found = moves(draw, Mime(SGD()), **chunk)  # a linear loss has g(y) - g(x) = 0, and all clients share c
    torch.testing.assert_close(found, found[::CLIENTS].repeat_interleave(CLIENTS, 0))
    torch.testing.assert_close(moves(draw, FedSAM(rho=0.5), **chunk)[:CLIENTS], moves(draw, **chunk)[:CLIENTS])


@pytest.mark.thorough
def test_clients_and_adjacent_seeds_draw_independently() -> None:
    draw = LAWS["noise"][0]
    runs = [moves(draw, engine="sequential", seed=seed).reshape(-1, N) for seed in (0, 1)]
    correlation = torch.corrcoef(torch.cat(runs)).fill_diagonal_(0)
    assert float(correlation.abs().max()) < SIGMAS / N**0.5
