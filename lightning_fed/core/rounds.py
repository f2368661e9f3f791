"""What a method may read and what it hands back: plain records of one step, one client's round and one cohort."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from lightning_fed.core.types import ClientId, Metrics, State, Vector

__all__ = ["AdvanceSolver", "ClientReport", "Cohort", "RoundReport", "Run", "Step", "Update"]


@dataclass(slots=True)
class Step:
    """What a method may read at one local step. Every vector has the shape of the gradient it is handed.

    A hook may be called with whole vectors [P], with one parameter's view of them, or with a cohort [S, P]: it must be
    elementwise and must not change anything in place.

    Attributes:
        x: The server parameters at the start of the round.
        server: The server state.
        client: This client's kept state.
        local: State that lives for this client's round only (:meth:`Algorithm.init_local`).
        anchor_grad: The gradient on the same batch at another point, if the method asked for one: at
            :attr:`Algorithm.anchor_at`, or where :meth:`Algorithm.second_gradient_at` says.
        full_grad: This client's full-batch gradients by point, as asked for in :attr:`Algorithm.full_grad_at`.
        cohort_grad: Their averages over the (gradient) cohort, by point.
        num_examples: The client's number of examples n_i.
        mean_examples: The mean of n_i over the clients that have examples.
        lr: The learning rate of the step; where groups have different ones, the parameter's own.
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
    """What a method may read after a client's last local step.

    Attributes:
        x: The server parameters [P] at the start of the round.
        delta: ``y - x``. Sending this very tensor lets the server keep the mean of ``y`` without rounding.
        server: The server state.
        client: This client's kept state, as it was before the round.
        local: The round-long local state after the last step.
        full_grad: This client's full-batch gradients by point.
        cohort_grad: Their averages over the (gradient) cohort, by point.
        num_examples: n_i.
        mean_examples: The mean of n_i over the clients that have examples.
        num_steps: The local steps taken, K_i.
        lr_sum: The sum of the learning rates over those steps (0-dim, or per coordinate [P] with several groups).
        path: Computes :attr:`path_gradient`.
        path_follows: Whether :attr:`path_gradient` is ``-delta / lr_sum`` with one number ``lr_sum``, as for plain SGD
            with one rate: the server can work it out from the other two.
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

        That is ``(x - y) / lr_sum`` for plain SGD; for every other local optimizer it is accumulated step by step.
        """
        return self.path()


@dataclass(slots=True)
class Update:
    """What a client hands back.

    Attributes:
        send: Its messages.
        keep: Its new kept state.
        implied: The names of messages that need not travel, since :meth:`Algorithm.implied` gives the very same from
            the others.
    """

    send: State
    keep: State = field(default_factory=dict)
    implied: tuple[str, ...] = ()


class AdvanceSolver(Protocol):
    """Advance the statistics of the user's optimizer by one gradient without moving any parameter."""

    def __call__(self, state: State, g: Vector, x: Vector) -> State:
        """Return the statistics after the optimizer has seen gradient ``g`` at ``x``."""
        ...


@dataclass(slots=True)
class Cohort:
    """What a method may read about the round on the server.

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
    """What one client did in a round; read-only.

    Attributes:
        client_id: The client's id.
        size: Its number of training examples.
        steps: The local steps it took, K_i.
        loss: The example-weighted mean of its training loss over the round.
        metrics: The example-weighted means of what its ``training_step`` logged.
        update_norm: The Euclidean norm of its model change.
        seconds: The wall time it took; on an accelerator, the time until its work was launched, where nobody reads the
            report before the round's end.
    """

    client_id: ClientId
    size: int
    steps: int
    loss: float
    metrics: Metrics
    update_norm: float
    seconds: float

    def __reduce__(self) -> tuple[Any, ...]:
        """Be pickled as a call, which takes a third of the time: processes exchange many of these."""
        own = (self.client_id, self.size, self.steps, self.loss, self.metrics, self.update_norm, self.seconds)
        return type(self), own


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What happened in a round; read-only.

    Attributes:
        round: The round, from 0.
        cohort: The ids of the clients that took part, in order.
        dropped: The ids of those drawn that were left out: too slow, lost, empty, or failed.
        sizes: Number of training examples by id.
        steps: Local steps by id.
        weights: Share in the average by id; they sum to one.
        metrics: Training metrics of the cohort, example-weighted.
        clients: Each client's own report by id.
        loss: The example-weighted mean training loss.
        update_norm: The Euclidean norm of the server's step.
        drift: How far the clients ended from their own mean: the square root of the weighted mean of
            ``||(y_i - x) - mean||^2``.
        bytes_up: Bytes sent by the clients.
        bytes_down: Bytes sent to the clients.
        seconds: Wall time of the round without validation.
        failed: Why each client that failed left the round, by id; with ``on_client_error="drop"``.
        gradients: Gradients of single examples that the clients computed: those of local steps, twice where the method
            takes a second one on every batch, and those of full-batch gradients.
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
