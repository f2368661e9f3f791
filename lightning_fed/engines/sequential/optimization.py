"""Lightning's automatic optimization, plus a second gradient on the same batch if the method needs one."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.callbacks.base import uses_hook
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import (
    Closure,
    ClosureResult,
    PassThroughProfiler,
    _AutomaticOptimization,
    call,
    is_overridden,
)
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.seeds import capture_random_state, preserved_random_state
from lightning_fed.core.types import Vector
from lightning_fed.engines.batch_hooks import CALLBACK_STEP_HOOKS, STEP_HOOKS, plugin_step_hooks
from lightning_fed.engines.example_gradients import ExampleGradients
from lightning_fed.engines.gradients import GradientPass, check_loss
from lightning_fed.engines.optimizer import FederatedOptimizer
from lightning_fed.strategies import ClientsStrategy
from lightning_fed.strategies.ddp import split_of
from lightning_fed.strategies.split import NO_EXAMPLES, BatchSplit

_NO_CONTEXT = nullcontext()


class ClientOptimization(_AutomaticOptimization):
    """Lightning's automatic optimization, plus a second gradient on the same batch if the method needs one.

    At an anchor, which is known in advance, it is computed before the first one. At a point that depends on the first
    one, the optimizer calls :meth:`second_gradient` after backward.

    If no module, callback or plugin overrides a hook between batch and step, and there is no gradient scaler, a fast
    path makes the same calls without looking up each hook: the same bits in a fraction of the time.
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
        self._has_context = True  # around forward passes

    def prepare(self, callbacks: Sequence[pl.Callback]) -> None:
        """Check once per fit whether only forward and backward happen between batch and step."""
        trainer, module = self.trainer, self.trainer.lightning_module
        self._module, self._precision = module, trainer.precision_plugin  # properties that take several calls a step
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
            and not plugin_step_hooks(trainer)
            and not any(is_overridden(hook, module, pl.LightningModule) for hook in STEP_HOOKS)
            and not any(uses_hook(callback, hook) for callback in callbacks for hook in CALLBACK_STEP_HOOKS)
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
        if self.anchor_grad is not None:
            with preserved_random_state(self.anchor_grad.device):
                self._add_gradient(self.anchor_point, kwargs["batch"], batch_idx, self.anchor_grad)
        if self.looks_ahead:
            self._current_batch = kwargs["batch"], batch_idx, capture_random_state(self.trainer.strategy.root_device)
        trainer = self.trainer  # a callback may have changed these
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
        """Step with the noisy gradient, also for an empty sample of the client's examples."""
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
        """Add the gradient at a point, weight decay included, on a step's batch; its first batch resets the sum."""
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
