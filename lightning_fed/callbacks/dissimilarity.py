"""How much the clients' gradients and Hessians differ at the server model."""

import math
from functools import partial

import torch

from lightning_fed.callbacks.measure import WeightedMeasure, Weighting
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import rank_zero_warn
from lightning_fed.core.arguments import check_count, check_fraction
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import RoundReport
from lightning_fed.core.seeds import Purpose, derive_seed, generator
from lightning_fed.core.types import ClientId, Vector
from lightning_fed.metrics import GradientDissimilarities, gradient_dissimilarity, hessian_dissimilarity

__all__ = ["GradientDissimilarity", "HessianDissimilarity"]

_MANY = 30  # clients whose Hessians take so long that a word is in place


class GradientDissimilarity(WeightedMeasure):
    r"""Measure how the clients' full-batch gradients differ at the new server model.

    It logs ``gradient/G2``, :math:`\mathbb{E}_i \|\nabla f_i - \nabla f\|^2`, which is Mime's :math:`G^2` and
    FedProx's variance of local gradients; ``gradient/mean_square``, :math:`\mathbb{E}_i \|\nabla f_i\|^2`, which
    SCAFFOLD bounds; ``gradient/B`` of FedProx's Definition 3, where it is finite; and ``gradient/norm``,
    :math:`\|\nabla f\|`. Papers and assumptions: :func:`lightning_fed.metrics.gradient_dissimilarity`.

    The means are over the clients measured, and :math:`f` is their mean. It costs one pass over the data of each.

    Args:
        every_n_rounds: Measure after every so many rounds.
        clients: How many clients to measure, a fixed sample; all by default.
        weighting: "uniform", as SCAFFOLD and Mime write :math:`\mathbb{E}_i`, or "examples", as FedProx does.

    Attributes:
        last: The last measurement.

    Raises:
        FederatedError: If an argument is not allowed.
    """

    def __init__(self, every_n_rounds: int = 1, clients: int | None = None, weighting: Weighting = "uniform") -> None:
        super().__init__(every_n_rounds, clients, weighting)
        self.last: GradientDissimilarities | None = None

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round_report: RoundReport) -> None:
        """Measure and log."""
        loop = trainer.fit_loop
        if not self.is_due(loop.round):
            return
        x = loop.state.x
        found = self.last = gradient_dissimilarity(
            (loop.full_gradient(i, x), self.weight(trainer, i)) for i in self.measured
        )
        values = {"G2": found.G2, "mean_square": found.mean_square, "norm": found.norm}
        if math.isfinite(found.B):
            values["B"] = found.B
        loop.log_round({f"gradient/{name}": value for name, value in values.items()})


class HessianDissimilarity(WeightedMeasure):
    r"""Measure how the clients' Hessians differ at the new server model, by Lanczos' iteration.

    For each client it estimates the eigenvalue of largest absolute value of
    :math:`\nabla^2 f_i(x) - \nabla^2 f(x)` from Hessian-vector products over all of its data. It logs
    ``hessian/delta``, the largest of their absolute values, the :math:`\delta` of SCAFFOLD's assumption (A2);
    ``hessian/delta_mean``, their mean; and ``hessian/residual``, the largest residual: an eigenvalue lies that close to
    each estimate. Papers: :func:`lightning_fed.metrics.hessian_dissimilarity`.

    With n clients measured it takes n Hessian-vector products in each of the iterations for each client, each at about
    twice the cost of a full-batch gradient: measure few clients, seldom. The model must be twice differentiable; under
    bf16 the estimates have that precision.

    Args:
        every_n_rounds: Measure after every so many rounds.
        clients: How many clients to measure, a fixed sample; :math:`f` is their mean. All by default.
        weighting: "uniform", as in SCAFFOLD, or "examples".
        tolerance: A residual that is small enough, as a share of the estimate.
        max_iterations: The most iterations for one client.

    Attributes:
        delta: The estimate for each client in the last measurement, with its sign.

    Raises:
        FederatedError: If an argument is not allowed, with a gradient scaler (precision 16-mixed), or if the model
            cannot be differentiated twice.
    """

    def __init__(
        self,
        every_n_rounds: int = 1,
        clients: int | None = None,
        weighting: Weighting = "uniform",
        tolerance: float = 1e-2,
        max_iterations: int = 30,
    ) -> None:
        super().__init__(every_n_rounds, clients, weighting)
        self.tolerance = check_fraction("HessianDissimilarity", "tolerance", tolerance)
        self.max_iterations = check_count(type(self).__name__, "max_iterations", max_iterations, least=1)
        self.delta: dict[ClientId, float] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse a precision in which second derivatives vanish, and settle which clients are measured."""
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise FederatedError(
                "HessianDissimilarity does not work with precision='16-mixed', in which second derivatives underflow."
                " Use bf16-mixed or 32-true."
            )
        super().on_train_start(trainer, pl_module)
        if (n := len(self.measured)) > _MANY:
            rank_zero_warn(
                f"HessianDissimilarity measures {n} clients, which takes up to {n**2 * self.max_iterations:,}"
                " Hessian-vector products each time. Set clients to measure fewer."
            )

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round_report: RoundReport) -> None:
        """Measure and log."""
        loop = trainer.fit_loop
        if not self.is_due(loop.round):
            return
        found = hessian_dissimilarity(
            [partial(loop.hessian_vector, i, loop.state.x) for i in self.measured],
            self._start(trainer, loop.state.x),
            [self.weight(trainer, i) for i in self.measured],
            self.tolerance,
            self.max_iterations,
        )
        self.delta = {i: eigenvalue.value for i, eigenvalue in zip(self.measured, found, strict=True)}
        sizes = [abs(eigenvalue.value) for eigenvalue in found]
        loop.log_round(
            {
                "hessian/delta": max(sizes),
                "hessian/delta_mean": sum(sizes) / len(sizes),
                "hessian/residual": max(eigenvalue.residual for eigenvalue in found),
            }
        )

    def _start(self, trainer: pl.Trainer, x: Vector) -> Vector:
        seed = derive_seed(trainer.fit_loop.state.seed, Purpose.MEASUREMENT)
        return torch.randn(len(x), generator=generator(seed, Purpose.TRAINING), dtype=x.dtype).to(x.device)
