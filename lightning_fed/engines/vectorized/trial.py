"""Checks that settings and module allow several clients at once: a trial step, and a tracker of later changes."""

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.modules.batchnorm import _NormBase

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import MisconfigurationException, is_overridden, rank_zero_warn
from lightning_fed.core.devices import is_out_of_memory, peak_memory, reset_peak_memory
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.seeds import capture_random_state, foreign_state, preserved_random_state, random_state
from lightning_fed.core.torch_optimizers import coupled_decay, has_step_hooks
from lightning_fed.engines.base import Engine, OnlySequentialError, changed_since_trial
from lightning_fed.engines.batch_hooks import hooked_parameter, overridden_hooks, plugin_step_hooks
from lightning_fed.engines.changes import (
    METRICS,
    Key,
    Snapshot,
    TensorCopies,
    TensorMarks,
    attribute_tensors,
    attributes_of,
    own_tensors,
    parts_of,
    parts_of_method,
    without_metrics,
)
from lightning_fed.engines.client_errors import SHARED_STATE, summary_of
from lightning_fed.engines.local_schedule import LocalOptions
from lightning_fed.engines.vectorized.batches import BatchGroup
from lightning_fed.engines.vectorized.chunk_work import ELEMENTWISE
from lightning_fed.engines.vectorized.module_step import ModuleStep, OwnStep, OwnStreams, Reads

_TOLERANCE = 1e-2  # tolerance of two gradients of one step, relative to the largest
_ROUNDING = 1e-1  # the same in half precision
_LOW = (torch.bfloat16, torch.float16)
_SEED = 0x6C61777320  # seeds the trial; steps are unlikely to set it themselves
_WARN_AFTER = 3  # consecutive rounds that begin with a changed attribute


class StepState:
    """A module's state before a step: parameters, buffers, metrics, attributes and classes, with submodules."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.foreign = foreign_state()
        parts = list(parts_of(module))
        self._marks = TensorMarks(module, with_trained=True)
        self._copies = TensorCopies([*own_tensors(parts), *attribute_tensors(parts)])
        self._metrics = Snapshot(own for own in parts if isinstance(own[1], METRICS))  # only to restore them
        self._attributes = attributes_of(module)
        self._accepted: Snapshot | None = None

    def changed_tensor(self, kind: str) -> str | None:
        """Return the name of a "buffer", "parameter" or "metric" that was assigned, written, added or removed."""
        key = self._marks.changed(kind) or next((key for key, *_ in self._copies.changed(kind)), None)
        return None if key is None else key[1]

    def notes(self) -> list[tuple[dict[str, Any], str, str]]:
        """Return the attributes that were None and are strings now, if no others have changed.

        Each is the dictionary that holds it, its name, and a new copy of its value, which this also stores there.
        """
        filled = [(held, key, held[key]) for held, key in self._attributes.filled()]
        # Python has one object for all equal strings of one character
        some = [own for own in filled if type(own[2]) is str and len(own[2]) > 1]
        notes = [(held, key, "".join(list(note))) for held, key, note in some]
        for held, name, _ in notes:
            held[name] = None
        other = self._attributes.changed() if notes else None
        for held, name, note in notes:
            held[name] = note
        return notes if other is None else []

    def accept(self) -> Snapshot:
        """Treat the current attributes as unchanged, and return their snapshot; :meth:`restore` is unaffected."""
        self._accepted = Snapshot(without_metrics(self.module))
        return self._accepted

    def changed_attribute(self) -> str | None:
        """Return the name of a changed attribute of a module or of its class."""
        key = (self._accepted or self._attributes).changed()
        key = key or next((key for key, *_ in self._copies.changed("attribute")), None)
        return None if key is None else key[1]

    def restore(self) -> None:
        """Restore the modules' attributes, tensors and metrics, with their values and contents."""
        self._attributes.restore()
        self._metrics.restore()
        self._copies.restore()


class TrialStep:
    """Tries a module's ``training_step`` on one batch, to check whether it is random and may be traced.

    ``at_once`` is the number of clients that take a step at once: two, or one if a device does not fit two.
    """

    def __init__(self, step: ModuleStep, at_once: int = 2) -> None:
        self.step, self.at_once = step, at_once
        self.module = step.module
        self.step_bytes = 0  # the device memory of one client's gradient; 0 if unknown

    def run(self, group: BatchGroup) -> None:
        """Raise if a step of two clients on one batch differs from two separate steps; restore the module.

        A non-finite gradient raises ``ClientError``, since another client's batch may work.
        """
        step, batch = self.step, (group.leaves, group.spec, group.batch_idx)
        step.is_random = True  # until known
        self._check_memory()
        with preserved_random_state(step.flat.y.device), step.recording():
            torch.default_generator.manual_seed(_SEED)
            before, random = StepState(self.module), random_state(step.flat.y.device)
            self._options = LocalOptions(step.trainer.optimizers[0], step.trainer.lr_scheduler_configs)
            try:
                # alone first: under vmap, a step that assigns to a parameter's `.data` ends the process
                draw_again = capture_random_state(step.flat.y.device)
                with OwnStreams() as streams:
                    _, loss, values = step.own_gradient(step.flat.views, *batch)
                first = OwnStep(loss, values, step.sizes)
                noted = self._noted(before, first, group, draw_again)
                self._check_state(before)
                if streams.found is not None:
                    raise self._refusal(
                        f"it {streams.found}, which gives clients at once other numbers than one after another; draw"
                        " from torch's global generator, which the run seeds for them"
                    )
                if noted is not None:
                    before.restore()  # clients at once must note the same, in a step that cannot depend on numbers
                grads = self._measured(step.flat.views, *batch)
                self._check_state(before)
                step.is_random = random != random_state(step.flat.y.device)
                if not step.is_random:
                    self._check_repeats(first, group)
                    self._check_state(before)
                    self._check_values(grads, group)
                with Reads(step.flat) as reads:
                    self._of_several(step.flat.views, *batch)
                if reads.found is not None:
                    raise self._refusal(
                        f"it uses the parameter {reads.found!r} from elsewhere than its layer, such as from a list, and"
                        " only layers have each client's values here; read it there, as self.parameters() does"
                    )
                if reads.caught is not None:
                    raise self._refusal(
                        f"it goes on after an error of PyTorch ({summary_of(reads.caught)}), which several clients at"
                        " once may have for other reasons than one; let the error end the step"
                    )
                # anomaly detection reads the gradients' numbers, which a trace does not have
                if step.is_random or reads.values or self._reads_trainer(group) or torch.is_anomaly_enabled():
                    step.traces.forbid()
            except FederatedError:
                raise
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                if isinstance(error, MisconfigurationException) and "self.log()" in str(error):
                    raise self._refusal(
                        "it logs by a method that was taken from the module before, and here self.log(...) is another"
                        " function during a step; call it as self.log(...)"
                    ) from error
                self._check_metrics(before)
                before.restore()  # clients at once may have left state that one cannot use
                step.own_gradient(step.flat.views, *batch)  # an error of one client alone is raised unchanged
                self._check_statistics()
                self._check_recurrent(_layers_of(error), SHARED_STATE in str(error))
                self._check_state(before)
                raise self._refusal(f"it cannot be run for several clients at once ({summary_of(error)})") from error
            finally:
                before.restore()
                self._options.take_back()
            if noted is not None:
                noted.restore()

    def _check_memory(self) -> None:
        """Raise if an attribute is a view of the parameters (a hook may make one): each client has its own here."""
        memory = self.step.flat.y.untyped_storage().data_ptr()
        trained = {id(p) for p in self.step.flat.params}
        for (_, name), value in attribute_tensors(parts_of(self.module)):
            is_dense = value.layout is torch.strided and not value.is_nested
            if is_dense and id(value) not in trained and value.untyped_storage().data_ptr() == memory:
                raise self._refusal(
                    f"its attribute {name!r} is in the memory of the parameters, and each client has its own here; keep"
                    " a copy, by clone()"
                )

    def _noted(
        self, before: StepState, first: OwnStep, group: BatchGroup, draw_again: Callable[[], None]
    ) -> Snapshot | None:
        """Accept strings that only the first step stores in place of None; return a snapshot with them, or None.

        Hugging Face's classifiers store the kind of their labels this way. A second step must give the same result, and
        must not write the strings again: it might write others later.
        """
        notes = before.notes() if self.at_once > 1 else []  # a step of one client may read numbers
        if not notes:
            return None
        draw_again()
        self._check_repeats(first, group)
        is_once = all(held.get(name) is note for held, name, note in notes)
        return before.accept() if is_once and before.notes() else None

    def _check_values(self, grads: Sequence[Tensor], group: BatchGroup) -> None:
        """Compare with the gradient of one client, to detect operations that ``vmap`` gets wrong.

        In half precision, both are recomputed in float32 if the module runs in float32.
        """
        step, views, leaves, batch = self.step, self.step.flat.views, group.leaves, (group.spec, group.batch_idx)
        tolerance = _TOLERANCE
        plugins = pl.plugins.precision
        if isinstance(step.trainer.precision_plugin, (plugins.MixedPrecision, plugins.HalfPrecision)):
            try:
                with _at_full_precision(step):
                    views, leaves = _raised(views), _raised(leaves)
                    grads, own = self._of_several(views, leaves, *batch), step.own_gradient(views, leaves, *batch)[0]
            except Exception:
                own, tolerance = step.own_gradient(step.flat.views, group.leaves, *batch)[0], _ROUNDING
        else:
            own = step.own_gradient(views, leaves, *batch)[0]
        single = [torch.zeros_like(v) if g is None else g for g, v in zip(own, views, strict=True)]
        scale = max(float(g.abs().max()) for g in single) or 1.0
        if not all(bool(torch.isfinite(g).all()) for g in single):
            raise ClientError("its first gradient is not finite, so nothing can be compared with it.")
        for name, one, other in zip(self.step.flat.names, single, grads, strict=True):
            if not torch.allclose(one[None], other, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
                raise self._refusal(f"the gradient of {name!r} of several clients at once differs from that of one")

    def _measured(self, *step: Any) -> list[Tensor]:
        """Return the result of :meth:`_of_several`, and record its device memory, if known."""
        device = self.step.flat.y.device
        if device.type == "cpu" or not reset_peak_memory(device):
            return self._of_several(*step)
        before = peak_memory(device)
        grads = self._of_several(*step)
        self.step_bytes = -(-(peak_memory(device) - before) // self.at_once)
        return grads

    def _of_several(self, views: Sequence[Tensor], leaves: Sequence[Tensor], spec: Any, batch_idx: int) -> list[Tensor]:
        """Return the gradients [S, ...] of several equal clients, computed at once."""
        views, count = [v.detach() for v in views], self.at_once
        if count == 1:
            return [g[None] for g in self.step.gradient(views, leaves, spec, batch_idx)[0]]
        take = vmap(lambda y, leaves: self.step.gradient(y, leaves, spec, batch_idx), randomness="different")
        grads, _, _ = take([torch.stack([v] * count) for v in views], [torch.stack([v] * count) for v in leaves])
        return list(grads)

    def _check_repeats(self, first: OwnStep, group: BatchGroup) -> None:
        """Raise if a repeated step gives another result: it then has hidden state or reads gradients."""
        step, params = self.step, self.step.flat.params
        grads = [p.grad for p in params]
        for p in params:
            p.grad = torch.ones_like(p)  # an earlier step leaves one; clients at once leave none
        try:
            again = step.own_step(step.flat.views, group.leaves, group.spec, group.batch_idx)
        finally:
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad
        what = None
        if not step.agrees(again.loss, first.loss):
            what = "another loss"
        elif again.sizes != first.sizes:
            what = "other names or batch sizes to self.log"
        elif (name := step.other_value(again.values, first.values)) is not None:
            what = f"another value to self.log({name!r}, ...)"
        if what is not None:
            raise self._refusal(
                f"it gives {what} when it is called again on the same batch, so it keeps something between calls"
                " (a global variable, say), or reads the gradients of the step before"
            )

    def _check_state(self, before: StepState) -> None:
        """Raise if a step has side effects, since clients at once would share them or lose them."""
        if (buffer := before.changed_tensor("buffer")) is not None:
            self._check_statistics()
            raise self._refusal(f"it changes the buffer {buffer!r}")
        self._check_metrics(before)
        if (parameter := before.changed_tensor("parameter")) is not None:
            raise self._refusal(f"it changes the parameter {parameter!r} in place")
        if (attribute := before.changed_attribute()) is not None:
            owner, _, name = attribute.rpartition(".")
            layer = dict(parts_of(self.module)).get(owner) if name.startswith("_flat_weight") else None
            self._check_recurrent([] if layer is None else [layer])
            raise self._refusal(f"it changes the attribute {attribute!r}")
        option, schedule = self._options.take_back()
        if option is not None:
            raise self._refusal(f"it changes {option!r} of the local optimizer, which is that of several clients here")
        if schedule is not None:
            raise self._refusal(f"it steps the schedule {schedule}")
        if foreign_state() != before.foreign:
            raise self._refusal("it draws from Python's or NumPy's generator, once for all clients; draw from torch's")

    def _check_recurrent(self, layers: Iterable[nn.Module], shares_state: bool = False) -> None:
        """Raise if a step failed in a recurrent layer.

        A trained layer caches its weights, and would keep the weights of several clients. A frozen layer works for
        several clients, except for its initial state, which it creates for one.
        """
        names = {layer: name for name, layer in self.module.named_modules()}
        for layer in layers:
            if isinstance(layer, nn.RNNBase) and layer in names:
                kind, trained = type(layer).__name__, {id(p) for p in self.step.flat.params}
                if shares_state and not any(id(p) in trained for p in layer.parameters()):
                    raise self._refusal(
                        f"its frozen layer {names[layer]!r} ({kind}) starts from a state that all clients share; pass"
                        " it a first state made from its input, by x.new_zeros()"
                    )
                raise self._refusal(
                    f"PyTorch runs its layer {names[layer]!r} ({kind}) for one client at a time only; a loop of"
                    f" nn.{layer.mode.split('_')[0]}Cell can be run for several, if its first state is made from the"
                    " input, by x.new_zeros()"
                )

    def _check_statistics(self) -> None:
        """Raise for a layer with running statistics, once a step is known to have side effects or to fail."""
        for name, layer in self.module.named_modules():
            if isinstance(layer, _NormBase) and layer.training and layer.track_running_stats:
                raise self._refusal(
                    f"its layer {name!r} ({type(layer).__name__}) moves running statistics, of which there is one set"
                    " for all clients at once; GroupNorm and LayerNorm have none"
                )

    def _check_metrics(self, before: StepState) -> None:
        if (metric := before.changed_tensor("metric")) is not None:
            raise self._refusal(
                f"it updates the metric {metric!r}; log a functional metric, or the loss alone, in training_step"
            )

    def _reads_trainer(self, group: BatchGroup) -> bool:
        """Return whether the step reads its trainer, whose values such as the round change between calls."""
        tracker: Any = _ReadTracker(self.module._trainer)
        self.module._trainer = tracker
        try:
            self.step.own_step(self.step.flat.views, group.leaves, group.spec, group.batch_idx)
        finally:
            self.module._trainer = object.__getattribute__(tracker, "tracked")
        return bool(object.__getattribute__(tracker, "read"))

    def _refusal(self, reason: str) -> FederatedError:
        name = type(self.module).__name__
        return FederatedError(
            f"engine='vectorized' cannot take {name}.training_step: {reason}. Change that, or use engine='sequential'."
        )


def _layers_of(error: Exception) -> Iterator[nn.Module]:
    """Yield the modules whose methods raised an error, innermost first."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            yield owner


@contextmanager
def _at_full_precision(step: ModuleStep) -> Iterator[None]:
    """Inside, run a module's step in float32, with the same values of parameters and buffers; restore them on exit.

    Gradients of the same step for several clients and for one differ by rounding. In half precision this is a
    hundredth, and much more after cancellation, such as for a model that fits its data.
    """
    held = [(t, t.data) for t in (*step.module.parameters(), *step.module.buffers()) if t.dtype in _LOW]
    context = step.context
    try:
        for t, values in held:
            t.data = values.float()
        step.context = nullcontext
        yield
    finally:
        step.context = context
        for t, values in held:
            t.data = values
        step.flat.bind()


def _raised(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors, with half precision converted to float32."""
    return [t.float() if t.dtype in _LOW else t for t in tensors]


class _ReadTracker:
    """Wraps an object, and records whether any attribute was read."""

    def __init__(self, tracked: Any) -> None:
        self.tracked = tracked
        self.read = False

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__"):  # isinstance() reads __class__
            object.__setattr__(self, "read", True)
        return getattr(object.__getattribute__(self, "tracked"), name)


class ChangeTracker:
    """Ensures that nothing changes between clients that run at once."""

    def __init__(self, trainer: pl.Trainer, algorithm: Algorithm) -> None:
        self.algorithm = algorithm
        self.module = trainer.lightning_module
        self._attributes = Snapshot()
        self._parts: Sequence[tuple[str, nn.Module]] = ()  # of the module in this round; a new one changes attributes
        self._tensors: TensorMarks | None = None  # see begin_work
        self._worked = 0  # how many times clients have worked in this round
        self._in_a_row = 0  # consecutive rounds before which an attribute changed

    def remember(self) -> None:
        """Record all attributes."""
        self._attributes = attributes_of(self.module)
        for name, part in parts_of_method(self.algorithm):
            self._attributes.add("attribute", f"algorithm.{name}", part)

    def begin_round(self) -> bool:
        """Return whether an attribute has changed since the last record, and record all if so.

        A buffer or frozen parameter counts if it is another object: traces have the old one.
        """
        self._worked, self._parts = 0, list(parts_of(self.module))
        found = self._attributes.changed(replaced=True)
        self._in_a_row = 0 if found is None else self._in_a_row + 1
        if found is not None and self._in_a_row == _WARN_AFTER:
            rank_zero_warn(
                f"The attribute {found[1]!r} of {type(self.module).__name__} changes from round to round, so that"
                " engine='vectorized' repeats its trial step and its traces in each, which is slow. If no step reads"
                " it, keep it elsewhere, such as in a callback. Otherwise, use engine='sequential'."
            )
        if found is not None:
            self.remember()
        return found is not None

    def begin_work(self) -> None:
        """Record buffers, metrics and frozen parameters before clients work."""
        self._tensors = TensorMarks(self.module, parts=self._parts)

    def check_work(self) -> None:
        """Raise if ``training_step`` has begun to have side effects.

        Attributes are compared after the first clients of a round, and by :meth:`end_round`. Tensors are compared after
        all clients: the next one would overwrite the changes of a client that runs alone.
        """
        self._worked += 1
        assert self._tensors is not None
        found = self._attributes.changed() if self._worked == 1 else None
        self._check(found or self._tensors.changed())
        self._tensors = None

    def end_round(self) -> None:
        """Raise if later clients' work changed an attribute: other clients of the chunk have not seen the new value."""
        if self._worked > 1:
            self._check(self._attributes.changed())

    def _check(self, found: Key | None) -> None:
        if found is None:
            return
        self._attributes.restore()  # the sequential engine may restart the round
        is_undone = self._attributes.changed() is None and (self._tensors is None or self._tensors.changed() is None)
        # numbers in tensors cannot be restored, and may have changed undetected
        is_undone &= next(attribute_tensors(without_metrics(self.module)), None) is None
        what = f"changes the {found[0]} {found[1]!r} of {type(self.module).__name__}"
        raise changed_since_trial(self.module, what, kind=OnlySequentialError if is_undone else FederatedError)


def check_settings(engine: Engine) -> None:
    """Raise for a setting, hook or optimizer that does not support several clients at once."""
    trainer, module = engine.trainer, engine.trainer.lightning_module
    reason = None
    hooks = [*overridden_hooks(trainer), *plugin_step_hooks(trainer)]
    base = engine.optimizer.base
    decouples = any(group.get("weight_decay") and not coupled_decay(base, group) for group in base.param_groups)
    hooked = hooked_parameter(module)
    schedulers = [c for c in trainer.callbacks if isinstance(c, pl.callbacks.GradientAccumulationScheduler)]
    if engine.split.size > 1:
        reason = "strategy='ddp' runs one client on several devices, and here several clients share one"
    elif hooks:
        reason = f"{hooks[0]} is called for every batch of every client, and here clients share a step"
    elif is_overridden("log", module, pl.LightningModule):
        reason = "it has a log() of its own, and here values are logged once a round, as their means"
    elif hooked is not None:
        reason = f"its parameter {hooked!r} has a hook, and here a gradient is that of several clients"
    elif type(base) not in ELEMENTWISE:
        reason = f"the step of {type(base).__name__} is not elementwise, or not known to be"
    elif has_step_hooks(base):
        reason = "the local optimizer has step hooks, and here clients share a step"
    elif getattr(trainer.precision_plugin, "scaler", None) is not None:
        reason = f"precision={trainer.precision!r} scales the loss, and clients would have to skip steps on their own"
    elif trainer.accumulate_grad_batches != 1:
        reason = f"accumulate_grad_batches={trainer.accumulate_grad_batches} is not offered"
    elif any(scheduler.going_to_accumulate_grad_batches() for scheduler in schedulers):
        reason = "GradientAccumulationScheduler asks for steps over several batches, which are not offered"
    elif engine.keeps_solver:
        reason = "local_optimizer_state='keep' is not offered: kept states may differ in their numbers of steps"
    elif engine.algorithm.trains != "all" and decouples:
        reason = f"{type(engine.algorithm).__name__} lets parameters rest that the weight decay of AdamW would move"
    elif engine.buffers.kept:
        reason = f"clients keep their own buffers, such as {min(engine.buffers.kept)!r}, which is not offered"
    if reason is not None:
        raise FederatedError(
            f"engine='vectorized' cannot run {type(module).__name__}: {reason}. Change that, or use"
            " engine='sequential'."
        )
