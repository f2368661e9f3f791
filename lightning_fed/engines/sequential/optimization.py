"""Lightning's automatic optimization, preceded by the anchor gradient where the method asks for one."""

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_fed._compat import (
    Closure,
    ClosureResult,
    PassThroughProfiler,
    _AutomaticOptimization,
    call,
    is_overridden,
)
from lightning_fed._lightning import pl
from lightning_fed.callbacks.base import uses_hook
from lightning_fed.core.seeds import preserved_random_state
from lightning_fed.core.types import Vector
from lightning_fed.engines.batch_hooks import CALLBACK_STEP_HOOKS, STEP_HOOKS
from lightning_fed.engines.gradients import GradientPass, check_loss
from lightning_fed.strategies import ClientsStrategy
from lightning_fed.strategies.ddp import split_of
from lightning_fed.strategies.split import NO_EXAMPLES, BatchSplit

__all__ = ["ClientOptimization"]


class ClientOptimization(_AutomaticOptimization):
    """Lightning's automatic optimization, preceded by the anchor gradient where the method asks for one.

    Where neither the module nor a callback overrides a hook between batch and step, and the precision has no gradient
    scaler, the same calls are made without asking for each hook in turn: the same bits, at a fraction of the time.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer)
        self.gradients: GradientPass | None = None
        self.anchor_point: list[Tensor] = []
        self.anchor_grad: Vector | None = None
        self.anchor_decay: list[float] = []
        self.split = BatchSplit()
        self._is_lean = False
        self._has_context = True  # around forward passes

    def prepare(self, callbacks: Sequence[pl.Callback]) -> None:
        """Find out, once a fit, whether anything happens between batch and step but forward and backward."""
        trainer, module = self.trainer, self.trainer.lightning_module
        self.split = split_of(trainer)
        self._has_context = any(
            getattr(type(trainer.precision_plugin), name) is not getattr(pl.plugins.precision.Precision, name)
            for name in ("train_step_context", "forward_context")
        )
        self._is_lean = (
            type(trainer.precision_plugin).optimizer_step
            in (pl.plugins.precision.Precision.optimizer_step, pl.plugins.precision.MixedPrecision.optimizer_step)
            and getattr(trainer.precision_plugin, "scaler", None) is None
            and type(trainer.strategy) in (pl.strategies.SingleDeviceStrategy, ClientsStrategy)
            and isinstance(trainer.profiler, PassThroughProfiler)
            and trainer.accumulate_grad_batches == 1
            and not trainer.gradient_clip_val
            and not any(is_overridden(hook, module, pl.LightningModule) for hook in STEP_HOOKS)
            and not any(uses_hook(callback, hook) for callback in callbacks for hook in CALLBACK_STEP_HOOKS)
        )

    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict) -> dict[str, Any]:  # type: ignore[type-arg]
        """Take the anchor gradient on this batch, then train on it."""
        if self.anchor_grad is not None:
            self._take_anchor(batch_idx, kwargs["batch"])
        trainer = self.trainer  # a callback may have changed these since
        if self._is_lean and trainer.accumulate_grad_batches == 1 and not trainer.gradient_clip_val:
            return self._run_lean(optimizer, kwargs)
        return super().run(optimizer, batch_idx, kwargs)

    def _run_lean(self, optimizer: Optimizer, kwargs: OrderedDict) -> dict[str, Any]:  # type: ignore[type-arg]
        module, precision = self.trainer.lightning_module, self.trainer.precision_plugin
        results: list[ClosureResult] = []

        def closure() -> Tensor | None:
            attributes = module.__dict__  # an assignment would go through the slow nn.Module.__setattr__
            previous, attributes["_current_fx_name"] = attributes["_current_fx_name"], "training_step"
            with precision.train_step_context() if self._has_context else nullcontext():
                output = module.training_step(*kwargs.values())
            attributes["_current_fx_name"] = previous
            if isinstance(output, Tensor) and output.is_floating_point():
                results.append(ClosureResult(output))  # without Lightning's division by one accumulated batch
            else:
                results.append(ClosureResult.from_training_step_output(output))
            optimizer.zero_grad()
            loss = results[0].closure_loss
            if loss is None:
                Closure.warning_cache.warn("`training_step` returned `None`: the batch is no local step.")
            else:
                check_loss(loss)
                loss.backward()
            return results[0].loss

        optimizer.step(closure)  # type: ignore[arg-type]
        return {} if results[0].loss is None else results[0].asdict()

    def _take_anchor(self, batch_idx: int, batch: Any) -> None:
        assert self.gradients is not None
        assert self.anchor_grad is not None
        accumulated = self.trainer.accumulate_grad_batches
        if batch_idx % accumulated == 0:
            self.anchor_grad.zero_()
            views = self.gradients.flat.layout.views(self.anchor_grad)
            for view, value, decay in zip(views, self.anchor_point, self.anchor_decay, strict=True):
                if decay and self.split.rank == 0:
                    view.add_(value, alpha=decay)
        if batch is not NO_EXAMPLES:
            scale = self.split.fraction / accumulated
            with preserved_random_state(self.anchor_grad.device), self.gradients.silent():
                self.gradients.add(self.anchor_point, batch, batch_idx, self.anchor_grad, scale)
        if self.split.size > 1 and not self.trainer.fit_loop._should_accumulate():
            self.split.sum(self.anchor_grad)

    def _training_step(self, kwargs: OrderedDict) -> ClosureResult:  # type: ignore[type-arg]
        """Call ``training_step``, which may also return None where several processes train clients of their own."""
        output = call._call_strategy_hook(self.trainer, "training_step", *kwargs.values())
        result = self.output_result_cls.from_training_step_output(output, self.trainer.accumulate_grad_batches)
        check_loss(result.closure_loss)
        return result
