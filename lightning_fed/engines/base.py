"""What every engine shares: what the server hands out, what comes back, and gradients that leave no trace."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor
from torchmetrics import Metric

from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.flat import Layout
from lightning_fed.core.rounds import ClientReport, Step
from lightning_fed.core.seeds import Purpose, derive_seed, generator, seed_global
from lightning_fed.core.tracked_state import TrackedState
from lightning_fed.core.types import ClientId, State, Vector
from lightning_fed.data.batches.batches import ClientBatches
from lightning_fed.engines.batch_hooks import has_transfer_hooks
from lightning_fed.engines.client_errors import NamesClient
from lightning_fed.engines.gradients import GradientPass
from lightning_fed.engines.prepared import PreparedModule
from lightning_fed.server.client_states.store import clone_rows
from lightning_fed.server.participation import Participant

__all__ = [
    "ChunkResult",
    "Engine",
    "OnlySequentialError",
    "Restart",
    "RoundInputs",
    "WorkPlan",
    "per_parameter",
]


_METRIC_COUNTS = ("_update_count", "_computed", "_forward_cache")  # what a metric object has seen, beside its state


class OnlySequentialError(FederatedError):
    """The vectorized engine cannot run these clients, and the sequential engine can."""


class Restart(NamedTuple):
    """How a round starts again that an engine could not run.

    Attributes:
        reason: Why.
        chunk_size: How many clients the vectorized engine runs at once from then on. None if the sequential engine
            takes its place.
    """

    reason: str
    chunk_size: int | None = None


@dataclass(frozen=True, slots=True)
class WorkPlan:
    """One client's work in a round.

    Attributes:
        participant: Who.
        batches: Its data.
        epochs: Batches to train on in each local epoch.
    """

    participant: Participant
    batches: ClientBatches
    epochs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RoundInputs:
    """What the server hands to every client of a round.

    Attributes:
        round: The round, from 0.
        x: The server parameters [P].
        server: The server state.
        full_grad: Full-batch gradients by client index, then by point.
        cohort_grad: Their averages by point.
        mean_examples: The mean of n_i over the clients that have examples, where the method may ask for it, else nan.
    """

    round: int
    x: Vector
    server: TrackedState
    full_grad: dict[int, State]
    cohort_grad: TrackedState
    mean_examples: float


def per_parameter(whole: Step, layout: Layout) -> list[Step]:
    """Return what ``correct`` reads, one :class:`Step` per parameter; reads of the server's parts are tracked."""
    assert isinstance(whole.server, TrackedState)
    assert isinstance(whole.cohort_grad, TrackedState)
    servers = layout.state_views(whole.server.untracked())
    cohort_grads = layout.state_views(whole.cohort_grad.untracked())
    # what is read of the first parameter's part is read of all
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
    """What came back from S clients; the tensors are valid until the next chunk starts.

    Attributes:
        participants: Who, in the order of the rows.
        y: The parameters that each ended with [S, P + Q], personal ones last.
        delta: The changes of those that are exchanged [S, P].
        send: Their messages [S, ...].
        keep: Their new kept states [S, ...].
        sends_delta: Whether the message "delta" is :attr:`delta` itself.
        reports: What each did.
        asked: The rows in the order in which the clients were asked for.
        solver: The local optimizer's states that they keep, if they do.
        buffers: The module's buffers after each client's work; none where no client changes any.
        faults: What is wrong with the clients of some rows, of which nothing may be used.
        implied: The names of messages that need not travel.
    """

    participants: Sequence[Participant]
    y: Tensor
    delta: Tensor
    send: State
    keep: State
    sends_delta: bool
    reports: Sequence[ClientReport]
    asked: Sequence[int]
    solver: Sequence[State] = field(default_factory=list)
    buffers: Sequence[State] = field(default_factory=list)
    faults: Mapping[int, ClientError] = field(default_factory=dict)
    implied: tuple[str, ...] = ()

    @property
    def shared(self) -> Tensor:
        """The part of :attr:`y` that is exchanged [S, P]."""
        return self.y[:, : self.delta.shape[1]]

    def kept(self) -> list[State]:
        """Return copies of what each client keeps, so that none holds on to the whole chunk."""
        columns = zip(*map(clone_rows, self.keep.values()), strict=True)
        return [dict(zip(self.keep, row, strict=True)) for row in columns] or [{} for _ in self.reports]


class Engine(ABC):
    """Run the clients of a round on the trainer's own module."""

    def __init__(self, prepared: PreparedModule) -> None:
        self.prepared, self.trainer, self.algorithm = prepared, prepared.trainer, prepared.algorithm
        self.flat, self.optimizer, self.buffers = prepared.flat, prepared.optimizer, prepared.buffers
        self.data = prepared.data
        self.seed, self.shuffle, self.keeps_solver = prepared.seed, prepared.shuffle, prepared.keeps_solver
        self.gradients, self.split = GradientPass(self.trainer, self.flat), prepared.split
        self._has_transfer_hooks = has_transfer_hooks(self.trainer)
        self._metrics = [m for m in self.trainer.lightning_module.modules() if isinstance(m, Metric)]

    @abstractmethod
    def chunks(self, plans: Sequence[WorkPlan]) -> Iterator[Sequence[WorkPlan]]:
        """Yield the clients that are run together, in the cohort's order."""

    @abstractmethod
    def run(
        self, inputs: RoundInputs, plans: Sequence[WorkPlan], clients: Sequence[State], solvers: Sequence[State]
    ) -> ChunkResult:
        """Train the clients of a chunk and return what they send.

        Args:
            inputs: What the server hands out.
            plans: The clients' work.
            clients: Their kept states.
            solvers: The local optimizer's states that they kept, empty if they keep none.

        Raises:
            ClientError: If anything goes wrong in a client's work; the cause is ``__cause__``.
        """

    @property
    def parameters_at_work(self) -> Vector:
        """The parameters [P] of the client whose hooks are called."""
        return self.flat.y

    name: str
    """What the trainer's argument ``engine`` calls it."""

    less_memory = ""
    """What the error of a client that does not fit a device adds to its remedies."""

    reads_later: bool = False
    """Whether the numbers in reports may be filled in by :meth:`end_round`, which then raises the errors of clients
    whose numbers are not finite: each read waits for an accelerator."""

    def begin_round(self, plans: Sequence[WorkPlan]) -> None:  # noqa: B027
        """Look at what may have changed since the last round, before this process's clients do anything in this one."""

    def client_started(self, client_id: ClientId) -> None:  # noqa: B027
        """Look at what ``on_client_start`` has set, right after it was called for a client."""

    def check_hooks(self, plans: Sequence[WorkPlan]) -> None:  # noqa: B027
        """Look at what hooks of clients have set, before the clients of a chunk work."""

    def client_ended(self, client_id: ClientId) -> None:  # noqa: B027
        """Look at what ``on_client_end`` has set, if other clients were trained together with this one."""

    def point_to(self, result: ChunkResult, row: int) -> None:  # noqa: B027
        """Let :attr:`parameters_at_work` be those of one client of a chunk, while its hooks are called."""

    def end_round(self) -> None:  # noqa: B027
        """Finish what is done once for all of this process's clients."""

    def each_full_gradients(
        self, inputs: RoundInputs, plans: Sequence[WorkPlan]
    ) -> Iterator[tuple[WorkPlan, State | ClientError]]:
        """Yield the full-batch gradients of clients one after the other, or why a client has none."""
        for plan in plans:
            try:
                yield plan, self.full_gradients(inputs, plan)
            except ClientError as error:
                yield plan, error

    def full_gradients(self, inputs: RoundInputs, plan: WorkPlan) -> State:
        """Return a client's full-batch gradients at the points that the method names, before any local work."""
        grads = {}
        with self.errors_of(plan, inputs.round, "its full-batch gradient"):
            for name in self.algorithm.full_grad_at:
                self.trainer._signal_connector.check()
                point = inputs.x if name == "x" else inputs.server[name]
                grads[name] = self.gradient_at(point, plan.batches, inputs.round, plan.participant.index)
        return grads

    def placed(self, batches: ClientBatches) -> ClientBatches:
        """Return a client's batches, from copies on the device unless hooks must see each on its way there."""
        return batches if self._has_transfer_hooks else self.data.placed(batches)

    def gradient_at(self, point: Vector, batches: ClientBatches, round: int, index: int) -> Vector:
        """Return a client's full-batch gradient [P] at a point [P]; random layers draw from a stream of its own."""
        seed_global(self.split.seed(derive_seed(self.seed, Purpose.FULL_GRADIENT, round, index)), self.flat.y.device)
        stream = generator(self.seed, Purpose.FULL_GRADIENT, round, index)
        return self.gradients.full(point, self.placed(batches).full(stream), batches.size, self.optimizer.decay)

    def hessian_vector_at(
        self, point: Vector, vector: Vector, batches: ClientBatches, round: int, index: int
    ) -> Vector:
        """Return a client's full-batch Hessian at a point [P] times a vector [P]; randomness as :meth:`gradient_at`."""
        seed_global(self.split.seed(derive_seed(self.seed, Purpose.FULL_GRADIENT, round, index)), self.flat.y.device)
        stream = generator(self.seed, Purpose.FULL_GRADIENT, round, index)
        return self.gradients.hessian_vector(
            point, vector, self.placed(batches).full(stream), batches.size, self.optimizer.decay
        )

    @contextmanager
    def losses_at(self, point: Vector, round: int) -> Iterator[Callable[[ClientBatches, int], float]]:
        """Give a function from a client's batches and index to the sum of the loss over its examples at a point [P].

        See :meth:`GradientPass.losses`; each client has its own random stream.
        """
        with self.gradients.losses(point) as loss_of:

            def of_client(batches: ClientBatches, index: int) -> float:
                seed = derive_seed(self.seed, Purpose.FULL_GRADIENT, round, index)
                stream = generator(self.seed, Purpose.FULL_GRADIENT, round, index)
                return loss_of(self.placed(batches).unaugmented(stream), self.split.seed(seed))

            yield of_client

    def errors_of(self, plan: WorkPlan, round: int, what: str) -> NamesClient:
        """Put the client, the round and the local step in front of whatever goes wrong inside."""
        return NamesClient(plan.participant.client_id, round, what, self.abandon, self.less_memory)

    def abandon(self) -> int | None:
        """End the local work of a client that failed; return the local steps it had taken, None if it was at none."""
        work, self.optimizer.work = self.optimizer.work, None
        return None if work is None else work.num_steps

    def savepoint(self) -> Callable[[], None]:
        """Return a function that takes back what clients log from here on, and tidies up after one that failed."""
        module, results = self.trainer.lightning_module, self.trainer.fit_loop.epoch_loop._results
        undo_results, hook = results.savepoint(), module._current_fx_name
        metrics = [
            (metric, copy.deepcopy({name: vars(metric)[name] for name in (*metric.metric_state, *_METRIC_COUNTS)}))
            for metric in self._metrics
        ]

        def undo() -> None:
            undo_results()
            module._current_fx_name = hook
            for metric, state in metrics:
                vars(metric).update(copy.deepcopy(state))
            for p in self.flat.params:
                p.grad = None

        return undo
