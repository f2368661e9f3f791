"""The vectorized engine: clients of a cohort at once, through ``torch.func``."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import ClientReport
from lightning_fed.core.seeds import Purpose, capture_random_state, derive_seed, generator, seed_global
from lightning_fed.core.types import State, Vector
from lightning_fed.engines.base import ChunkResult, Engine, RoundInputs, check_finite
from lightning_fed.engines.chunk_batches import BatchGroup, chunk_batches
from lightning_fed.engines.functional import FunctionalStep, Logged
from lightning_fed.engines.hooks import overridden_hooks
from lightning_fed.engines.plan import WorkPlan
from lightning_fed.engines.stacked import ELEMENTWISE, Clipping, StackedWork
from lightning_fed.server.aggregation import accumulation_dtype

__all__ = ["VectorizedEngine"]


class VectorizedEngine(Engine):
    """Run the clients of a chunk in step, on stacked parameters; see :mod:`lightning_fed.engines.stacked`.

    Args:
        chunk_size: How many clients are run at once; None chooses by the size of the model.
        kwargs: What every engine takes.

    Raises:
        FederatedError: If settings, hooks or optimizer cannot be run for several clients at once.
    """

    def __init__(self, chunk_size: int | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_settings(self)
        self.chunk_size = chunk_size or _chunk_size(self.flat.y)
        self.step = FunctionalStep(self.trainer, self.flat)
        self._row: tuple[ChunkResult, int] | None = None

    def try_out(self, plan: WorkPlan) -> None:
        """Refuse a module that cannot be run on several clients at once, by a step on a client's first batch.

        Raises:
            FederatedError: Naming what the module does, and the way out.
        """
        if not plan.epochs:
            return  # there is no local work
        stream = generator(self.seed, Purpose.BATCHES, 0, plan.participant.index)
        with self.gradients.silent():
            batches = chunk_batches(self.trainer, [plan], [stream], self.shuffle, by_index=True)
            (group,) = batches.step(1)
            self.step.try_out(group.batch, group.batch_idx)

    def chunks(self, plans: Sequence[WorkPlan]) -> Iterator[Sequence[WorkPlan]]:
        """Yield the clients that are run together."""
        return (plans[i : i + self.chunk_size] for i in range(0, len(plans), self.chunk_size))

    @property
    def parameters_at_work(self) -> Vector:
        """The parameters [P] of the client whose hooks are called."""
        return self.flat.y if self._row is None else self._row[0].y[self._row[1]]

    def point_to(self, result: ChunkResult, row: int) -> None:
        """Let :attr:`parameters_at_work` be those of one client of a chunk, while its hooks are called."""
        self._row = (result, row)

    def run(
        self, inputs: RoundInputs, plans: Sequence[WorkPlan], clients: Sequence[State], solvers: Sequence[State]
    ) -> ChunkResult:
        """Train the clients of a chunk and return what they send."""
        started = time.perf_counter()
        self._row = None
        order = sorted(range(len(plans)), key=lambda i: -plans[i].participant.steps)
        back = sorted(range(len(plans)), key=order.__getitem__)
        in_order = _Reorder(back, self.flat.y.device)
        sorted_plans = [plans[i] for i in order]
        with self._errors_of(sorted_plans, inputs.round):
            full_grad = [inputs.full_grad.get(plan.participant.index, {}) for plan in sorted_plans]
            work = StackedWork(
                self.algorithm,
                self.optimizer,
                inputs,
                _stack([clients[i] for i in order]),
                _stack(full_grad),
                [plan.participant.size for plan in sorted_plans],
                [plan.participant.steps for plan in sorted_plans],
                self._clipping(),
                self.step.unused,
            )
            means = _Means(len(plans), self.flat.y.device)
            self._train(inputs, sorted_plans, work, means)
            delta = work.y - inputs.x
            send, keep, sends_delta = work.finish(delta)
        loss, metrics = means.of_clients(back)
        self._log(means)
        y, delta = in_order(work.y), in_order(delta)
        norms = torch.linalg.vector_norm(delta, dim=1).tolist()
        seconds = (time.perf_counter() - started) / len(plans)
        reports = []
        for i, plan in enumerate(plans):
            who = plan.participant
            check_finite(who.client_id, norms[i], loss[i], who.steps, inputs.round)
            own = {name: values[i] for name, values in metrics.items()}
            reports.append(ClientReport(who.client_id, who.size, who.steps, loss[i], own, norms[i], seconds))
        return ChunkResult(
            participants=[plan.participant for plan in plans],
            y=y,
            delta=delta,
            send={name: in_order(value) for name, value in send.items()},
            keep={name: in_order(value) for name, value in keep.items()},
            sends_delta=sends_delta,
            reports=reports,
        )

    def _train(self, inputs: RoundInputs, plans: Sequence[WorkPlan], work: StackedWork, means: "_Means") -> None:
        device = self.flat.y.device
        steps = [plan.participant.steps for plan in plans]
        seed_global(derive_seed(self.seed, Purpose.TRAINING, inputs.round, plans[0].participant.index), device)
        streams = [generator(self.seed, Purpose.BATCHES, inputs.round, plan.participant.index) for plan in plans]
        batches = chunk_batches(self.trainer, plans, streams, self.shuffle, self.step.reads_index)
        anchor = self._anchor(inputs)
        active = len(plans)
        with self.step.recording():
            for k in range(steps[0]):
                while steps[active - 1] <= k:
                    active -= 1
                work.narrow(active)
                self._step(work, batches.step(active), anchor, means)

    def _anchor(self, inputs: RoundInputs) -> list[Tensor] | None:
        name = self.algorithm.anchor_at
        if name is None:
            return None
        return self.flat.layout.views(inputs.x if name == "x" else inputs.server[name])

    def _step(
        self, work: StackedWork, groups: Sequence[BatchGroup], anchor: list[Tensor] | None, means: "_Means"
    ) -> None:
        grads: list[list[Tensor]] = []
        anchors: list[list[Tensor]] = []
        for group in groups:
            views = work.views if isinstance(group.rows, slice) else [v[group.rows] for v in work.views]
            restore = capture_random_state(self.flat.y.device) if anchor is not None and self.step.is_random else None
            found, loss, logged = self.step.gradients(views, group.batch, group.batch_idx)
            grads.append([g.reshape(len(g), -1) for g in found])
            means.add(group, loss, logged)
            if anchor is not None:
                if restore is not None:
                    restore()
                anchors.append(self._anchor_gradients(anchor, group))
        work.take_step(_scatter(groups, grads, work), _scatter(groups, anchors, work) if anchor is not None else None)

    def _anchor_gradients(self, anchor: list[Tensor], group: BatchGroup) -> list[Tensor]:
        """Return the gradients at the anchor on the same batches, coupled weight decay included."""
        count = len(group.clients)
        if self.step.is_random:  # as many draws, in the same order, as at the clients' own parameters
            point = [v.expand(count, *v.shape) for v in anchor]
            found, _, _ = self.step.gradients(point, group.batch, group.batch_idx)
        else:
            found, _, _ = self.step.gradients(anchor, group.batch, group.batch_idx, shared=True)
        out = []
        for g, v, decay in zip(found, anchor, self.optimizer.decay, strict=True):
            out.append((g.add(v, alpha=decay) if decay else g).reshape(count, -1))
        return out

    def _clipping(self) -> Clipping | None:
        trainer = self.trainer
        if (corrected := trainer.fit_loop.corrected_clip) is not None:
            return Clipping(corrected[0], str(getattr(corrected[1], "value", corrected[1])), corrected=True)
        if not trainer.gradient_clip_val:
            return None
        algorithm = trainer.gradient_clip_algorithm or "norm"
        return Clipping(float(trainer.gradient_clip_val), str(getattr(algorithm, "value", algorithm)), corrected=False)

    def _log(self, means: "_Means") -> None:
        """Hand the chunk's means to Lightning, as one value each with the weight of all its examples."""
        module = self.trainer.lightning_module
        previous, module._current_fx_name = module._current_fx_name, "training_step"
        results = self.trainer.fit_loop.epoch_loop._results
        with results.of_client(module):
            for name, (value, weight, options) in means.overall().items():
                module.log(name, value, **{**options, "batch_size": weight})
        results.close_client()
        module._current_fx_name = previous

    def _errors_of(self, plans: Sequence[WorkPlan], round: int) -> Any:
        names = [plan.participant.client_id for plan in plans]
        what = "its local work" if len(names) == 1 else f"the local work that it did at once with {names[1:]}"
        return self.errors_of(plans[0], round, what)


class _Reorder:
    """Bring rows into the cohort's order; what is one tensor stays one tensor.

    Args:
        back: The row of each client.
        device: Where the rows live.
    """

    def __init__(self, back: Sequence[int], device: torch.device) -> None:
        self._back = None if list(back) == list(range(len(back))) else torch.tensor(back, device=device)
        self._moved: dict[int, Tensor] = {}

    def __call__(self, value: Tensor) -> Tensor:
        """Return the tensor [S, ...] with its rows in order."""
        if self._back is None:
            return value
        if value.numel() == len(self._back):
            return value[self._back]
        if value.data_ptr() not in self._moved:
            self._moved[value.data_ptr()] = value[self._back]
        return self._moved[value.data_ptr()]


class _Means:
    """Running example-weighted means of losses and logged values, client by client."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._count = count
        self._zeros = torch.zeros(count, dtype=accumulation_dtype(device), device=device)
        self._totals: dict[str, Tensor] = {}
        self._weights: dict[str, list[int]] = {}
        self._options: dict[str, dict[str, Any]] = {}

    def add(self, group: BatchGroup, loss: Tensor, logged: dict[str, Logged]) -> None:
        """Add a step of some clients, whose batches have as many examples each."""
        self._add("", group, loss, None)
        for name, log in logged.items():
            self._options[name] = log.options
            self._add(f".{name}", group, log.value, log.options.get("batch_size"))

    def _add(self, key: str, group: BatchGroup, value: Tensor, batch_size: int | None) -> None:
        if key not in self._totals:
            self._totals[key], self._weights[key] = self._zeros.clone(), [0] * self._count
        weight = group.examples if batch_size is None else batch_size
        total, weights = self._totals[key], self._weights[key]
        if isinstance(group.rows, slice):
            total[group.rows].add_(value.detach(), alpha=weight)
        else:
            total.index_add_(0, group.rows.to(total.device), value.detach().to(total.dtype), alpha=weight)
        for client in group.clients:
            weights[client] += weight

    def of_clients(self, back: Sequence[int]) -> tuple[list[float], dict[str, list[float]]]:
        """Return each client's mean loss and its means of what was logged, in the order ``back``."""
        means = {}
        for key, total in self._totals.items():
            sums, weights = total.tolist(), self._weights[key]
            means[key] = [sums[i] / weights[i] if weights[i] else float("nan") for i in back]
        loss = means.pop("", [float("nan")] * self._count)
        return loss, {key[1:]: values for key, values in means.items()}

    def overall(self) -> dict[str, tuple[Tensor, int, dict[str, Any]]]:
        """Return the mean over all clients, its weight and the options of ``self.log``, by name."""
        out = {}
        for name, options in self._options.items():
            weight = sum(self._weights[f".{name}"])
            out[name] = (self._totals[f".{name}"].sum() / weight, weight, options)
        return out


def _scatter(groups: Sequence[BatchGroup], parts: Sequence[Sequence[Tensor]], work: StackedWork) -> Sequence[Tensor]:
    """Bring the groups' gradients [n, n_p] into the clients' order."""
    if len(groups) == 1:
        return parts[0]
    out = [torch.empty_like(column) for column in work.columns]
    for group, columns in zip(groups, parts, strict=True):
        for whole, part in zip(out, columns, strict=True):
            whole[group.rows] = part
    return out


def _stack(states: Sequence[State]) -> State:
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def _chunk_size(y: Vector) -> int:
    """Return how many clients to run at once: what fits the cache of a processor, or the memory of a GPU."""
    if y.device.type == "cpu":
        return max(1, min(128, 2**22 // y.numel()))
    free, _ = torch.cuda.mem_get_info(y.device) if y.device.type == "cuda" else (2**33, 0)
    return max(1, min(1024, free // (16 * y.numel() * y.element_size())))


def check_settings(engine: Engine) -> None:
    """Refuse what cannot be run for several clients at once.

    Raises:
        FederatedError: Naming the setting, hook or optimizer, and the way out.
    """
    trainer, module = engine.trainer, engine.trainer.lightning_module
    reason = None
    hooks = overridden_hooks(trainer)
    base = engine.optimizer.base
    if hooks:
        reason = f"{hooks[0]} is called for every batch of every client, and here clients share a step"
    elif type(base) not in ELEMENTWISE:
        reason = f"the step of {type(base).__name__} is not elementwise, or not known to be"
    elif base._optimizer_step_pre_hooks or base._optimizer_step_post_hooks:
        reason = "the local optimizer has step hooks, and here clients share a step"
    elif getattr(trainer.precision_plugin, "scaler", None) is not None:
        reason = f"precision={trainer.precision!r} scales the loss, and clients would have to skip steps on their own"
    elif trainer.accumulate_grad_batches != 1:
        reason = f"accumulate_grad_batches={trainer.accumulate_grad_batches} is not offered"
    elif engine.keeps_solver:
        reason = "local_optimizer_state='keep' is not offered: kept states may differ in their numbers of steps"
    elif engine.buffers.mode == "local" and engine.buffers.server:
        reason = "buffers='local' is not offered"
    if reason is not None:
        raise FederatedError(
            f"engine='vectorized' cannot run {type(module).__name__}: {reason}. Change that, or use"
            " engine='sequential'."
        )
