"""The sequential engine, the reference: one client after another in Lightning's loop, any module, any hook."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.callbacks.base import any_uses_hook
from lightning_fed.compat.private import call, rank_zero_warn
from lightning_fed.core.buffers import BufferMean
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.rounds import ClientReport, Run, Step
from lightning_fed.core.seeds import Purpose, derive_seed, generator, preserved_random_state, seed_global
from lightning_fed.core.types import State
from lightning_fed.engines.base import ChunkResult, Engine, RoundInputs, WorkPlan, per_parameter
from lightning_fed.engines.batch_hooks import warn_of_gradient_hooks
from lightning_fed.engines.changes import (
    Key,
    Snapshot,
    TensorCopies,
    attribute_values,
    attributes_of,
    kept_between_clients,
    own_tensors,
    parts_of,
)
from lightning_fed.engines.example_gradients import ExampleGradients
from lightning_fed.engines.gradients import buffer_owners, prepare_batch
from lightning_fed.engines.local_schedule import LocalOptions, stepped_schedule
from lightning_fed.engines.optimizer import LocalWork, solver_entries
from lightning_fed.engines.prepared import PreparedModule
from lightning_fed.engines.sequential.local_loop import ClientEpochLoop, ClientFetcher
from lightning_fed.engines.sequential.readings import ClientNumbers, Reading, read
from lightning_fed.server.client_states.state import PERSONAL, method_part, with_kept

_KEPT = {
    "tensor": (
        "{module} changes a tensor in its attribute {name!r} while a client trains. It goes from one client to the"
        " next, and is not in checkpoints. Make it a buffer with register_buffer(), unless it only collects numbers:"
        " buffers start from the server's for every client, and are averaged."
    ),
    "callback": (
        "The callback's attribute {name} changes its tensors while a client trains. It goes from one client to the"
        " next. For a moving average of the server's models, change it in on_train_epoch_end; if the validation uses"
        " it, take it out of the model in on_validation_end. Otherwise keep a value for each client, or set it in"
        " on_client_start."
    ),
    "number": (
        "{module} changes a number in its attribute {name!r} while a client trains. It goes from one client to the"
        " next, and is not in checkpoints. If a step reads it, make it a buffer with register_buffer(), which starts"
        " from the server's for every client."
    ),
    "buffer": (
        "{module} registers the buffer {name!r} while a client trains. It goes from one client to the next, is not"
        " averaged, and a resumed run does not know it. Register it in __init__, or with persistent=False if every step"
        " makes it again."
    ),
    "generator": (
        "{module} draws from the generator in its attribute {name!r} while a client trains. The run does not seed it:"
        " its numbers continue across clients, and a resumed run draws others. Draw from PyTorch's global generator,"
        " which the run seeds for every client, or seed this one in on_client_start."
    ),
}
"""Warnings about state that goes from one client's work to the next, by kind."""


class SequentialEngine(Engine):
    """Runs clients one by one."""

    name = "sequential"

    def __init__(self, prepared: PreparedModule) -> None:
        super().__init__(prepared)
        loop: Any = self.trainer.fit_loop
        self.epoch_loop: ClientEpochLoop = loop.epoch_loop
        self.fetcher = ClientFetcher()
        self.anchor_grad = torch.zeros_like(self.flat.y) if self.algorithm.anchor_at else None
        self.looks_ahead = self.epoch_loop.automatic_optimization.looks_ahead = self.algorithm.looks_ahead
        self._delta = torch.empty_like(self.flat.y)  # reused for every client: allocating takes longer than subtracting
        self._has_checked = False  # whether attributes were checked after one client's work
        self._readings: list[Reading] = []  # clients whose numbers are still on the device
        self.epoch_loop.prepare(reads_loss=bool(self.optimizer.readers))
        if self.algorithm.full_grad_at or self.algorithm.anchor_at or self.algorithm.looks_ahead:
            warn_of_gradient_hooks(self.trainer, self.algorithm)
        privacy = prepared.settings.client_privacy
        self.private = None if privacy is None else ExampleGradients(self.trainer, self.flat, privacy)
        self.epoch_loop.automatic_optimization.private = self.private

    def chunks(self, plans: Sequence[WorkPlan]) -> Iterator[Sequence[WorkPlan]]:
        """Yield one client at a time."""
        return zip(plans, strict=True)

    def run(
        self, inputs: RoundInputs, plans: Sequence[WorkPlan], clients: Sequence[State], solvers: Sequence[State]
    ) -> ChunkResult:
        """Train one client and return its result."""
        ((plan,), (client,), (solver,)) = plans, clients, solvers
        started = time.perf_counter()
        who = plan.participant
        with self.errors_of(plan, inputs.round, "its local work"):
            self.flat.gather()  # a failed client may have assigned to `.data`
            self.flat.personal.copy_(client.get(PERSONAL, self.flat.personal))
            schedule = self.optimizer.schedule
            first_step = 0 if schedule is None else schedule.start_of(client)
            client = method_part(client)
            local = self.algorithm.init_local(inputs.x, inputs.server, client)
            work = self._begin(inputs, plan, client, local, solver, first_step)
            before = self.buffers.read() if self.split.size > 1 or self.private is not None else {}
            kept = None
            if not self._has_checked:
                kept, attributes = self._kept(), attributes_of(self.trainer.lightning_module)
            self.epoch_loop.begin_client()
            for p in self.flat.params:  # a user's optimizer_zero_grad may have left gradients
                p.grad = None
            schedules = self.trainer.lr_scheduler_configs if schedule is None else ()  # a local schedule steps its own
            options = LocalOptions(self.optimizer.base, schedules)
            try:
                with self.epoch_loop._results.of_client(self.trainer.lightning_module):
                    self._train(inputs, plan)
            finally:
                _, stepped = options.take_back()
                if self.prepared.steps_itself:
                    self._thaw()
            if stepped is not None:
                raise stepped_schedule(self.trainer.lightning_module, stepped)
            self.flat.gather()
            numbers = self.epoch_loop.close_client()
            if kept is not None:
                self.prepared.check_parameters()
                self._check_read(attributes, self._check_kept(kept), plan)
                self._has_checked = True
            buffers = self._merged_buffers(before) if self.split.size > 1 else self.buffers.read()
            if self.private is not None:
                self._check_buffers(before, buffers)
            statistics = [self.optimizer.solver_state()] if self.keeps_solver else []
            self.optimizer.end()
            if work.num_steps == 0 and who.steps > 0:
                self._check_no_steps(numbers)
            needs_loss = self.private is None and self.split.size == 1 and not self.prepared.steps_itself
            if work.num_steps > 0 and not len(numbers.losses) and needs_loss:
                raise FederatedError(
                    f"{type(self.trainer.lightning_module).__name__}.training_step returned None for every batch, and"
                    " stepped the optimizer itself, so the client's loss is not known. Return the loss, and leave"
                    " backward(), step() and zero_grad() to the trainer. Or set self.automatic_optimization = False in"
                    " __init__, if the step computes gradients in its own way."
                )
            run = self._run_record(inputs, plan, client, local, work)
            update = self.algorithm.finish(self.flat.y, run)
            continues = schedule is not None and schedule.mode == "continue"
            count = first_step + work.num_steps if continues else None
            keep = with_kept(update.keep, client, self.flat.personal, count)
            norm = torch.linalg.vector_norm(run.delta)
        seconds = time.perf_counter() - started
        report = ClientReport(who.client_id, who.size, work.num_steps, math.nan, {}, math.nan, seconds)
        shown = numbers if self.private is None else None  # losses and logged values have no noise
        found = float(norm) if norm.is_cpu else norm
        if self.reads_later:
            self._readings.append(Reading(report, found, shown, inputs.round))
        elif faults := read([Reading(report, found, shown, inputs.round, started)]):
            raise faults[0]
        return ChunkResult(
            participants=[who],
            y=self.flat.whole[None],
            delta=run.delta[None],
            send={name: value[None] for name, value in update.send.items()},
            keep={name: value[None] for name, value in keep.items()},
            sends_delta=update.send.get("delta") is run.delta,
            reports=[report],
            asked=[0],
            solver=statistics,
            buffers=[buffers] if buffers else [],
            implied=update.implied,
        )

    def begin_round(self, plans: Sequence[WorkPlan]) -> None:
        """Discard unread reports of an unfinished round."""
        self._readings = []

    def end_round(self) -> None:
        """Read the clients' numbers, which may be on a device; raise if one is not finite."""
        readings, self._readings = self._readings, []
        if faults := read(readings):
            raise faults[0]

    def _begin(
        self, inputs: RoundInputs, plan: WorkPlan, client: State, local: State, solver: State, first_step: int
    ) -> LocalWork:
        """Set the client's starting point, and let the optimizer correct its gradients."""
        algorithm, optimizer, optimization = self.algorithm, self.optimizer, self.epoch_loop.automatic_optimization
        work = LocalWork(algorithm, [])
        if algorithm.uses_solver_state:
            work.solver = solver_entries(algorithm.solver_state(inputs.server, local), len(self.flat.params))
        optimizer.begin(work, solver, first_step, plan.participant.steps)
        whole = Step(
            x=inputs.x,
            server=inputs.server,
            client=client,
            local=local,
            anchor_grad=None,
            full_grad=inputs.full_grad.get(plan.participant.index, {}),
            cohort_grad=inputs.cohort_grad,
            num_examples=float(plan.participant.size),
            mean_examples=inputs.mean_examples,
            lr=optimizer.spread(optimizer.plan.rates),
        )
        optimization.anchor_grad = None
        self.flat.y.copy_(algorithm.start(inputs.x, whole))
        if optimizer.plan.injects:
            work.is_joined = self.flat.joins and isinstance(whole.lr, float) and not optimizer.parts
            work.steps = self._steps(inputs, whole, work.is_joined)
            if self.looks_ahead:  # the method computes the points in every step
                optimization.gradients = self.gradients
                work.whole, work.second_gradient = whole, optimization.second_gradient
        return work

    def _train(self, inputs: RoundInputs, plan: WorkPlan) -> None:
        who = plan.participant
        seed = derive_seed(self.seed, Purpose.TRAINING, inputs.round, who.index)
        seed_global(self.split.seed(seed), self.flat.y.device)
        stream = generator(self.seed, Purpose.BATCHES, inputs.round, who.index)
        batches = self.to_device(plan.batches)
        if self.private is not None:
            self.private.begin_client(self.seed, inputs.round, who.index, batches.expected_size)
        for length in plan.epochs:
            if length == 0:
                continue
            self.trainer.fit_loop.max_batches = length
            self.fetcher.bind(itertools.islice(batches.epoch(stream, self.shuffle), length), length)
            try:
                self.epoch_loop.run(self.fetcher)
            finally:
                self.fetcher.teardown()  # ends a loader's workers: no more batches are needed

    def _merged_buffers(self, before: State) -> State:
        """Return the buffers after a client's work: the mean over processes of the changed ones."""
        after = self.buffers.read()
        changed = {name: value.cpu() for name, value in after.items() if not torch.equal(value, before[name])}
        parts = self.split.gather((self.epoch_loop.own_examples, changed))
        names = {name for _, part in parts for name in part}
        mean = BufferMean()
        for rank, (examples, part) in enumerate(parts):
            mean.update({name: part.get(name, before[name].cpu()) for name in names}, examples, rank)
        merged = {name: value.to(after[name].device) for name, value in mean.compute(after).items()}
        self.buffers.write(merged)
        return merged

    def _steps(self, inputs: RoundInputs, whole: Step, is_joined: bool) -> list[Step]:
        """Return the inputs of ``correct`` for a client; set up gradients at the anchor, if any."""
        layout = self.flat.layout
        steps = [replace(whole)] if is_joined else per_parameter(whole, layout)
        if self.anchor_grad is not None:
            name, optimization = self.algorithm.anchor_at, self.epoch_loop.automatic_optimization
            point = inputs.x if name == "x" or name is None else inputs.server[name]
            optimization.gradients, optimization.anchor_grad = self.gradients, self.anchor_grad
            optimization.anchor_point = layout.views(point)
            parts = [self.anchor_grad] if is_joined else layout.views(self.anchor_grad)
            for step, part in zip(steps, parts, strict=True):
                step.anchor_grad = part
        return steps

    def _run_record(self, inputs: RoundInputs, plan: WorkPlan, client: State, local: State, work: LocalWork) -> Run:
        who, lr_sum = plan.participant, work.lr_sum
        if work.steps and local:
            local = self.flat.layout.joined_state([step.local for step in work.steps], local)
        return Run(
            x=inputs.x,
            delta=torch.sub(self.flat.y, inputs.x, out=self._delta),
            server=inputs.server,
            client=client,
            local=local,
            full_grad=inputs.full_grad.get(who.index, {}),
            cohort_grad=inputs.cohort_grad,
            num_examples=float(who.size),
            mean_examples=inputs.mean_examples,
            num_steps=work.steps_of,
            lr_sum=lr_sum,
            path=partial(self.optimizer.path_gradient, work, inputs.x),
            path_follows=self.optimizer.plan.is_straight and isinstance(lr_sum, float) and lr_sum != 0,
        )

    def _check_buffers(self, before: State, after: State) -> None:
        """Raise if local work changed a buffer, which would reveal examples without noise."""
        name = next((name for name, value in after.items() if not torch.equal(value, before[name])), None)
        if name is not None:
            raise FederatedError(
                f"{type(self.trainer.lightning_module).__name__}.training_step changes the buffer {name!r}, which"
                " client_privacy does not cover: it depends on clients' examples without noise. Leave it unchanged in"
                " training_step."
            )

    def _check_no_steps(self, numbers: ClientNumbers) -> None:
        """Raise if a client took no local step, unless a gradient scaler skipped them."""
        if getattr(self.trainer.precision_plugin, "scaler", None) is not None:
            return
        if self.prepared.steps_itself:
            raise ClientError(
                "training_step uses manual optimization, and no optimizer took a step with a gradient. Call"
                " self.manual_backward(loss) and step() of what self.optimizers() returns. If training_step steps after"
                " several batches, this client has too few: step when self.trainer.is_last_batch, too, or set"
                " on_client_error='drop'."
            )
        if len(numbers.losses):
            raise ClientError(
                "training_step returned losses, but backward left no gradient on any trained parameter, so no local"
                " step was taken. Check the module's or the strategy's backward."
            )
        raise ClientError(
            "training_step returned None for every batch, so no local step was taken. Return a loss for at least"
            " one batch, or leave the client out of client_ids."
        )

    def _check_read(self, attributes: Snapshot, told: Mapping[str, str], plan: WorkPlan) -> None:
        """Warn if a step reads values that local work has left in attributes, such as a recurrent state or a flag.

        Most such attributes only record something. Trial steps on the client's first batch detect reads. They run with
        the current values, the earlier ones, and the current ones again, since a step may give another loss each time.
        ``told`` has the attributes that another warning names.
        """
        module, device = self.trainer.lightning_module, self.flat.y.device
        may_reset = any_uses_hook(self.trainer, "on_client_start", of_users=True)
        may_reset |= self.epoch_loop.uses_start_hooks
        may_try = not (may_reset or self.private is not None or self.split.size > 1)
        names = attributes.keep_changed(told) if may_try and "tensor" not in told.values() else []
        if not names:
            return
        ours = set(map(id, self.optimizer.wrapped))
        for *_, value in attribute_values(parts_of(module)):
            # values that a trial step takes from an iterator would be missing later; no other optimizer is put back
            if isinstance(value, Iterator) or (isinstance(value, Optimizer) and id(value) not in ours):
                return
        found, copies = list[Tensor | None](), TensorCopies(own_tensors(parts_of(module)))
        outcome = self._gradients_of_steps if self.prepared.steps_itself else self.gradients.forward
        with preserved_random_state(device), self.gradients.silent() as forget:
            now = attributes_of(module)

            def undo() -> None:
                now.restore()
                forget()
                self.flat.bind()
                copies.restore()  # a step may set parameters from its first batch

            try:
                for is_before in (False, True, False):
                    if is_before:
                        attributes.restore()
                    seed_global(0, device)  # the data may be random, too
                    batch, _ = next(iter(self.to_device(plan.batches).epoch(torch.Generator(), False)))
                    found.append(outcome(prepare_batch(self.trainer, batch), 0))
                    undo()
            except Exception:  # such as with the old attributes: a failed step shows nothing
                return
            finally:
                undo()
        first, before, again = found
        if first is None or again is None or not torch.equal(first, again):
            return
        if before is None or not torch.equal(first, before):
            rank_zero_warn(
                f"{type(module).__name__}.training_step reads what earlier steps have left in"
                f" {' or '.join(map(repr, names))}: the next client starts with the last one's, and a resumed run with"
                " what __init__ sets. Reset it in training_step when batch_idx is 0, or in on_client_start. Or make"
                " it a buffer with register_buffer(), which starts from the server's for every client."
            )

    def _gradients_of_steps(self, batch: Any, batch_idx: int) -> Tensor | None:
        """Return the gradients at all steps of a ``training_step`` with manual optimization, without stepping."""
        grads: list[Tensor] = []

        def look(closure: Callable[[], Any] | None = None) -> Any:
            loss = None if closure is None else closure()
            grads.extend(p.grad.flatten().clone() for p in self.flat.params if p.grad is not None)
            return loss

        trainer: Any = self.trainer
        shown = trainer.lightning_module.optimizers()
        optimizers = [*trainer.optimizers, *(shown if isinstance(shown, list) else [shown])]
        callbacks, trainer.callbacks = trainer.callbacks, []  # what their hooks change is not put back
        for p in self.flat.params:
            p.grad = None
        steps = [vars(optimizer).get("step") for optimizer in optimizers]  # a schedule of the user's may have set one
        for optimizer in optimizers:
            vars(optimizer)["step"] = look
        try:
            with torch.enable_grad():
                inputs = (batch, batch_idx) if self.epoch_loop.takes_index else (batch,)
                call._call_strategy_hook(trainer, "training_step", *inputs)
        finally:
            trainer.callbacks = callbacks
            for optimizer, step in zip(optimizers, steps, strict=True):
                del vars(optimizer)["step"]
                vars(optimizer).update({} if step is None else {"step": step})
            self._thaw()
        return torch.cat(grads) if grads else None

    def _thaw(self) -> None:
        """Let all trained parameters have gradients again: a GAN's step may leave its critic frozen."""
        for p in self.flat.params:
            p.requires_grad_(True)

    def _kept(self) -> dict[Key, list[tuple[Any, Any]]]:
        """Return the state that goes from one client's work to the next: see :func:`kept_between_clients`."""
        counts = {("optimizer", name): [(None, value)] for name, value in self.optimizer.counts().items()}
        module, callbacks = self.trainer.lightning_module, self.trainer.callbacks
        return {**kept_between_clients(module, callbacks, self.optimizer.wrapped), **counts}

    def _check_kept(self, before: Mapping[Key, list[tuple[Any, Any]]]) -> dict[str, str]:
        """Warn if local work has changed the state that :meth:`_kept` returns; raise for optimizer and schedules.

        Attributes may gain tensors or numbers. Return the names in these warnings, with their kinds.
        """
        module, after, told = type(self.trainer.lightning_module).__name__, self._kept(), dict[str, str]()
        for (kind, name), now in after.items():
            was = before.get((kind, name), [])
            if kind == "optimizer" and now != was:  # attributes are not reset with state and options
                raise FederatedError(
                    f"The local optimizer changes its attribute {name} as it steps. Every client has a new optimizer,"
                    " and this number would go from one to the next. Keep it in self.state[parameter], or in a"
                    " parameter group: both are reset."
                )
            if now != was and [shape for shape, _ in now] == [shape for shape, _ in was]:
                if kind == "schedule":
                    raise stepped_schedule(self.trainer.lightning_module, now[0][0])
                told[name] = kind
                rank_zero_warn(_KEPT[kind].format(module=module, name=name))
        new = buffer_owners(self.trainer.lightning_module).keys() - self.buffers.owners.keys()
        for name in sorted(new & self.trainer.lightning_module.state_dict().keys()) if new else ():
            rank_zero_warn(_KEPT["buffer"].format(module=module, name=name))
        return told
