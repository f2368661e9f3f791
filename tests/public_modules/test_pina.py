"""pina: its physics-informed solvers, whose batches and attributes are tensors of a subclass."""

# pip install: pina-mathlab

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tests.public_modules.harness import SIZES, PublicCase, Published, needs

needs("pina", lightning="lightning")
from lightning import Trainer
from pina import LabelTensor
from pina.model import FeedForward
from pina.optim import TorchOptimizer, TorchScheduler
from pina.problem.zoo import Poisson2DSquareProblem
from pina.solver import (
    GradientPhysicsInformedSingleModelSolver,
    PhysicsInformedSingleModelSolver,
    RBAPhysicsInformedSingleModelSolver,
)

Trainer.logging_kwargs = {"on_step": False, "on_epoch": True}  # pina's own trainer has it, and its solvers read it


class Points(Dataset):
    """The points of a problem at which its equations are to hold."""

    def __init__(self, n: int) -> None:
        self.parts, self.n = sampled(n).discretised_domains, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: points[index : index + 1] for name, points in self.parts.items()}


def sampled(n: int) -> Any:
    """Return a Poisson equation with ``n`` random points in each part of its domain."""
    problem = Poisson2DSquareProblem()
    problem.discretise_domain(n, "random")
    problem.move_discretisation_into_conditions()  # pina's own data module calls it, too
    return problem


def collate(examples: list[dict[str, Tensor]]) -> list[tuple[str, dict[str, Tensor]]]:
    """Return a batch as pina's loaders make it: conditions with their points."""
    return [(name, {"input": LabelTensor.cat([points[name] for points in examples], dim=0)}) for name in examples[0]]


@cache
def clients() -> list[Points]:
    """Return the clients' points; pina also draws from generators that no seed of ours sets."""
    return [Points(n) for n in SIZES]


def solver(kind: Any) -> Any:
    """Return a solver whose rate is halved every round; its own points only serve for its checks."""
    network = FeedForward(2, 1, layers=[4])
    schedule = TorchScheduler(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    return kind(sampled(8), network, TorchOptimizer(torch.optim.SGD, lr=1e-4), schedule)


CASES = [
    PublicCase(
        kind.__name__,
        lambda kind=kind: solver(kind),
        clients,
        "sequential",
        "found a str in one",
        collate=collate,
        logged=("train_loss", "D_loss"),
    )
    for kind in (
        PhysicsInformedSingleModelSolver,
        GradientPhysicsInformedSingleModelSolver,
        RBAPhysicsInformedSingleModelSolver,
    )
]


class TestPublished(Published):
    cases = CASES
