"""Measures of a run: every n rounds, on all clients or some, with tables in the log directory."""

import csv
import math
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from lightning_fed.callbacks.base import FederatedCallback
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import rank_zero_warn
from lightning_fed.core.arguments import check_count, check_number, check_one_of
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import ClientReport, RoundReport
from lightning_fed.core.seeds import Purpose, derive_seed, generator
from lightning_fed.core.types import ClientId, Vector
from lightning_fed.metrics import GradientDissimilarities, gradient_dissimilarity, hessian_dissimilarity

Weighting: TypeAlias = Literal["uniform", "examples"]

_MANY = 30  # above this number of clients, Hessians take so long that a warning is due


def write_table(trainer: pl.Trainer, name: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table of this round to ``<name>/round_<completed rounds>.csv`` in the log directory, if there is one."""
    folder = trainer.log_dir if trainer.loggers and not trainer.fast_dev_run else None
    if folder is None or not trainer.is_global_zero:
        return
    path = Path(folder) / name / f"round_{trainer.fit_loop.round:06d}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


class Measure(FederatedCallback):
    """A callback that measures every n rounds and does not change the run.

    A subclass implements ``measure``.

    Args:
        every_n_rounds: Measure every n rounds.

    Attributes:
        tag: The name under which only this measure may log or write tables: a run with two such measures is refused.
            None disables the check.

    Raises:
        FederatedError: If the number is not positive.
    """

    tag: str | None = None

    def __init__(self, every_n_rounds: int = 1) -> None:
        self.every_n_rounds = check_count(self, "every_n_rounds", every_n_rounds, least=1)

    @property
    def written(self) -> dict[str, Any]:
        """The outputs by name. A run is refused if two measures write different outputs under one name."""
        return {} if self.tag is None else {self.tag: self}

    def is_due(self, completed: int) -> bool:
        """Return whether to measure after this number of completed rounds."""
        return completed % self.every_n_rounds == 0

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round_report: RoundReport) -> None:
        """Measure if it is due."""
        if self.is_due(trainer.fit_loop.round):
            self.measure(trainer)

    def measure(self, trainer: pl.Trainer) -> None:
        """Measure and log."""


class ClientMeasure(Measure):
    """A measure taken at the new server model on all clients, or on a fixed sample of them.

    Args:
        every_n_rounds: Measure every n rounds.
        clients: How many clients to measure: a sample drawn with the run's seed, the same in every round and for every
            measure. All of them by default. Clients without examples are left out.

    Raises:
        FederatedError: If a number is not positive, there are fewer clients than requested, or none has examples.
    """

    def __init__(self, every_n_rounds: int = 1, clients: int | None = None) -> None:
        super().__init__(every_n_rounds)
        self.clients = None if clients is None else check_count(self, "clients", clients, least=1)
        self.measured: list[ClientId] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Choose the clients to measure."""
        population = trainer.fit_loop.population
        wanted = len(population) if self.clients is None else self.clients
        if wanted > len(population):
            raise FederatedError(
                f"{type(self).__name__}(clients={wanted}) asks for more clients than the {len(population)} non-empty"
                " ones there are. Pass at most that many, or leave clients unset for all."
            )
        places: Sequence[int] = range(len(population))
        if self.clients is not None:
            seed = derive_seed(trainer.fit_loop.state.seed, Purpose.MEASUREMENT)
            places = torch.randperm(len(population), generator=generator(seed, Purpose.COHORT)).tolist()
        fit = (index for index in places if self.can_measure(trainer, population[index]))
        self.measured = [population[index] for index in sorted(islice(fit, wanted))]
        if not self.measured:
            raise self.refusal()
        if len(self.measured) < wanted:
            rank_zero_warn(
                f"{type(self).__name__}: {len(self.measured)} of {wanted} clients have {self.needs}; they are measured."
            )

    @property
    def needs(self) -> str:
        """The condition for a client to be measured, in words."""
        return "training examples"

    def refusal(self) -> FederatedError:
        """Return the error that no client can be measured."""
        return FederatedError(f"{type(self).__name__} has no client to measure: none has {self.needs}.")

    def can_measure(self, trainer: pl.Trainer, client_id: ClientId) -> bool:
        """Return whether a client can be measured; a client built on demand may turn out to be empty."""
        return bool(trainer.fit_loop.population.size(client_id) > 0)


class WeightedMeasure(ClientMeasure):
    """A measure that averages over clients, uniformly or weighted by their numbers of examples."""

    def __init__(self, every_n_rounds: int, clients: int | None, weighting: Weighting) -> None:
        super().__init__(every_n_rounds, clients)
        self.weighting = check_one_of(self, "weighting", weighting, ("uniform", "examples"))

    def weight(self, trainer: pl.Trainer, client_id: ClientId) -> float:
        """Return the weight of a client for averaging."""
        return 1.0 if self.weighting == "uniform" else float(trainer.fit_loop.population.size(client_id))


class TrainingLoss(WeightedMeasure):
    r"""Measure the clients' training loss at the new server model.

    It logs ``population/train_loss``, :math:`f(x) = \sum_i w_i f_i(x)`. Here, :math:`f_i` is the mean loss of
    ``training_step`` over all training examples of a client, in eval mode and without augmentation. With weights by
    examples, it is the loss in the figures of Li et al., *Federated Optimization in Heterogeneous Networks* (FedProx),
    MLSys 2020 (https://arxiv.org/abs/1812.06127). A ``train_loss`` that the module logs differs: it is the loss of the
    cohort's batches during training.

    It costs a forward pass over the data of each client.

    Args:
        every_n_rounds: Measure every n rounds.
        clients: How many clients to measure, a fixed sample; :math:`f` is their mean. All by default.
        weighting: "examples", :math:`w_i \propto n_i`, or "uniform".

    Raises:
        FederatedError: If an argument is not allowed, or there are fewer clients than requested.
    """

    tag = "population/train_loss"
    needs_loss = True

    def __init__(self, every_n_rounds: int = 1, clients: int | None = None, weighting: Weighting = "examples") -> None:
        super().__init__(every_n_rounds, clients, weighting)

    def measure(self, trainer: pl.Trainer) -> None:
        """Measure and log."""
        loop = trainer.fit_loop
        losses = loop.training_losses(self.measured)
        weights = {i: self.weight(trainer, i) for i in losses}
        if weights:  # empty if no site has answered
            total = sum(weights[i] * losses[i] for i in losses)
            loop.log_round({"population/train_loss": total / sum(weights.values())})


class Inexactness(FederatedCallback):
    r"""Measure the inexactness gamma of every client's local solution.

    Definition 2 of Li et al., *Federated Optimization in Heterogeneous Networks* (FedProx), MLSys 2020
    (https://arxiv.org/abs/1812.06127): the smallest :math:`\gamma` with

    .. math::
        \|\nabla F_i(y_i) + \mu (y_i - x)\| \le \gamma\, \|\nabla F_i(x)\|

    0 is an exact solution of the proximal problem, 1 no progress. It takes two full-batch gradients per client and
    round, in train mode. :math:`\mu` is FedProx's, even if it adapts, and 0 for other methods. The mean over the
    cohort is logged as ``client/gamma``, the largest value as ``client/gamma_max``.

    Attributes:
        gamma: The values of the last round by client id.
    """

    needs_loss = True

    def __init__(self) -> None:
        self.gamma: dict[ClientId, float] = {}

    def on_round_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round: int) -> None:
        """Start a new round."""
        self.gamma = {}

    def on_round_restart(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round: int) -> None:
        """Restart the round through ``on_round_start``, which a subclass may override."""
        self.on_round_start(trainer, pl_module, round)

    def on_client_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, client_report: ClientReport) -> None:
        """Measure one client."""
        loop = trainer.fit_loop
        held = loop.client_model
        if held is None or client_report.steps == 0:
            return
        x, (y, _), i = loop.state.x, held, client_report.client_id
        mu = loop.round_state.get("mu", torch.zeros((), device=x.device))
        residual = torch.linalg.vector_norm(loop.full_gradient(i, y) + mu * (y - x))
        self.gamma[i] = float(residual / torch.linalg.vector_norm(loop.full_gradient(i, x)))

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round_report: RoundReport) -> None:
        """Log the cohort's values."""
        self.gamma = {i: value for part in trainer.fit_loop.gather(self.gamma) for i, value in part.items()}
        values = [value for value in self.gamma.values() if math.isfinite(value)]
        if values:
            trainer.fit_loop.log_round({"client/gamma": sum(values) / len(values), "client/gamma_max": max(values)})


class ControlVariateError(ClientMeasure):
    r"""Measure how far the clients' control variates are from their true gradients at the new server model.

    SCAFFOLD (Karimireddy et al., 2020, https://arxiv.org/abs/1910.06378) corrects a client's steps by :math:`c - c_i`,
    which would be exact with :math:`c_i = \nabla f_i(x)` and :math:`c = \nabla f(x)`. This logs ``control/error``, the
    mean over the clients of :math:`\|c_i - \nabla f_i(x)\|`, and ``control/relative_error``,
    :math:`\sqrt{\sum_i \|c_i - \nabla f_i(x)\|^2 / \sum_i \|\nabla f_i(x)\|^2}`, which is 1 while every c_i is 0. If
    all clients are measured, it also logs ``control/server_error``, :math:`\|c - \nabla f(x)\|` where f is the mean of
    the clients' losses. It costs one pass over the data of each client measured.

    It works for every method whose clients keep a ``c_i``; ``control/server_error`` needs a server state ``c``.

    Args:
        every_n_rounds: Measure every n rounds.
        clients: How many clients to measure, a fixed sample; all by default.

    Attributes:
        errors: The distance by client id in the last measurement.

    Raises:
        FederatedError: If an argument is not allowed, or the method keeps no ``c_i``.
    """

    tag = "control"
    needs_loss = True

    def __init__(self, every_n_rounds: int = 1, clients: int | None = None) -> None:
        super().__init__(every_n_rounds, clients)
        self.errors: dict[ClientId, float] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse a method without control variates, and choose the clients to measure."""
        state = trainer.fit_loop.state
        if "c_i" not in state.algorithm.init_client(state.x):
            raise FederatedError(
                f"ControlVariateError needs a method whose clients keep a control variate c_i, such as Scaffold; found"
                f" {state.algorithm!r}. Remove the callback."
            )
        super().on_train_start(trainer, pl_module)

    def measure(self, trainer: pl.Trainer) -> None:
        """Measure and log."""
        loop = trainer.fit_loop
        x, mean, squares = loop.state.x, torch.zeros_like(loop.state.x), 0.0
        errors = {}
        for i in self.measured:
            g = loop.full_gradient(i, x)
            mean.add_(g, alpha=1 / len(self.measured))
            squares += float(g.dot(g))
            if (kept := loop.client_state(i)) is not None:
                errors[i] = float(torch.linalg.vector_norm(kept["c_i"] - g))
        parts = loop.gather(errors)
        self.errors = {i: part[i] for i in self.measured for part in parts if i in part}
        missed = sum(error**2 for error in self.errors.values())
        values = {"control/error": sum(self.errors.values()) / len(self.errors)}
        if squares:
            values["control/relative_error"] = (missed / squares) ** 0.5
        if self.clients is None and "c" in loop.server:
            values["control/server_error"] = float(torch.linalg.vector_norm(loop.server["c"] - mean))
        loop.log_round(values)


class GradientDissimilarity(WeightedMeasure):
    r"""Measure how the clients' full-batch gradients differ at the new server model.

    It logs ``gradient/G2``, :math:`\mathbb{E}_i \|\nabla f_i - \nabla f\|^2`, which is Mime's :math:`G^2` and FedProx's
    variance of local gradients. ``gradient/mean_square`` is :math:`\mathbb{E}_i \|\nabla f_i\|^2`, which SCAFFOLD
    bounds. ``gradient/B`` is the B of FedProx's Definition 3, if finite. ``gradient/norm`` is
    :math:`\|\nabla f\|`. Papers and assumptions: :func:`lightning_fed.metrics.gradient_dissimilarity`.

    The means are over the clients measured, and :math:`f` is their mean. It costs one pass over the data of each.

    Args:
        every_n_rounds: Measure every n rounds.
        clients: How many clients to measure, a fixed sample; all by default.
        weighting: "uniform", as SCAFFOLD and Mime write :math:`\mathbb{E}_i`, or "examples", as FedProx does.

    Attributes:
        last: The last measurement.

    Raises:
        FederatedError: If an argument is not allowed.
    """

    tag = "gradient"
    needs_loss = True

    def __init__(self, every_n_rounds: int = 1, clients: int | None = None, weighting: Weighting = "uniform") -> None:
        super().__init__(every_n_rounds, clients, weighting)
        self.last: GradientDissimilarities | None = None

    def measure(self, trainer: pl.Trainer) -> None:
        """Measure and log."""
        loop = trainer.fit_loop
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

    For each client it estimates the eigenvalue of largest absolute value of :math:`\nabla^2 f_i(x) - \nabla^2 f(x)`
    from Hessian-vector products over all of its data. It logs ``hessian/delta``, the largest of their absolute values,
    the :math:`\delta` of SCAFFOLD's assumption (A2), and ``hessian/delta_mean``, their mean. ``hessian/residual`` is
    the largest residual: an eigenvalue lies that close to each estimate. Papers:
    :func:`lightning_fed.metrics.hessian_dissimilarity`.

    With n clients, every iteration for a client takes n Hessian-vector products, each at about twice the cost of a
    full-batch gradient. So measure few clients, rarely. The model must be twice differentiable; under
    bf16 the estimates have that precision.

    Args:
        every_n_rounds: Measure every n rounds.
        clients: How many clients to measure, a fixed sample; :math:`f` is their mean. All by default.
        weighting: "uniform", as in SCAFFOLD, or "examples".
        tolerance: Stop when the residual is at most this share of the estimate.
        max_iterations: The largest number of iterations for one client.

    Attributes:
        delta: The estimate for each client in the last measurement, with its sign.

    Raises:
        FederatedError: If an argument is not allowed, with a gradient scaler (precision 16-mixed), or if the model
            cannot be differentiated twice.
    """

    tag = "hessian"
    needs_loss = True

    def __init__(
        self,
        every_n_rounds: int = 1,
        clients: int | None = None,
        weighting: Weighting = "uniform",
        tolerance: float = 1e-2,
        max_iterations: int = 30,
    ) -> None:
        super().__init__(every_n_rounds, clients, weighting)
        self.tolerance = check_number("HessianDissimilarity", "tolerance", tolerance, "[0, 1)")
        self.max_iterations = check_count(self, "max_iterations", max_iterations, least=1)
        self.delta: dict[ClientId, float] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse a precision in which second derivatives underflow, and choose the clients to measure."""
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

    def measure(self, trainer: pl.Trainer) -> None:
        """Measure and log."""
        loop = trainer.fit_loop
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
