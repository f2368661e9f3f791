"""Measure the clients of a configuration at one model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_fed.compat.package import pl
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.seeds import Purpose, derive_seed, generator
from lightning_fed.core.types import ClientId, Vector
from lightning_fed.metrics import extreme_eigenvalue, gradient_dissimilarity, hessian_dissimilarity
from lightning_fed.rounds.local_plans import RoundPlans

_TOLERANCE, _ITERATIONS = 1e-2, 30  # for Lanczos
_BATCHES = 8  # batches per client whose gradients give the noise
_PATH = 50  # the most local steps for measuring the drift

Estimate = tuple[float, float]  # value, and its residual or its standard error from sampling clients
Shares = Mapping[ClientId, float]


@dataclass(frozen=True)
class Measured:
    r"""The measurements at a model x; nan if unknown.

    Attributes:
        round: The rounds completed at x.
        population: The number of all clients, N.
        clients: The number of clients measured.
        few: The number of clients whose Hessians and local steps are compared. There, f is their mean.
        weighting: The basis of the clients' weights in all means, as in the run.
        steps: The planned local steps of a client: the least, the mean and the greatest number.
        rate: The step size of the local optimizer, or of the server's if clients take no steps.
        is_plain: Whether the optimizer with this rate is SGD without momentum.
        server: The server's optimizer with its rate, in words.
        loss: The mean training loss f(x).
        gradient: :math:`\|\nabla f(x)\|`.
        G: :math:`(\mathbb{E}_i \|\nabla f_i(x) - \nabla f(x)\|^2)^{1/2}`.
        B: :math:`(\mathbb{E}_i \|\nabla f_i(x)\|^2)^{1/2} / \|\nabla f(x)\|`.
        noise: The root mean square distance of the gradient of a step's batches from the client's.
        drift: The distance between the clients' mean after K full-batch local steps and the result of K steps on f.
            It is divided by the step size and K, to be in units of a gradient. At most 50 steps are taken.
        progress: The distance that these steps on f cover, in the same units.
        curvature: The eigenvalue of f's Hessian with the largest absolute value. That value is L.
        delta: The largest :math:`\|\nabla^2 f_i(x) - \nabla^2 f(x)\|`.
        delta_mean: The mean of these norms.
        no_hessian: The reason if there is no Hessian.
        lost: The clients whose training loss is not finite.
    """

    round: int
    population: int
    clients: int
    few: int
    weighting: str
    steps: tuple[int, float, int]
    rate: float
    is_plain: bool
    server: str
    loss: float
    gradient: float
    G: Estimate
    B: float
    noise: Estimate
    drift: float
    progress: float
    curvature: Estimate = (math.nan, math.nan)
    delta: Estimate = (math.nan, math.nan)
    delta_mean: float = math.nan
    no_hessian: str = ""
    lost: tuple[ClientId, ...] = ()


def stepping(trainer: pl.Trainer) -> Optimizer:
    """Return the optimizer whose step size is examined: the clients', or the server's if clients take no steps."""
    loop = trainer.fit_loop
    found: Optimizer = loop.prepared.optimizer if loop.settings.algorithm.local_work else loop.state.step.optimizer
    return found


def mean_gradient(trainer: pl.Trainer, x: Vector, shares: Shares) -> Vector:
    """Return the gradient [P] of the clients' mean training loss at x [P]."""
    out = torch.zeros_like(x)
    for i, share in shares.items():
        out.add_(trainer.fit_loop.full_gradient(i, x), alpha=share)
    return out


def measure(trainer: pl.Trainer, shares: Shares, hessian_clients: int, weighting: str) -> Measured:
    """Measure clients at the server's model, in a fit.

    Args:
        trainer: The trainer.
        shares: The clients' shares in all means. They sum to one.
        hessian_clients: The number of clients whose Hessians are compared.
        weighting: The basis of the shares, for the record.
    """
    loop, x = trainer.fit_loop, trainer.fit_loop.state.x
    optimizer, server = stepping(trainer), loop.state.step.optimizer
    mean, distances, noises = mean_gradient(trainer, x, shares), [], []
    for i in shares:
        gradient = loop.full_gradient(i, x)
        distances.append(_square(gradient - mean))
        around = [_square(g - gradient) for g in loop.batch_gradients(i, x, _BATCHES)]
        noises.append(sum(around) / len(around) / trainer.accumulate_grad_batches)
    spread = gradient_dissimilarity((loop.full_gradient(i, x), share) for i, share in shares.items())
    plans = RoundPlans(loop.clients.plans, loop.round)
    steps = [plan.participant.steps for i in shares if (plan := plans.plan(i)) is not None]
    few = dict(list(shares.items())[:hessian_clients])
    few = {i: share / sum(few.values()) for i, share in few.items()}
    rate, number = max(float(group["lr"]) for group in optimizer.param_groups), sum(steps) / len(steps)
    is_plain = _is_plain(optimizer)
    drift, progress = _drift(trainer, x, few, rate, round(number)) if is_plain and rate * number else (math.nan,) * 2
    losses = loop.training_losses(list(shares))
    try:
        hessian = _hessian(trainer, x, shares, few)
    except FederatedError as error:
        hessian = {"no_hessian": str(error)}
    return Measured(
        round=loop.round,
        population=len(loop.population),
        clients=len(shares),
        few=len(few),
        weighting=weighting,
        steps=(min(steps), number, max(steps)),
        rate=rate,
        is_plain=is_plain,
        server=f"{type(server).__name__}, rate {float(server.param_groups[0]['lr']):g}",
        loss=sum(shares[i] * loss for i, loss in losses.items()),
        lost=tuple(i for i, loss in losses.items() if not math.isfinite(loss)),
        gradient=spread.norm,
        G=_root(distances, shares, len(loop.population)),
        B=spread.B,
        noise=_root(noises, shares, len(loop.population)),
        drift=drift,
        progress=progress,
        **hessian,
    )


def _is_plain(optimizer: Optimizer) -> bool:
    base = getattr(optimizer, "base", optimizer)
    return type(base) is torch.optim.SGD and not any(group["momentum"] for group in base.param_groups)


def _drift(trainer: pl.Trainer, x: Vector, shares: Shares, rate: float, steps: int) -> tuple[float, float]:
    """Return the drift and progress of local steps, each with all examples of its client."""
    loop, steps = trainer.fit_loop, min(steps, _PATH)
    apart, together = torch.zeros_like(x), x.clone()
    for i, share in shares.items():
        y = x.clone()
        for _ in range(steps):
            y.sub_(loop.full_gradient(i, y), alpha=rate)
        apart.add_(y - x, alpha=share)
    for _ in range(steps):
        together.sub_(mean_gradient(trainer, together, shares), alpha=rate)
    gap, way = torch.linalg.vector_norm(apart - (together - x)), torch.linalg.vector_norm(together - x)
    return float(gap) / (rate * steps), float(way) / (rate * steps)


def _hessian(trainer: pl.Trainer, x: Vector, shares: Shares, few: Shares) -> dict[str, Any]:
    """Return the results of Hessian-vector products, as fields of :class:`Measured`.

    Raises:
        FederatedError: If the model cannot be differentiated twice.
    """
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise FederatedError("second derivatives underflow with precision='16-mixed'.")
    loop = trainer.fit_loop
    products = {i: partial(loop.hessian_vector, i, x) for i in shares}

    def mean_product(vector: Vector) -> Vector:
        out = torch.zeros_like(vector)
        for i, share in shares.items():
            out.add_(products[i](vector), alpha=share)
        return out

    stream = generator(derive_seed(loop.state.seed, Purpose.MEASUREMENT), Purpose.TRAINING)
    start = torch.randn(len(x), generator=stream, dtype=x.dtype).to(x.device)
    largest = extreme_eigenvalue(mean_product, start, _TOLERANCE, _ITERATIONS)
    apart = hessian_dissimilarity([products[i] for i in few], start, list(few.values()), _TOLERANCE, _ITERATIONS)
    worst = max(apart, key=lambda found: abs(found.value))
    return {
        "curvature": (largest.value, largest.residual),
        "delta": (abs(worst.value), worst.residual),
        "delta_mean": sum(share * abs(one.value) for share, one in zip(few.values(), apart, strict=True)),
    }


def _square(vector: Vector) -> float:
    return float(vector.dot(vector))


def _root(squares: Sequence[float], shares: Shares, population: int) -> Estimate:
    """Return the root of a mean over clients drawn without replacement, and its standard error."""
    pairs, n = list(zip(shares.values(), squares, strict=True)), len(squares)
    mean = sum(share * value for share, value in pairs)
    if mean == 0 or n == population:
        return math.sqrt(mean), 0.0
    variance = sum((share * (value - mean)) ** 2 for share, value in pairs) * n / (n - 1) if n > 1 else math.inf
    return math.sqrt(mean), math.sqrt(variance * (1 - n / population)) / (2 * math.sqrt(mean))
