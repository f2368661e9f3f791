"""Lightning's own training epoch loop and automatic optimization, reused for one client after another."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from operator import mul
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.plugins.precision import MixedPrecision, Precision
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_fed._compat import (
    ClosureResult,
    PassThroughProfiler,
    _AutomaticOptimization,
    _DataFetcher,
    _TrainingEpochLoop,
    call,
    is_overridden,
    is_param_in_hook_signature,
)
from lightning_fed.callbacks.base import uses_hook
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.seeds import preserved_random_state
from lightning_fed.core.types import Vector
from lightning_fed.engines.batch_hooks import CALLBACK_STEP_HOOKS, STEP_HOOKS, TRANSFER_HOOKS, uses_batch_hook
from lightning_fed.engines.gradients import GradientPass, check_loss
from lightning_fed.engines.logged import RoundResults
from lightning_fed.engines.sequential.split_logged import SplitResults
from lightning_fed.strategies import ClientsStrategy
from lightning_fed.strategies.ddp import split_of
from lightning_fed.strategies.split import NO_EXAMPLES, BatchSplit

__all__ = ["ClientEpochLoop", "ClientFetcher"]


class ClientFetcher(_DataFetcher):
    """Hand the batches of one local epoch of one client to the training loop."""

    def __init__(self) -> None:
        super().__init__()
        self.examples = 0
        self._batches: Iterator[tuple[Any, int]] = iter(())

    def bind(self, batches: Iterator[tuple[Any, int]], length: int) -> None:
        """Take the next epoch's (batch, examples) pairs, ``length`` of them."""
        self._batches, self.length, self.fetched, self.done = batches, length, 0, length == 0

    def __iter__(self) -> "ClientFetcher":
        """Return itself: every epoch is bound anew."""
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
        """Let go of the data."""
        self._batches = iter(())


class _ClientOptimization(_AutomaticOptimization):
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

    def prepare(self, callbacks: Sequence[Callback]) -> None:
        """Find out, once a fit, whether anything happens between batch and step but forward and backward."""
        trainer, module = self.trainer, self.trainer.lightning_module
        self.split = split_of(trainer)
        self._has_context = any(
            getattr(type(trainer.precision_plugin), name) is not getattr(Precision, name)
            for name in ("train_step_context", "forward_context")
        )
        self._is_lean = (
            type(trainer.precision_plugin).optimizer_step in (Precision.optimizer_step, MixedPrecision.optimizer_step)
            and getattr(trainer.precision_plugin, "scaler", None) is None
            and type(trainer.strategy) in (SingleDeviceStrategy, ClientsStrategy)
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
            if loss is not None:
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


class ClientEpochLoop(_TrainingEpochLoop):
    """One ``run(fetcher)`` is one local epoch of one client.

    Lightning's order of calls is kept. What Lightning does per batch for a run of its own is left out: validation,
    step loggers, schedulers per step, and the collective that asks every rank for a signal, on which clients of
    different lengths would hang. Hooks that neither the module nor a callback overrides cost nothing.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer)
        self.automatic_optimization: _ClientOptimization = _ClientOptimization(trainer)
        self._results: RoundResults = RoundResults()
        self._losses: list[Tensor] = []  # of the batches of the client at work
        self._loss_weights: list[int] = []
        self._split = BatchSplit()
        self.own_examples = 0  # that this process has seen of the client at work, counted in every local epoch

    @property
    def global_step(self) -> int:
        """The completed rounds: the step axis of loggers and checkpoints."""
        return int(self.trainer.fit_loop.round)

    @property
    def _batches_that_stepped(self) -> int:
        return self.global_step

    @_batches_that_stepped.setter
    def _batches_that_stepped(self, value: int) -> None:
        """Ignore Lightning's count of batches: the round is the axis."""

    @property
    def done(self) -> bool:
        """Whether the local epoch is over; a request to stop waits for the end of the round."""
        return self._num_ready_batches_reached()

    def _should_check_val_fx(self, data_fetcher: _DataFetcher) -> bool:
        return False

    def _broadcast_sigterm_tensor(self) -> None:
        """Do nothing: every process looks for a signal of its own at every step, and tells the others afterwards."""

    def prepare(self) -> None:
        """Find out, once a fit, which hooks anybody uses."""
        trainer, module = self.trainer, self.trainer.lightning_module
        self._takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self._profiles = not isinstance(trainer.profiler, PassThroughProfiler)
        self._uses = {
            hook: self._profiles or is_overridden(hook, module, pl.LightningModule) or self._callback_uses(hook)
            for hook in ("on_train_batch_start", "on_train_batch_end")
        }
        self.automatic_optimization.prepare(trainer.callbacks)
        self._split = split_of(trainer)
        if self._split.size > 1:
            self._results = SplitResults(trainer.strategy.root_device)
        datamodule = trainer.datamodule
        self._transfers = trainer.strategy.root_device.type != "cpu" or any(
            is_overridden(hook, module, pl.LightningModule)
            or (datamodule is not None and is_overridden(hook, datamodule, pl.LightningDataModule))
            for hook in TRANSFER_HOOKS
        )

    def _callback_uses(self, hook: str) -> bool:
        return any(uses_batch_hook(callback, hook) for callback in self.trainer.callbacks)

    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        """Connect the profiler to the fetcher, if there is one."""
        if self._profiles:
            data_fetcher._start_profiler = self._on_before_fetch
            data_fetcher._stop_profiler = self._on_after_fetch

    def begin_client(self) -> None:
        """Forget the losses of the client before."""
        self.own_examples = 0
        self._losses, self._loss_weights = [], []

    @property
    def step_losses(self) -> list[float]:
        """The mean loss of each local step of the client at work."""
        size = self.trainer.accumulate_grad_batches
        losses = [float(loss) * size for loss in self._losses]
        return [sum(part) / len(part) for part in (losses[i : i + size] for i in range(0, len(losses), size))]

    def close_client(self) -> tuple[float, dict[str, float]]:
        """Return the client's mean loss and the means of what it logged."""
        total, examples = self._summed_losses()
        if isinstance(self._results, SplitResults):
            parts = self._split.gather((total, examples, self._results.outline_client()))
            total, examples = sum(part[0] for part in parts), sum(part[1] for part in parts)
            self._results.merge_client([outline for _, _, outline in parts])
        return total / examples if examples else float("nan"), self._results.close_client()

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
        if self._split.size > 1:
            batch, examples = self._split.take(batch, examples)
            self.own_examples += examples
        is_idle = batch is NO_EXAMPLES  # then nothing happens here but this process's part in the exchange
        if not is_idle:
            batch = trainer.precision_plugin.convert_input(batch)
            if self._transfers:
                batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
                batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
        self.batch_progress.increment_ready()
        connector._first_loop_iter = connector._first_loop_iter is None  # as connector.on_batch_start() has it
        self._results.batch, self._results.batch_size, self._results.dataloader_idx = batch, examples, None
        skips_epoch = self._uses["on_train_batch_start"] and not is_idle and self._start_hooks(batch, batch_idx) == -1
        if skips_epoch:
            self._check_may_skip()
            self.batch_progress.increment_by(0, is_last_batch=True)
            raise StopIteration
        self.batch_progress.increment_started()
        kwargs = OrderedDict(batch=batch, batch_idx=batch_idx) if self._takes_index else OrderedDict(batch=batch)
        with trainer.profiler.profile("run_training_batch") if self._profiles else nullcontext():
            output = self.automatic_optimization.run(trainer.optimizers[0], batch_idx, kwargs)
        self.batch_progress.increment_processed()
        self._add_loss(output, examples)
        if self._uses["on_train_batch_end"] and not is_idle:
            call._call_callback_hooks(trainer, "on_train_batch_end", output, batch, batch_idx)
            call._call_lightning_module_hook(trainer, "on_train_batch_end", output, batch, batch_idx)
        self._results.batch = None
        self._results.batch_size = None
        self.batch_progress.increment_completed()

    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        """Do nothing per batch: validation, schedulers and loggers have their place at the end of the round."""

    def _check_may_skip(self) -> None:
        if self._split.size > 1:
            raise FederatedError(
                "on_train_batch_start returned -1, which skips the rest of a local epoch: processes that see different"
                " parts of a batch may not agree on it. Use strategy='clients', which leaves batches whole."
            )

    def _start_hooks(self, batch: Any, batch_idx: int) -> Any:
        call._call_callback_hooks(self.trainer, "on_train_batch_start", batch, batch_idx)
        response = call._call_lightning_module_hook(self.trainer, "on_train_batch_start", batch, batch_idx)
        call._call_strategy_hook(self.trainer, "on_train_batch_start", batch, batch_idx)
        return response

    def _add_loss(self, output: dict[str, Any], examples: int) -> None:
        loss = output.get("loss")
        if loss is not None:
            self._losses.append(loss)
            self._loss_weights.append(examples)

    def _summed_losses(self) -> tuple[float, int]:
        """Return the sum of the losses of a client's batches by their examples, and the sum of the examples."""
        if not self._losses:
            return 0.0, 0
        losses = torch.stack([loss if loss.ndim == 0 else loss.reshape(()) for loss in self._losses]).tolist()
        total: float = sum(map(mul, losses, self._loss_weights))
        return total * self.trainer.accumulate_grad_batches, sum(self._loss_weights)

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Save nothing: the round says it all."""
        return {}

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Load nothing."""
