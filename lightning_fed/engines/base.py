"""The interface of engines: their inputs and results, and gradients without side effects."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torchmetrics import Metric

from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.flat import Layout
from lightning_fed.core.rounds import ClientReport, Step
from lightning_fed.core.seeds import Purpose, derive_seed, generator, seed_global
from lightning_fed.core.tracked_state import TrackedState
from lightning_fed.core.types import State, Vector
from lightning_fed.data.batches.batches import ClientBatches
from lightning_fed.engines.batch_hooks import has_transfer_hooks
from lightning_fed.engines.changes import copy_state, metric_state
from lightning_fed.engines.client_errors import FULL_GRADIENT, NamesClient
from lightning_fed.engines.gradients import GradientPass
from lightning_fed.engines.prepared import PreparedModule
from lightning_fed.server.client_states.store import clone_rows
from lightning_fed.server.participation import Participant


class OnlySequentialError(FederatedError):
    """The vectorized engine cannot run these clients, but the sequential engine can."""


def changed_since_trial(
    module: object, what: str, remedy: str = "Change that", kind: type[FederatedError] = OnlySequentialError
) -> FederatedError:
    """Return the error for a step that now does something that the vectorized engine does not support."""
    return kind(
        f"engine='vectorized' cannot continue with {type(module).__name__}.training_step: it {what}, and did not in its"
        f" trial step. {remedy}, or use engine='sequential'."
    )


class Restart(NamedTuple):
    """The restart of a round that an engine could not run."""

    reason: str
    # the number of clients that the vectorized engine then runs at once; None for the sequential engine
    chunk_size: int | None = None


@dataclass(frozen=True, slots=True)
class WorkPlan:
    """One client's work in a round."""

    participant: Participant
    batches: ClientBatches  # the client's batches
    epochs: tuple[int, ...]  # the number of batches to train on in each local epoch


@dataclass(frozen=True, slots=True)
class RoundInputs:
    """The server's inputs to all clients of a round."""

    round: int  # the round, from 0
    x: Vector
    server: TrackedState
    full_grad: dict[int, State]  # full-batch gradients by client index, then by point
    cohort_grad: TrackedState  # the averages of these over the cohort, by point
    mean_examples: float  # the mean of n_i over the clients that have examples if the method may read it, else nan


def per_parameter(whole: Step, layout: Layout) -> list[Step]:
    """Return the inputs of ``correct``, one :class:`Step` per parameter; reads of server parts are tracked."""
    assert isinstance(whole.server, TrackedState)
    assert isinstance(whole.cohort_grad, TrackedState)
    servers = layout.state_views(whole.server.untracked())
    cohort_grads = layout.state_views(whole.cohort_grad.untracked())
    # entries read for the first parameter are read for all
    servers[0] = TrackedState(servers[0], whole.server.read)
    cohort_grads[0] = TrackedState(cohort_grads[0], whole.cohort_grad.read)
    rates = layout.state_views({"lr": whole.lr}) if isinstance(whole.lr, Tensor) else [{"lr": whole.lr}] * len(servers)
    columns = zip(
        layout.views(whole.x),
        servers,
        layout.state_views(whole.client),
        layout.state_views(whole.local),
        layout.state_views(whole.full_grad),
        cohort_grads,
        rates,
        strict=True,
    )
    return [
        Step(x, server, client, local, None, full_grad, mean, whole.num_examples, whole.mean_examples, rate["lr"])
        for x, server, client, local, full_grad, mean, rate in columns
    ]


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """The results of S clients; the tensors are valid until the next chunk starts."""

    participants: Sequence[Participant]  # the clients, in the order of the rows
    y: Tensor  # the clients' final parameters [S, P + Q], personal ones last
    delta: Tensor  # the changes of the exchanged parameters [S, P]
    send: State  # the clients' messages [S, ...]
    keep: State  # the clients' new states [S, ...]
    sends_delta: bool  # whether the message "delta" is `delta` itself
    reports: Sequence[ClientReport]  # the clients' reports
    asked: Sequence[int]  # the rows in the order in which the clients were requested
    solver: Sequence[State] = field(default_factory=list)  # the local optimizer's states that clients keep, if any
    # the module's buffers after each client's work; empty if no client changes any
    buffers: Sequence[State] = field(default_factory=list)
    # clients' errors by row; the results of these clients must not be used
    faults: Mapping[int, ClientError] = field(default_factory=dict)
    implied: tuple[str, ...] = ()  # the names of messages that are not sent

    @property
    def shared(self) -> Tensor:
        """The exchanged part of :attr:`y` [S, P]."""
        return self.y[:, : self.delta.shape[1]]

    def new_states(self) -> list[State]:
        """Return a copy of each client's new state that does not share memory with the chunk."""
        columns = zip(*map(clone_rows, self.keep.values()), strict=True)
        return [dict(zip(self.keep, row, strict=True)) for row in columns] or [{} for _ in self.reports]


class Engine(ABC):
    """Runs the clients of a round on the trainer's module."""

    def __init__(self, prepared: PreparedModule) -> None:
        self.prepared, self.trainer, self.algorithm = prepared, prepared.trainer, prepared.algorithm
        self.flat, self.optimizer, self.buffers = prepared.flat, prepared.optimizer, prepared.buffers
        self.data = prepared.data
        self.seed, self.shuffle, self.keeps_solver = prepared.seed, prepared.shuffle, prepared.keeps_solver
        self.gradients, self.split = GradientPass(self.trainer, self.flat, prepared.buffers.owners), prepared.split
        self._has_transfer_hooks = has_transfer_hooks(self.trainer)

    @abstractmethod
    def chunks(self, plans: Sequence[WorkPlan]) -> Iterator[Sequence[WorkPlan]]:
        """Yield the clients that run together, in the cohort's order."""

    @abstractmethod
    def run(
        self, inputs: RoundInputs, plans: Sequence[WorkPlan], clients: Sequence[State], solvers: Sequence[State]
    ) -> ChunkResult:
        """Train the clients of a chunk and return their results.

        Args:
            inputs: The server's inputs.
            plans: The clients' work.
            clients: The clients' states.
            solvers: The local optimizer's states that clients keep, empty if none.

        Raises:
            ClientError: If a client's work fails; the cause is ``__cause__``.
        """

    @property
    def current_parameters(self) -> Vector:
        """The parameters [P] of the client whose hooks are running."""
        return self.flat.y

    name: str
    """The engine's name in the trainer's argument ``engine``."""

    shares_settings = False
    """Whether clients train together and share all settings, so that hooks cannot change any for one client."""

    less_memory = ""
    """An extra remedy in the error for a client that does not fit a device."""

    reads_later: bool = False
    """Whether :meth:`end_round` fills in the numbers of reports, since each read waits for an accelerator. It then
    raises the errors of clients with non-finite numbers."""

    def begin_round(self, plans: Sequence[WorkPlan]) -> None:  # noqa: B027
        """Prepare for a round before any client runs, and recheck settings that callbacks may have changed."""

    def show(self, x: Vector, personal: Vector, buffers: State) -> None:
        """Load a client's initial model into the module, for the client's hooks."""
        self.flat.bind()
        self.flat.y.copy_(x)
        self.flat.personal.copy_(personal)
        self.buffers.write(buffers)

    def bind(self, result: ChunkResult, row: int) -> None:  # noqa: B027
        """Bind :attr:`current_parameters` to one client of a chunk, while its hooks run."""

    def end_round(self) -> None:  # noqa: B027
        """Finish the work that this process does once for all of its clients."""

    def each_full_gradients(
        self, inputs: RoundInputs, plans: Sequence[WorkPlan]
    ) -> Iterator[tuple[WorkPlan, State | ClientError]]:
        """Yield each client's full-batch gradients, or its error, one client after another."""
        for plan in plans:
            try:
                yield plan, self.full_gradients(inputs, plan)
            except ClientError as error:
                yield plan, error

    def full_gradients(self, inputs: RoundInputs, plan: WorkPlan) -> State:
        """Return a client's full-batch gradients at the method's points, before local work."""
        grads = {}
        with self.errors_of(plan, inputs.round, FULL_GRADIENT):
            for name in self.algorithm.full_grad_at:
                self.trainer._signal_connector.check()
                point = inputs.x if name == "x" else inputs.server[name]
                grads[name] = self.gradient_at(point, plan.batches, inputs.round, plan.participant.index)
        return grads

    def to_device(self, batches: ClientBatches) -> ClientBatches:
        """Return a client's batches, from copies on the device unless transfer hooks must see each batch."""
        return batches if self._has_transfer_hooks else self.data.to_device(batches)

    def gradient_at(self, point: Vector, batches: ClientBatches, round: int, index: int) -> Vector:
        """Return a client's full-batch gradient [P] at a point [P]; random layers use their own stream."""
        all_batches = self._full_batches(batches, round, index)
        return self.gradients.full(point, all_batches, batches.size, self.optimizer.decay)

    def hessian_vector_at(
        self, point: Vector, vector: Vector, batches: ClientBatches, round: int, index: int
    ) -> Vector:
        """Return a client's full-batch Hessian at a point [P] times a vector [P], like :meth:`gradient_at`."""
        all_batches = self._full_batches(batches, round, index)
        return self.gradients.hessian_vector(point, vector, all_batches, batches.size, self.optimizer.decay)

    def _full_batches(self, batches: ClientBatches, round: int, index: int) -> Iterator[tuple[Any, int]]:
        seed_global(self.split.seed(derive_seed(self.seed, Purpose.FULL_GRADIENT, round, index)), self.flat.y.device)
        self._begin_pass(batches)
        return self.to_device(batches).full(generator(self.seed, Purpose.FULL_GRADIENT, round, index))

    @contextmanager
    def losses_at(self, point: Vector, round: int) -> Iterator[Callable[[ClientBatches, int], float]]:
        """Yield a function from a client's batches and index to the loss at a point [P], summed over examples.

        See :meth:`GradientPass.losses`; each client has its own random stream.
        """
        with self.gradients.losses(point) as loss_of:

            def of_client(batches: ClientBatches, index: int) -> float:
                seed = derive_seed(self.seed, Purpose.FULL_GRADIENT, round, index)
                stream = generator(self.seed, Purpose.FULL_GRADIENT, round, index)
                self._begin_pass(batches)
                return loss_of(self.to_device(batches).unaugmented(stream), self.split.seed(seed))

            yield of_client

    def _begin_pass(self, batches: ClientBatches) -> None:
        """Set the trainer's progress, so that ``training_step`` does not read the values of the last client."""
        loop: Any = self.trainer.fit_loop
        loop.max_batches, loop.epoch_loop.batch_progress.is_last_batch = batches.num_batches(), False

    def errors_of(self, plan: WorkPlan, round: int, what: str) -> NamesClient:
        """Add the client, the round and the local step to any error inside."""
        who = plan.participant
        return NamesClient(who.client_id, round, what, self.abandon, self.less_memory, who.steps)

    def abandon(self) -> int | None:
        """End the local work of a failed client; return its number of local steps, or None if it had not begun."""
        work, self.optimizer.work = self.optimizer.work, None
        if self.optimizer.schedule is not None:
            self.optimizer.schedule.rest()
        return None if work is None else work.num_steps

    def savepoint(self) -> Callable[[], None]:
        """Return a function that undoes later logging of clients, and cleans up after a failed client."""
        module, results = self.trainer.lightning_module, self.trainer.fit_loop.epoch_loop._results
        undo_results, hook = results.savepoint(), module._current_fx_name
        metrics = [(metric, metric_state(metric)) for metric in module.modules() if isinstance(metric, Metric)]

        def undo() -> None:
            undo_results()
            module._current_fx_name = hook
            for metric, state in metrics:
                vars(metric).update(copy_state(state))
            for p in self.flat.params:
                p.grad = None

        return undo
