"""Inputs and outputs of a method's hooks: records of a step, a client's round and a cohort."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor

from lightning_fed.core.types import ClientId, Metrics, State, Vector


@dataclass(slots=True)
class Step:
    """The input of a method at one local step; every vector has the shape of the gradient.

    A hook may get whole vectors [P], one parameter's view of them, or a cohort [S, P]. It must be elementwise, and must
    not change anything in place.

    Attributes:
        x: The server parameters at the start of the round.
        server: The server state.
        client: This client's state.
        local: State of this client's round only (:meth:`Algorithm.init_local`).
        anchor_grad: The gradient on the same batch at another point, if requested: at :attr:`Algorithm.anchor_at`, or
            at the point of :meth:`Algorithm.second_gradient_at`.
        full_grad: This client's full-batch gradients by point, as requested in :attr:`Algorithm.full_grad_at`.
        cohort_grad: The averages of these over the (gradient) cohort, by point.
        num_examples: The client's number of examples n_i.
        mean_examples: The mean of n_i over the clients that have examples.
        lr: The learning rate of the step; with several groups, the rate of the parameter's group.
    """

    x: Vector
    server: State
    client: State
    local: State
    anchor_grad: Any
    full_grad: State
    cohort_grad: State
    num_examples: float | Tensor
    mean_examples: float | Tensor
    lr: float | Tensor


@dataclass(slots=True)
class Run:
    """The input of a method after a client's last local step.

    Attributes:
        x: The server parameters [P] at the start of the round.
        delta: ``y - x``. Sending this tensor object lets the server average ``y`` without rounding.
        server: The server state.
        client: This client's state before the round.
        local: The local state after the last step.
        full_grad: This client's full-batch gradients by point.
        cohort_grad: The averages of these over the (gradient) cohort, by point.
        num_examples: n_i.
        mean_examples: The mean of n_i over the clients that have examples.
        num_steps: The local steps taken, K_i; per coordinate [P] if several optimizers took different numbers.
        lr_sum: The sum of the learning rates over those steps (0-dim, or per coordinate [P] with several groups).
        path: Computes :attr:`path_gradient`.
        path_follows: Whether :attr:`path_gradient` is ``-delta / lr_sum`` with a scalar ``lr_sum``, as for plain SGD
            with one rate: the server can compute it from the other two.
    """

    x: Vector
    delta: Vector
    server: State
    client: State
    local: State
    full_grad: State
    cohort_grad: State
    num_examples: float | Tensor
    mean_examples: float | Tensor
    num_steps: int | Tensor
    lr_sum: float | Tensor
    path: Callable[[], Vector]
    path_follows: bool = False

    @property
    def path_gradient(self) -> Vector:
        """The mean corrected direction along the path, weighted by the learning rates.

        It is ``(x - y) / lr_sum`` for plain SGD, and accumulated step by step for any other local optimizer.
        """
        return self.path()


@dataclass(slots=True)
class Update:
    """A client's result of a round.

    Attributes:
        send: The messages.
        keep: The new client state.
        implied: The names of messages that are not sent, since :meth:`Algorithm.implied` computes them exactly from the
            others.
    """

    send: State
    keep: State = field(default_factory=dict)
    implied: tuple[str, ...] = ()


class AdvanceSolver(Protocol):
    """Advances the statistics of the user's optimizer by one gradient without changing parameters."""

    def __call__(self, state: State, g: Vector, x: Vector) -> State:
        """Return the statistics after the optimizer gets gradient ``g`` at ``x``."""
        ...


@dataclass(slots=True)
class Cohort:
    """The data of a round that a method may read on the server.

    Attributes:
        size: The number of distinct clients that completed, |S|.
        population: The number of clients in the population, N.
        round: The round, from 0.
        grad: The cohort's mean full-batch gradients by point.
        loss: The population loss at ``x`` if :attr:`Algorithm.population_loss` is set.
        advance_solver: See :class:`AdvanceSolver`; set when a method keeps the local optimizer's statistics.
    """

    size: int
    population: int
    round: int
    grad: State = field(default_factory=dict)
    loss: Tensor | None = None
    advance_solver: AdvanceSolver | None = None


@dataclass(frozen=True, slots=True)
class ClientReport:
    """A client's results in a round; read-only.

    Attributes:
        client_id: The client's id.
        size: The number of training examples.
        steps: The local steps taken, K_i.
        loss: The example-weighted mean training loss over the round.
        metrics: The example-weighted means of the values that ``training_step`` logged.
        update_norm: The Euclidean norm of the model's change.
        seconds: The wall time; on an accelerator, the time to launch the work, if nothing reads the report before the
            round's end.
    """

    client_id: ClientId
    size: int
    steps: int
    loss: float
    metrics: Metrics
    update_norm: float
    seconds: float

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a constructor call, in a third of the time: processes exchange many reports."""
        own = (self.client_id, self.size, self.steps, self.loss, self.metrics, self.update_norm, self.seconds)
        return type(self), own


@dataclass(frozen=True, slots=True)
class RoundReport:
    """The results of a round; read-only.

    Attributes:
        round: The round, from 0.
        cohort: The ids of the participating clients, in order.
        dropped: The ids of sampled clients that were left out: too slow, lost, empty, or failed.
        sizes: Number of training examples by id.
        steps: Local steps by id.
        weights: Weights in the average by id, which sum to one. They need not in the unbiased estimates of a sampler
            with ``probabilities`` and of :class:`lightning_fed.server.OptimalClientSampling`.
        metrics: The cohort's example-weighted training metrics.
        clients: Each client's report by id.
        loss: The example-weighted mean training loss.
        update_norm: The Euclidean norm of the server's step.
        drift: The spread of the client models around their mean: the square root of the weighted mean of
            ``||(y_i - x) - mean||^2``.
        bytes_up: Bytes sent by the clients.
        bytes_down: Bytes sent to the clients.
        seconds: Wall time of the round without validation.
        failed: The reason of each failed client by id; with ``on_client_error="drop"``.
        gradients: The number of per-example gradients in local steps and full-batch gradients. Local steps count twice
            if the method takes a second gradient on every batch.
    """

    round: int
    cohort: tuple[ClientId, ...]
    dropped: tuple[ClientId, ...]
    sizes: Mapping[ClientId, int]
    steps: Mapping[ClientId, int]
    weights: Mapping[ClientId, float]
    metrics: Metrics
    clients: Mapping[ClientId, ClientReport]
    loss: float
    update_norm: float
    drift: float
    bytes_up: int
    bytes_down: int
    seconds: float
    failed: Mapping[ClientId, str] = field(default_factory=dict)
    gradients: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy with plain dicts in place of read-only mappings, which Python cannot pickle."""
        values = [getattr(self, part.name) for part in fields(self)]
        return _read_only, tuple(dict(value) if isinstance(value, Mapping) else value for value in values)


def _read_only(*values: Any) -> RoundReport:
    shown: Any = (MappingProxyType(value) if isinstance(value, dict) else value for value in values)
    return RoundReport(*shown)
