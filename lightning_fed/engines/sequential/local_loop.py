"""Lightning's training epoch loop and automatic optimization, reused for each client."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.compat.package import pl
from lightning_fed.compat.private import (
    Closure,
    ClosureResult,
    PassThroughProfiler,
    _AutomaticOptimization,
    _DataFetcher,
    _TrainingEpochLoop,
    call,
    is_overridden,
    is_param_in_hook_signature,
    rank_zero_warn,
)
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.seeds import capture_random_state, preserved_random_state
from lightning_fed.core.types import Vector
from lightning_fed.data.batches.batches import own_copy
from lightning_fed.engines.batch_hooks import (
    STEP_HOOKS,
    has_transfer_hooks,
    is_users_own,
    overridden_hooks,
    plugin_step_hooks,
    uses_batch_hook,
)
from lightning_fed.engines.example_gradients import ExampleGradients
from lightning_fed.engines.gradients import GradientPass, check_loss
from lightning_fed.engines.logged import RoundResults
from lightning_fed.engines.optimizer import FederatedOptimizer
from lightning_fed.engines.sequential.readings import ClientNumbers
from lightning_fed.strategies import ClientsStrategy
from lightning_fed.strategies.ddp import split_of
from lightning_fed.strategies.split import NO_EXAMPLES, BatchSplit

_NO_CONTEXT = nullcontext()


class ClientOptimization(_AutomaticOptimization):
    """Lightning's automatic optimization, plus a second gradient on the same batch if the method needs one.

    An anchor is known in advance, so its gradient is computed before the first one. If the point depends on the first
    gradient, the optimizer calls :meth:`second_gradient` after backward.

    A fast path makes the same calls without looking up each hook: the same bits in a fraction of the time. It applies
    if no module, callback or plugin overrides a hook between batch and step, no optimizer may read the loss, and there
    is no gradient scaler.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer)
        self.gradients: GradientPass | None = None
        self.anchor_point: list[Tensor] = []
        self.anchor_grad: Vector | None = None
        self.decay: list[float] = []  # coupled, per parameter
        self.private: ExampleGradients | None = None  # with record-level privacy
        self.looks_ahead = False  # whether the optimizer will request a second gradient
        self._current_batch: tuple[Any, int, Callable[[], None]] | None = None  # batch, index, and how to draw again
        self.split = BatchSplit()
        self.has_fast_path = False
        self._has_context = True  # whether forward passes run in a context

    def prepare(self, reads_loss: bool) -> None:
        """Check once per fit whether only forward and backward happen between batch and step.

        ``reads_loss`` tells whether the optimizer may read the loss, which the fast path does not pass on.
        """
        trainer, module = self.trainer, self.trainer.lightning_module
        self._module, self._precision = module, trainer.precision_plugin  # cached: properties take several calls
        self.split = split_of(trainer)
        self._has_context = any(
            getattr(type(trainer.precision_plugin), name) is not getattr(pl.plugins.precision.Precision, name)
            for name in ("train_step_context", "forward_context")
        )
        self.has_fast_path = (
            type(trainer.precision_plugin).optimizer_step
            in (pl.plugins.precision.Precision.optimizer_step, pl.plugins.precision.MixedPrecision.optimizer_step)
            and getattr(trainer.precision_plugin, "scaler", None) is None
            and type(trainer.strategy) in (pl.strategies.SingleDeviceStrategy, ClientsStrategy)
            and isinstance(trainer.profiler, PassThroughProfiler)
            and trainer.accumulate_grad_batches == 1
            and not trainer.gradient_clip_val
            and not reads_loss
            and not plugin_step_hooks(trainer)
            and not overridden_hooks(trainer, of_batches=())
        )

    def rest(self) -> None:
        """Release the engine's gradients and the last batch at the end of a fit."""
        self.gradients = self.anchor_grad = self._current_batch = self.private = None
        self.anchor_point = []

    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict) -> dict[str, Any]:  # type: ignore[type-arg]
        """Compute the anchor gradient on this batch, if any, then train on the batch."""
        if self.private is not None:
            return self._run_private(self.private, optimizer, batch_idx, kwargs)
        if self.anchor_grad is not None or self.looks_ahead:
            assert isinstance(optimizer, FederatedOptimizer)
            self.decay = optimizer.decay  # a hook may have changed it since the last step
            second = kwargs["batch"]
            if second is not NO_EXAMPLES:  # training_step may write into its batch
                second = own_copy(second)
        if self.anchor_grad is not None:
            with preserved_random_state(self.anchor_grad.device):
                self._add_gradient(self.anchor_point, second, batch_idx, self.anchor_grad)
        if self.looks_ahead:
            self._current_batch = second, batch_idx, capture_random_state(self.trainer.strategy.root_device)
        trainer = self.trainer  # a callback may have changed its settings
        if self.has_fast_path and trainer.accumulate_grad_batches == 1 and not trainer.gradient_clip_val:
            return self._run_fast_path(optimizer, kwargs)
        return super().run(optimizer, batch_idx, kwargs)

    def _run_fast_path(self, optimizer: Optimizer, kwargs: OrderedDict) -> dict[str, Any]:  # type: ignore[type-arg]
        module, precision = self._module, self._precision
        with torch.enable_grad():
            attributes = module.__dict__  # an assignment would use the slow nn.Module.__setattr__
            previous, attributes["_current_fx_name"] = attributes["_current_fx_name"], "training_step"
            with precision.train_step_context() if self._has_context else _NO_CONTEXT:
                output = module.training_step(*kwargs.values())
            attributes["_current_fx_name"] = previous
            if isinstance(output, Tensor) and output.is_floating_point():
                result = ClosureResult(output)  # without Lightning's division by one accumulated batch
            else:
                result = ClosureResult.from_training_step_output(output)
            optimizer.zero_grad()
            loss = result.closure_loss
            if loss is None:
                Closure.warning_cache.warn("`training_step` returned `None`: the batch does not count as a local step.")
            else:
                check_loss(loss)
                loss.backward()
        optimizer.step()
        return {} if loss is None else result.asdict()

    def _run_private(
        self,
        private: ExampleGradients,
        optimizer: Optimizer,
        batch_idx: int,
        kwargs: OrderedDict,  # type: ignore[type-arg]
    ) -> dict[str, Any]:
        """Step with the noisy gradient, even if the sample of the client's examples is empty."""
        trainer = self.trainer
        if trainer.accumulate_grad_batches != 1 or trainer.gradient_clip_val:
            raise FederatedError(
                "A callback has set accumulate_grad_batches or gradient_clip_val, which client_privacy does not"
                " support. Leave both unset."
            )
        optimizer.zero_grad()
        examples = trainer.fit_loop.epoch_loop._results.batch_size
        assert examples is not None
        loss = private.set(kwargs["batch"], batch_idx, examples)
        optimizer.step()
        return {} if loss is None else {"loss": loss}

    def second_gradient(self, point: Vector) -> Vector:
        """Return the gradient [P] at a point [P] on the current batch, with the same random numbers."""
        assert self.gradients is not None
        assert self._current_batch is not None
        accumulated = self.trainer.accumulate_grad_batches
        if accumulated != 1:
            raise FederatedError(
                f"A callback has set accumulate_grad_batches={accumulated}, and the method takes a second gradient on"
                " the one batch of every step. Leave it at 1."
            )
        batch, batch_idx, draw_again = self._current_batch
        out = torch.empty_like(point)
        with preserved_random_state(point.device):
            draw_again()
            self._add_gradient(self.gradients.flat.layout.views(point), batch, batch_idx, out)
        return out

    def _add_gradient(self, point: Sequence[Tensor], batch: Any, batch_idx: int, out: Vector) -> None:
        """Add the gradient at a point, with weight decay, on a batch of a step; the first batch resets the sum."""
        assert self.gradients is not None
        accumulated = self.trainer.accumulate_grad_batches
        if batch_idx % accumulated == 0:
            out.zero_()
            for view, value, decay in zip(self.gradients.flat.layout.views(out), point, self.decay, strict=False):
                if decay and self.split.rank == 0:
                    view.add_(value, alpha=decay)
        if batch is not NO_EXAMPLES:
            with self.gradients.silent():
                self.gradients.add(point, batch, batch_idx, out, self.split.fraction / accumulated)
        if self.split.size > 1 and not self.trainer.fit_loop._should_accumulate():
            self.split.sum(out)

    def _make_backward_fn(self, optimizer: Optimizer) -> Callable[[Tensor], None] | None:
        backward = super()._make_backward_fn(optimizer)
        if backward is None:
            return None

        def backward_of_trained(loss: Tensor) -> None:
            backward(loss)
            assert isinstance(optimizer, FederatedOptimizer)
            optimizer.drop_resting_gradients()

        return backward_of_trained

    def _training_step(self, kwargs: OrderedDict) -> ClosureResult:  # type: ignore[type-arg]
        """Call ``training_step``; it may also return None if several processes train different clients."""
        output = call._call_strategy_hook(self.trainer, "training_step", *kwargs.values())
        result = self.output_result_cls.from_training_step_output(output, self.trainer.accumulate_grad_batches)
        check_loss(result.closure_loss)
        return result


class ClientFetcher(_DataFetcher):
    """Feeds the batches of one local epoch of one client to the training loop."""

    examples = 0  # in the last batch
    _batches: Iterator[tuple[Any, int]] = iter(())

    def bind(self, batches: Iterator[tuple[Any, int]], length: int) -> None:
        """Set the next epoch's (batch, examples) pairs, ``length`` of them."""
        self._batches, self.length, self.fetched, self.done = batches, length, 0, length == 0

    def __iter__(self) -> "ClientFetcher":
        """Return itself; :meth:`bind` starts each epoch."""
        return self

    def __next__(self) -> tuple[Any, int, int]:
        """Return the next (batch, index, dataloader index)."""
        if self.done:
            raise StopIteration
        batch, self.examples = next(self._batches)
        self.fetched += 1
        self.done = self.fetched >= (self.length or 0)
        return batch, self.fetched - 1, 0

    def teardown(self) -> None:
        """Release the data."""
        self._batches = iter(())


class ClientEpochLoop(_TrainingEpochLoop):
    """Runs one local epoch of one client per ``run(fetcher)``.

    Calls keep Lightning's order. Lightning's other work per batch is left out: validation, step loggers and schedulers
    per step. So is the collective that checks every rank for a signal: it would hang for clients of different lengths.
    Hooks that neither the module nor a callback overrides have no overhead.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer)
        self.automatic_optimization: ClientOptimization = ClientOptimization(trainer)
        self._results: RoundResults = RoundResults()
        self._losses: list[Any] = []  # the current client's batch losses: numbers, or an accelerator's tensors
        self._loss_weights: list[int] = []
        self._split = BatchSplit()
        self.own_examples = 0  # examples of the current client in this process, counted in every local epoch
        self.is_in_first_step = False  # whether this is the first step of a round's first client
        self.uses_start_hooks = False  # whether module or callbacks have on_train_batch_start
        self.schedule_step: int | None = None  # set while a schedule by local step takes a step
        self._has_warned_of_step = False
        self._own_hooks: set[str] = set()  # per-batch hooks that only the module has

    def teardown(self) -> None:
        """End a fit."""
        self.automatic_optimization.rest()
        super().teardown()

    @property
    def global_step(self) -> int:
        """The number of completed rounds: the step axis of loggers and checkpoints.

        In ``lr_scheduler_step`` of a schedule by local step, it is the number of steps that the schedule has counted.
        """
        if self.schedule_step is not None:
            return self.schedule_step
        if not self._has_warned_of_step:
            self._warn_of_global_step()
        return int(self.trainer.fit_loop.round)

    def _warn_of_global_step(self) -> None:
        """Warn if a client's step reads the number of rounds, which does not change from one step to the next.

        A hook is the module's only if no callback has it: Lightning's callbacks read it in their hooks.
        """
        module, several = self.trainer.lightning_module, self.trainer.fit_loop.runs_several
        hook = "training_step" if several else getattr(module, "_current_fx_name", None)
        if hook == "training_step" or hook in self._own_hooks:
            self._has_warned_of_step = True
            rank_zero_warn(
                f"{type(module).__name__}.{hook} reads global_step, which is the number of completed rounds: it is the"
                " same in all steps of a client, and a warm-up or an annealing by it advances once a round. Return a"
                " schedule of learning rates from configure_optimizers() with interval='step', and set local_schedule."
                " For anything else, count the steps in a buffer, or read current_epoch."
            )

    @property
    def _batches_that_stepped(self) -> int:
        return self.global_step

    @_batches_that_stepped.setter
    def _batches_that_stepped(self, value: int) -> None:
        """Ignore Lightning's count of batches, since the round is the axis."""

    @property
    def done(self) -> bool:
        """True if the local epoch is over; requests to stop take effect at the end of the round."""
        return self.batch_progress.is_last_batch

    def _should_check_val_fx(self, data_fetcher: _DataFetcher) -> bool:
        return False

    def _broadcast_sigterm_tensor(self) -> None:
        """Do nothing: every process checks for signals at every step, and informs the others afterwards."""

    def prepare(self, reads_loss: bool) -> None:
        """Find the hooks in use, once per fit; ``reads_loss`` as in :meth:`ClientOptimization.prepare`."""
        trainer, module = self.trainer, self.trainer.lightning_module
        self.takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self._precision = trainer.precision_plugin  # cached: the property takes several calls a step
        self._profiles = not isinstance(trainer.profiler, PassThroughProfiler)
        self._uses = {
            hook: self._profiles
            or is_overridden(hook, module, pl.LightningModule)
            or is_users_own(trainer.strategy, hook)
            or any(uses_batch_hook(callback, hook) for callback in trainer.callbacks)
            for hook in ("on_train_batch_start", "on_train_batch_end")
        }
        self.uses_start_hooks = self._uses["on_train_batch_start"]
        self._steps_itself = not module.automatic_optimization
        self.automatic_optimization.prepare(reads_loss)
        self._has_hooks = any(self._uses.values()) or not self.automatic_optimization.has_fast_path
        self._split = split_of(trainer)
        self._has_warned_of_step = False
        self._own_hooks = {
            hook
            for hook in (*self._uses, *STEP_HOOKS)
            if is_overridden(hook, module, pl.LightningModule)
            and not any(hasattr(callback, hook) and uses_batch_hook(callback, hook) for callback in trainer.callbacks)
        }
        self._transfers = trainer.strategy.root_device.type != "cpu" or has_transfer_hooks(trainer)

    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        """Connect the profiler to the fetcher, if there is one."""
        if self._profiles:
            data_fetcher._start_profiler = self._on_before_fetch
            data_fetcher._stop_profiler = self._on_after_fetch

    def begin_client(self) -> None:
        """Discard the losses of the last client."""
        self.own_examples = 0
        self._losses, self._loss_weights = [], []

    def close_client(self) -> ClientNumbers:
        """Return the client's losses, and the means of its logged values."""
        losses: Any = self._losses
        if losses and isinstance(losses[0], Tensor):
            losses = torch.stack(losses)
        accumulated = self.trainer.accumulate_grad_batches
        if self._split.size == 1:
            return ClientNumbers(losses, self._loss_weights, self._results.close_client(), accumulated)
        own = ClientNumbers(
            losses if isinstance(losses, list) else losses.tolist(), self._loss_weights, {}, accumulated
        )
        part = own.sum_of_losses(), sum(own.weights), self._results.client_partial()
        parts = self._split.gather(part)
        own.totals = sum(part[0] for part in parts), sum(part[1] for part in parts)
        self._results.merge_client([partial for _, _, partial in parts], self.trainer.strategy.root_device)
        own.metrics = self._results.close_client()
        return own

    def advance(self, data_fetcher: _DataFetcher) -> None:
        """Train on one batch."""
        trainer, connector = self.trainer, self.trainer._logger_connector
        assert isinstance(data_fetcher, ClientFetcher)
        trainer._signal_connector.check()
        data_fetcher._start_profiler()
        try:
            batch, batch_idx, _ = next(data_fetcher)
        finally:
            data_fetcher._stop_profiler()
        self.batch_progress.is_last_batch = data_fetcher.done
        examples = data_fetcher.examples
        strategy: Any = trainer.strategy
        if self._split.size > 1:
            if examples < self._split.size:  # a process without examples calls neither training_step nor hooks
                strategy.alone = "takes its part of a batch that has fewer examples than there are processes"
            batch, examples = self._split.take(batch, examples)
            self.own_examples += examples
        # this process only takes part in the exchange, or a random sample of the examples is empty
        is_idle = batch is NO_EXAMPLES or (batch is None and examples == 0)
        if not is_idle:
            batch = self._precision.convert_input(batch)
            if self._transfers:
                batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
                batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
        self.batch_progress.increment_ready()
        connector._first_loop_iter = connector._first_loop_iter is None  # like connector.on_batch_start()
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.is_in_first_step = connector._first_loop_iter
        self._results.batch, self._results.batch_size, self._results.dataloader_idx = batch, examples, None
        skips_epoch = self._uses["on_train_batch_start"] and not is_idle and self._start_hooks(batch, batch_idx) == -1
        if skips_epoch:
            if self._split.size > 1:
                raise FederatedError(
                    "on_train_batch_start returned -1, which skips the rest of a local epoch: processes that see"
                    " different parts of a batch may not agree on it. Use strategy='clients', which leaves batches"
                    " whole."
                )
            self.batch_progress.increment_by(0, is_last_batch=True)
            raise StopIteration
        self.batch_progress.increment_started()
        kwargs = OrderedDict(batch=batch, batch_idx=batch_idx) if self.takes_index else OrderedDict(batch=batch)
        optimizer: Any = trainer.optimizers[0]
        if self._has_hooks:  # hooks may have assigned to `.data`
            optimizer.flat.gather()
        with trainer.profiler.profile("run_training_batch") if self._profiles else _NO_CONTEXT:
            if self._steps_itself:
                output = self.manual_optimization.run(kwargs)
            else:
                output = self.automatic_optimization.run(optimizer, batch_idx, kwargs)
        self.batch_progress.increment_processed()
        loss = output.get("loss")
        if loss is not None:
            self._losses.append(loss.item() if loss.is_cpu else loss.reshape(()))
            self._loss_weights.append(examples)
        if self._uses["on_train_batch_end"] and not is_idle:
            call._call_callback_hooks(trainer, "on_train_batch_end", output, batch, batch_idx)
            call._call_lightning_module_hook(trainer, "on_train_batch_end", output, batch, batch_idx)
        self._results.batch = self._results.batch_size = None
        if self._split.size > 1:
            strategy.alone = ""
        self.batch_progress.increment_completed()

    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        """Do nothing per batch: validation, schedulers and loggers run at the end of the round."""

    def _start_hooks(self, batch: Any, batch_idx: int) -> Any:
        call._call_callback_hooks(self.trainer, "on_train_batch_start", batch, batch_idx)
        response = call._call_lightning_module_hook(self.trainer, "on_train_batch_start", batch, batch_idx)
        call._call_strategy_hook(self.trainer, "on_train_batch_start", batch, batch_idx)
        return response

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Save nothing, since the round has all state."""
        return {}

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Load nothing."""
