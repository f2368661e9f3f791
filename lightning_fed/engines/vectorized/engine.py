"""The vectorized engine: several clients of a cohort at once, with ``torch.func``."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_fed.compat.private import rank_zero_warn
from lightning_fed.core.devices import is_out_of_memory, release_memory
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.rounds import ClientReport
from lightning_fed.core.seeds import Purpose, generator, preserved_random_state
from lightning_fed.core.types import State, Vector
from lightning_fed.data.batches.batches import ClientBatches
from lightning_fed.engines.base import (
    ChunkResult,
    Engine,
    OnlySequentialError,
    RoundInputs,
    WorkPlan,
    changed_since_trial,
)
from lightning_fed.engines.batch_hooks import has_transfer_hooks, hooked_parameter
from lightning_fed.engines.changes import attributes_of
from lightning_fed.engines.client_errors import fault_of, summary_of
from lightning_fed.engines.device_data import is_rows
from lightning_fed.engines.gradients import add_decay, prepare_batch
from lightning_fed.engines.local_schedule import LocalOptions, stepped_schedule
from lightning_fed.engines.prepared import PreparedModule
from lightning_fed.engines.vectorized.batches import RowLookup, StepGroup
from lightning_fed.engines.vectorized.chunk_work import ChunkWork, Clipping
from lightning_fed.engines.vectorized.clients import (
    ChunkMeans,
    ChunkMemory,
    default_chunk_size,
    stack_states,
)
from lightning_fed.engines.vectorized.full_gradients import FullGradients
from lightning_fed.engines.vectorized.module_step import ModuleStep
from lightning_fed.engines.vectorized.schedule import Schedule
from lightning_fed.engines.vectorized.trial import ChangeTracker, TrialStep, check_settings


class VectorizedEngine(Engine):
    """Runs the clients of a chunk at once, on stacked parameters; docs/architecture.md shows a batch's path.

    ``chunk_size=None`` chooses by the size of the model, and on an accelerator by the memory that :meth:`try_out` uses.
    The sequential engine, from ``make_sequential``, finds the client that causes an error.
    """

    name = "vectorized"
    shares_settings = True
    less_memory = ". engine='sequential' takes the least memory, and 'auto' falls back on it"

    def __init__(self, chunk_size: int | None, prepared: PreparedModule, make_sequential: Callable[[], Engine]) -> None:
        super().__init__(prepared)
        check_settings(self)
        self._make_sequential = make_sequential
        self.chunk_size = chunk_size or default_chunk_size(self.flat.whole)
        self._is_chosen = chunk_size is not None
        self._tried_at_once = 2
        self.step = ModuleStep(self.trainer, self.flat)
        self.full = FullGradients(self.step)
        self.schedule = Schedule(self, self.step)
        self.changes = ChangeTracker(self.trainer, self.algorithm)
        self._row: tuple[ChunkResult, int] | None = None
        self._memory: ChunkMemory | None = None
        self._logged: dict[str, tuple[float, float]] = {}  # see ChunkMeans.add_to

    def try_out(self, plan: WorkPlan) -> None:
        """Try a step on a client's first batch, and raise if the module cannot run several clients at once.

        It also chooses the chunk size. If a step of two clients does not fit the device, the size is one, even if set.
        """
        try:
            self._try_out(plan)
            return
        except RuntimeError as error:
            if self._tried_at_once == 1 or not is_out_of_memory(error):
                raise
            release_memory(error, self.flat.y.device)
        if self._is_chosen and self.chunk_size > 1:
            rank_zero_warn(
                f"chunk_size={self.chunk_size} is too large: {self.flat.y.device} ran out of memory when two clients"
                " took a step at once. Clients are trained one at a time. Set chunk_size=1, or a smaller batch_size."
            )
        self._tried_at_once = self.chunk_size = 1
        self._is_chosen = True
        self._try_out(plan)

    def _try_out(self, plan: WorkPlan) -> None:
        if not any(plan.epochs) and not self.algorithm.full_grad_at:
            return  # nothing to try
        plan = plan if any(plan.epochs) else replace(plan, epochs=(1,))
        module = self.trainer.lightning_module
        before = attributes_of(module) if has_transfer_hooks(self.trainer) else None
        with self.gradients.silent(), preserved_random_state(self.flat.y.device):
            batches = self.schedule.batches([plan], self.schedule.rows([plan]), 0, by_index=True)
            ((group,),) = batches.in_order([StepGroup(range(1), [0])])
            if before is not None and (found := before.changed()) is not None:
                before.restore()
                raise FederatedError(
                    f"engine='vectorized' cannot take the batches of {type(module).__name__}: a hook for their transfer"
                    f" changes the attribute {found[1]!r}, which clients at once would share. Change that, or use"
                    " engine='sequential'."
                )
            trial = TrialStep(self.step, self._tried_at_once)
            trial.run(group)
        if not self._is_chosen:
            full = max(group.examples, self.schedule.batch_size or 0)
            self.chunk_size = default_chunk_size(self.flat.whole, -(-trial.step_bytes * full // group.examples))
            self._is_chosen = True
        self.changes.remember()

    def use_chunk(self, size: int) -> None:
        """Run this many clients at once from now on, and release the memory of larger chunks."""
        self.chunk_size, self._memory, self._row = size, None, None
        self.step.traces.drop()

    def begin_round(self, plans: Sequence[WorkPlan]) -> None:
        """Repeat the trial step and drop traces if an attribute of the module or the method has changed."""
        if self.trainer.accumulate_grad_batches != 1 or hooked_parameter(self.trainer.lightning_module) is not None:
            check_settings(self)  # a callback has changed these settings
        self.step.begin_round()
        self.schedule.recurring.begin_round()
        has_changed = self.changes.begin_round()
        if not has_changed:
            return
        self.step.traces.drop()
        was_random = self.step.is_random
        try:
            self._try_out(plans[0]) if plans else None
        except Exception as error:
            self.step.is_random = was_random
            if isinstance(error, FederatedError) and not isinstance(error, ClientError):
                raise  # other errors recur in the work itself, which names the client

    def chunks(self, plans: Sequence[WorkPlan]) -> Iterator[Sequence[WorkPlan]]:
        """Yield the clients that run together."""
        for i in range(0, len(plans), self.chunk_size):
            yield plans[i : i + self.chunk_size]

    @property
    def current_parameters(self) -> Vector:
        """The parameters [P] of the client whose hooks are running."""
        return self.flat.y if self._row is None else self._row[0].shared[self._row[1]]

    def show(self, x: Vector, personal: Vector, buffers: State) -> None:
        """Load a client's initial model into the module, for the client's hooks."""
        self._row = None
        super().show(x, personal, buffers)

    def bind(self, result: ChunkResult, row: int) -> None:
        """Bind :attr:`current_parameters`, and the module's parameters, to one client of a chunk."""
        self._row = (result, row)
        self.flat.bind(self.flat.cut(result.y[row]))

    def run(
        self, inputs: RoundInputs, plans: Sequence[WorkPlan], clients: Sequence[State], solvers: Sequence[State]
    ) -> ChunkResult:
        """Train the clients of a chunk; blame the engine for an error that does not occur one by one."""
        try:
            return self._run(inputs, plans, clients, solvers)
        except ClientError as error:
            if error.culprit is not None:
                each = list(zip(plans, clients, solvers, strict=True))
                self._check_alone(
                    error.__cause__,
                    inputs.round,
                    lambda engine: [engine.run(inputs, [plan], [own], [solver]) for plan, own, solver in each],
                )
            raise

    def _run(
        self, inputs: RoundInputs, plans: Sequence[WorkPlan], clients: Sequence[State], solvers: Sequence[State]
    ) -> ChunkResult:
        started = time.perf_counter()
        self._row = None
        schedule = self.optimizer.schedule
        starts = [0] * len(plans) if schedule is None else [schedule.start_of(client) for client in clients]
        clip, plan = Clipping.of(self.trainer), self.optimizer.plan_of(self.algorithm)
        rows = self.schedule.rows(plans)
        order, groups = self.schedule.steps(plans, rows, starts, plan.is_bare and clip is None)
        plans, rows = [plans[i] for i in order], [rows[i] for i in order] if rows else []
        participants = [each.participant for each in plans]
        what = "its local work"
        if len(plans) > 1:
            others = ", ".join(map(repr, [who.client_id for who in participants[1:]]))
            what = f"the local work that it did at once with {others} (engine='sequential' would run them one by one)"
        with self.errors_of(plans[0], inputs.round, what):
            if self._memory is None or len(self._memory.y) < len(plans):
                self._memory = ChunkMemory(self.flat.whole_layout, len(plans), self.flat.y)
            kept_states = stack_states(clients, order)
            work = ChunkWork(
                self.algorithm, self.optimizer, plan, inputs, participants, kept_states, self._memory, clip
            )
            means = ChunkMeans(len(plans))
            self.changes.begin_work()
            schedules = self.trainer.lr_scheduler_configs if schedule is None else ()  # a local schedule steps its own
            options = LocalOptions(self.optimizer.base, schedules)
            self.schedule.run(inputs, plans, rows, groups, work, means)
            self.changes.check_work()
            if schedule is not None:
                schedule.rest()
            option, stepped = options.take_back()
            if stepped is not None:
                raise stepped_schedule(self.trainer.lightning_module, stepped)
            if option is not None:  # clients share the optimizer here
                what = f"changes {option!r} of the local optimizer"
                raise changed_since_trial(self.trainer.lightning_module, what)
            delta, send, keep = work.finish()
        seconds = (time.perf_counter() - started) / len(plans)
        loss, metrics = means.of_clients()
        norms, faults = torch.linalg.vector_norm(delta, dim=1).tolist(), dict[int, ClientError]()
        reports = [
            ClientReport(who.client_id, who.size, who.steps, loss[row], metrics[row], norms[row], seconds)
            for row, who in enumerate(participants)
        ]
        asked = sorted(range(len(plans)), key=order.__getitem__)
        for row in asked:
            if (fault := fault_of(reports[row], partial(means.losses_of, row), inputs.round)) is not None:
                faults[row] = fault
        means.add_to(self._logged, faults)
        return ChunkResult(
            participants=participants,
            y=work.y,
            delta=delta,
            send=send,
            keep=keep,
            sends_delta=work.sends_delta,
            reports=reports,
            asked=asked,
            faults=faults,
            implied=work.implied,
        )

    def _check_alone(self, cause: BaseException | None, round: int, one_by_one: Callable[[Engine], list[Any]]) -> None:
        """Blame this engine for an error if the sequential one does the same work without it.

        The trial step only covers one shape of batch. If the sequential engine refuses the work, its error is raised.
        """
        if cause is None or isinstance(cause, FederatedError):
            return
        undo = self.savepoint()
        self.flat.bind()  # hooks may have bound the parameters to another client
        try:
            one_by_one(self._make_sequential())
        except Exception as alone:
            if isinstance(alone.__cause__, FederatedError):
                raise alone from cause  # it names an unsupported feature
            return  # a client is to blame
        finally:
            undo()
        raise OnlySequentialError(
            f"engine='vectorized' cannot run clients of {type(self.trainer.lightning_module).__name__} in round"
            f" {round}, though a trial step passed: {summary_of(cause)}. One by one they run without an error: use"
            " engine='sequential', or 'auto'."
        ) from cause

    def each_full_gradients(
        self, inputs: RoundInputs, plans: Sequence[WorkPlan]
    ) -> Iterator[tuple[WorkPlan, State | ClientError]]:
        """Yield the clients' full-batch gradients, at once for a chunk of clients with one batch of equal size each."""
        batch_size, count = self.schedule.batch_size, self.chunk_size
        if self.flat.y.device.type != "cpu" and batch_size is not None:  # the chunk size is for batches of local steps
            largest = max((plan.batches.size for plan in plans), default=0)
            count = max(1, count * batch_size // max(batch_size, largest))
        for chunk in (plans[i : i + count] for i in range(0, len(plans), count)):
            found = self._gradients_at_once(inputs, chunk)
            if found is not None:
                yield from zip(chunk, found, strict=True)
                continue
            for plan, answer in super().each_full_gradients(inputs, chunk):
                if isinstance(answer, ClientError) and answer.culprit is not None:
                    self._check_gradients_alone(answer.__cause__, inputs, [plan])
                yield plan, answer

    def _check_gradients_alone(
        self, cause: BaseException | None, inputs: RoundInputs, plans: Sequence[WorkPlan]
    ) -> None:
        self._check_alone(cause, inputs.round, lambda engine: [engine.full_gradients(inputs, plan) for plan in plans])

    def _gradients_at_once(self, inputs: RoundInputs, plans: Sequence[WorkPlan]) -> list[State] | None:
        """Return the full-batch gradients of clients with one batch of equal size each, else None."""
        batches = self.schedule.rows(plans) if len(plans) > 1 else []
        size, most = (batches[0].size, batches[0].settings.full_batch_size) if batches else (0, 0)
        if size > most or not batches or not all(self._traces_gradients(b) and b.size == size for b in batches):
            return None
        stored = [(i, b.stored_rows()) for i, b in enumerate(batches)]
        (rows,) = RowLookup(self.trainer, batches, self.data).in_order([stored])
        leaves = [t.view(len(batches), size, *t.shape[1:]) for t in rows]
        grads: dict[str, Tensor] = {}
        try:
            with self.gradients.silent(), self.step.recording():
                for name in self.algorithm.full_grad_at:
                    point = inputs.x if name == "x" else inputs.server[name]
                    found = self.full.of_many(point, leaves)
                    if found is None or not bool(torch.isfinite(found).all()):
                        return None  # the failing client is found one by one
                    grads[name] = add_decay(found, point, self.flat.layout, self.optimizer.decay)
        except FederatedError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self._check_gradients_alone(error, inputs, plans)
            return None
        return [{name: value[row] for name, value in grads.items()} for row in range(len(plans))]

    def gradient_at(self, point: Vector, batches: ClientBatches, round: int, index: int) -> Vector:
        """Return a client's full-batch gradient [P] at a point [P]; through a trace if there is one."""
        # a batch of a single example would need its own trace
        if self._traces_gradients(batches) and batches.size % batches.settings.full_batch_size != 1:
            stream = generator(self.seed, Purpose.FULL_GRADIENT, round, index)
            prepared = ((prepare_batch(self.trainer, batch), n) for batch, n in self.to_device(batches).full(stream))
            with self.gradients.silent(), self.step.recording():
                found = self.full.of_one(point, prepared, batches.size)
            if found is not None:
                return add_decay(found, point, self.flat.layout, self.optimizer.decay)
        return super().gradient_at(point, batches, round, index)

    def _traces_gradients(self, batches: ClientBatches) -> bool:
        may_trace = self.step.traces.allowed and not self.step.reads_index and not self.flat.personal.numel()
        return may_trace and is_rows(batches)

    def end_round(self) -> None:
        """Pass the means of clients' logged values to Lightning, each as one value with its weight in examples."""
        module, results = self.trainer.lightning_module, self.trainer.fit_loop.epoch_loop._results
        previous, module._current_fx_name = module._current_fx_name, "training_step"
        with results.of_client(module):
            for name, (total, weight) in self._logged.items():
                value = torch.tensor(total / weight, dtype=torch.float64)
                module.log(name, value, **{**self.step.options[name], "batch_size": weight})
        results.close_client()
        module._current_fx_name = previous
        self.changes.end_round()
        self.optimizer.base.__dict__["_opt_called"] = True  # or a schedule that a hook steps once a round would warn
        self._logged, self._row = {}, None

    def abandon(self) -> int | None:
        """End the local work of failed clients; return their number of local steps, or None if none had begun."""
        if self.optimizer.schedule is not None:
            self.optimizer.schedule.rest()
        return self.schedule.abandon()

    def savepoint(self) -> Callable[[], None]:
        """Return a function that undoes later logging of clients, and cleans up after a failed client."""
        undo, logged = super().savepoint(), dict(self._logged)

        def undo_all() -> None:
            undo()
            self._logged = dict(logged)

        return undo_all
