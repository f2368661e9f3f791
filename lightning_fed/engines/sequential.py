"""The sequential engine: one client after another through Lightning's own loop. Any module, any hook; the reference."""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch

from lightning_fed._compat import SIGTERMException
from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.buffers import Buffers
from lightning_fed.core.errors import ClientError
from lightning_fed.core.flat import FlatParameters
from lightning_fed.core.rounds import ClientReport, Run, Step, Update
from lightning_fed.core.seeds import Purpose, derive_seed, generator, seed_global
from lightning_fed.core.types import State, Vector
from lightning_fed.core.watched import Watched
from lightning_fed.data.batches import ClientBatches
from lightning_fed.engines.client_loop import ClientEpochLoop, ClientFetcher
from lightning_fed.engines.gradients import GradientPass
from lightning_fed.engines.plan import WorkPlan
from lightning_fed.optim import FederatedOptimizer, LocalWork, solver_entries
from lightning_fed.server.aggregation import Participant

__all__ = ["ClientResult", "RoundInputs", "SequentialEngine"]


@dataclass(frozen=True, slots=True)
class RoundInputs:
    """What the server hands to every client of a round.

    Attributes:
        round: The round, from 0.
        x: The server parameters [P].
        server: The server state.
        full_grad: Full-batch gradients by client index, then by point.
        cohort_grad: Their averages by point.
        mean_examples: n / N where the method may ask for it, else nan.
    """

    round: int
    x: Vector
    server: Watched
    full_grad: dict[int, State]
    cohort_grad: Watched
    mean_examples: float


@dataclass(frozen=True, slots=True)
class ClientResult:
    """What came back from one client; ``y`` is valid until the next client starts."""

    participant: Participant
    y: Vector
    delta: Vector
    update: Update
    solver: State
    buffers: State
    report: ClientReport


class SequentialEngine:
    """Run clients one by one on the trainer's own module.

    Args:
        trainer: The trainer, with module and optimizer set up.
        algorithm: The method.
        flat: The trainable parameters.
        optimizer: The wrapped local optimizer.
        epoch_loop: The reused training epoch loop.
        buffers: The module's buffers.
        seed: The run's seed.
        shuffle: Whether local epochs visit batches in random order.
        keeps_solver: Whether clients keep the local optimizer's state from round to round.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        algorithm: Algorithm,
        flat: FlatParameters,
        optimizer: FederatedOptimizer,
        epoch_loop: ClientEpochLoop,
        buffers: Buffers,
        seed: int,
        shuffle: bool,
        keeps_solver: bool,
    ) -> None:
        self.trainer = trainer
        self.algorithm = algorithm
        self.flat = flat
        self.optimizer = optimizer
        self.epoch_loop = epoch_loop
        self.buffers = buffers
        self.seed = seed
        self.shuffle = shuffle
        self.keeps_solver = keeps_solver
        self.fetcher = ClientFetcher()
        self.gradients = GradientPass(trainer, flat)
        self.anchor_grad = torch.zeros_like(flat.y) if algorithm.anchor_at else None
        epoch_loop.prepare()

    def full_gradients(self, inputs: RoundInputs, plan: WorkPlan) -> State:
        """Return a client's full-batch gradients at the points that the method names, before any local work."""
        index = plan.participant.index
        grads = {}
        with self._errors_of(plan, inputs.round, "its full-batch gradient"):
            for name in self.algorithm.full_grad_at:
                point = inputs.x if name == "x" else inputs.server[name]
                grads[name] = self.gradient_at(point, plan.batches, inputs.round, index)
        return grads

    def gradient_at(self, point: Vector, batches: ClientBatches, round: int, index: int) -> Vector:
        """Return a client's full-batch gradient [P] at a point [P]; random layers draw from a stream of its own."""
        seed_global(derive_seed(self.seed, Purpose.FULL_GRADIENT, round, index), self.flat.y.device)
        stream = generator(self.seed, Purpose.FULL_GRADIENT, round, index)
        return self.gradients.full(point, batches.full(stream), batches.size, self.optimizer.decay)

    def population_loss(self, x: Vector, clients: Iterator[tuple[int, ClientBatches]], round: int) -> torch.Tensor:
        """Return the mean loss over all examples of all clients at ``x``, in eval mode (0-dim)."""
        total, examples = torch.zeros((), dtype=torch.float64), 0
        for index, batches in clients:
            stream = generator(self.seed, Purpose.FULL_GRADIENT, round, index)
            total += self.gradients.loss(x, batches.full(stream)).cpu()
            examples += batches.size
        return (total / examples).to(device=x.device, dtype=x.dtype)

    def run(self, inputs: RoundInputs, plan: WorkPlan, client: State, solver: State | None = None) -> ClientResult:
        """Train one client and return what it sends.

        Args:
            inputs: What the server hands out.
            plan: The client's work.
            client: Its kept state.
            solver: The local optimizer's state that the client kept, if it keeps one.

        Raises:
            ClientError: If anything goes wrong in the client's work; the cause is ``__cause__``.
        """
        started = time.perf_counter()
        who = plan.participant
        with self._errors_of(plan, inputs.round, "its local work"):
            self.flat.y.copy_(inputs.x)
            steps = self._steps(inputs, plan, client)
            local = steps[1]
            self.optimizer.begin(LocalWork(self.algorithm, steps[0], self._solver(inputs, local)), solver)
            self.epoch_loop.begin_client(self.flat.y.device)
            with self.epoch_loop._results.of_client(self.trainer.lightning_module):
                self._train(inputs, plan)
            loss, metrics = self.epoch_loop.close_client()
            statistics = self.optimizer.solver_state() if self.keeps_solver else {}
            run = self._run_record(inputs, plan, client, local)
            self._check_steps(run, plan)
            update = self.algorithm.finish(self.flat.y, run)
            norm = float(torch.linalg.vector_norm(run.delta))
        if not norm < float("inf"):
            raise ClientError(
                f"Client {who.client_id!r} came back from round {inputs.round} with parameters that are not finite,"
                f" after {run.num_steps} local steps (mean loss {loss:g}). Lower the learning rate, clip gradients, or"
                " look at its data."
            )
        report = ClientReport(
            who.client_id, who.size, int(run.num_steps), loss, metrics, norm, time.perf_counter() - started
        )
        return ClientResult(who, self.flat.y, run.delta, self._own(update), statistics, self.buffers.read(), report)

    def _train(self, inputs: RoundInputs, plan: WorkPlan) -> None:
        who = plan.participant
        seed_global(derive_seed(self.seed, Purpose.TRAINING, inputs.round, who.index), self.flat.y.device)
        stream = generator(self.seed, Purpose.BATCHES, inputs.round, who.index)
        for length in plan.epochs:
            if length == 0:
                continue
            self.trainer.fit_loop.max_batches = length
            self.fetcher.bind(itertools.islice(plan.batches.epoch(stream, self.shuffle), length), length)
            self.epoch_loop.run(self.fetcher)

    def _steps(self, inputs: RoundInputs, plan: WorkPlan, client: State) -> tuple[list[Step], State]:
        """Cut everything that ``correct`` may read into the parameters' shapes, once a client."""
        layout, who = self.flat.layout, plan.participant
        local = self.algorithm.init_local(inputs.x, inputs.server, client)
        full_grad = inputs.full_grad.get(who.index, {})
        optimization = self.epoch_loop.automatic_optimization
        anchors: list[torch.Tensor | None] = [None] * len(layout.sizes)
        if self.anchor_grad is not None:
            name = self.algorithm.anchor_at
            point = inputs.x if name == "x" or name is None else inputs.server[name]
            optimization.gradients, optimization.anchor_grad = self.gradients, self.anchor_grad
            optimization.anchor_point, optimization.anchor_decay = layout.views(point), self.optimizer.decay
            anchors = list(layout.views(self.anchor_grad))
        else:
            optimization.anchor_grad = None
        server, cohort_grad = (
            layout.state_views(inputs.server.unwatched()),
            layout.state_views(inputs.cohort_grad.unwatched()),
        )
        # what is read of the first parameter's views is read of all
        server[0], cohort_grad[0] = (
            Watched(server[0], inputs.server.read),
            Watched(cohort_grad[0], inputs.cohort_grad.read),
        )
        columns: tuple[Sequence[Any], ...] = (
            layout.views(inputs.x),
            server,
            layout.state_views(client),
            layout.state_views(local),
            anchors,
            layout.state_views(full_grad),
            cohort_grad,
            [float(who.size)] * len(anchors),
            [inputs.mean_examples] * len(anchors),
        )
        return [Step(*row) for row in zip(*columns, strict=True)], local

    def _solver(self, inputs: RoundInputs, local: State) -> list[dict[str, torch.Tensor]] | None:
        if not self.algorithm.uses_solver_state:
            return None
        return solver_entries(self.algorithm.solver_state(inputs.server, local), len(self.flat.params))

    def _run_record(self, inputs: RoundInputs, plan: WorkPlan, client: State, local: State) -> Run:
        who = plan.participant
        lr_sum, work = self.optimizer.lr_sum, self.optimizer.work
        assert work is not None
        self.optimizer.end()
        if work.steps and local:
            local = {
                name: torch.cat([step.local[name].reshape(-1) for step in work.steps])
                if value.shape == inputs.x.shape
                else work.steps[0].local[name]
                for name, value in local.items()
            }
        return Run(
            x=inputs.x,
            delta=self.flat.y - inputs.x,
            server=inputs.server,
            client=client,
            local=local,
            full_grad=inputs.full_grad.get(who.index, {}),
            cohort_grad=inputs.cohort_grad,
            num_examples=float(who.size),
            mean_examples=inputs.mean_examples,
            num_steps=work.num_steps,
            lr_sum=lr_sum,
            path=partial(self.optimizer.path_gradient, work, inputs.x),
        )

    def _check_steps(self, run: Run, plan: WorkPlan) -> None:
        scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        if run.num_steps == 0 and plan.participant.steps > 0 and not scaled:
            raise ClientError(
                "training_step returned None for every batch, so no local step was taken. Return a loss for at least"
                " one batch, or leave the client out of client_ids."
            )

    def _own(self, update: Update) -> Update:
        """Copy kept tensors that share storage with the module's parameters, which the next client overwrites."""
        storage = self.flat.y.untyped_storage().data_ptr()
        keep = {k: v.clone() if v.untyped_storage().data_ptr() == storage else v for k, v in update.keep.items()}
        return Update(update.send, keep)

    def _errors_of(self, plan: WorkPlan, round: int, what: str) -> "_NamesClient":
        return _NamesClient(self.optimizer, plan.participant, round, what)


class _NamesClient:
    """Put the client, the round and the local step in front of whatever goes wrong inside."""

    def __init__(self, optimizer: FederatedOptimizer, who: Participant, round: int, what: str) -> None:
        self.optimizer, self.who, self.round, self.what = optimizer, who, round, what

    def __enter__(self) -> None:
        """Start watching."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, SIGTERMException):
            return
        work, self.optimizer.work = self.optimizer.work, None
        at = f", local step {work.num_steps + 1}" if work is not None else ""
        text = str(error) if isinstance(error, ClientError) else f"{type(error).__name__}: {error}"
        raise ClientError(
            f"Client {self.who.client_id!r} failed in {self.what} in round {self.round}{at}: {text}"
        ) from error
