"""Lightning's training epoch loop and automatic optimization, reused for each client."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_fed.compat.package import pl
from lightning_fed.compat.private import (
    PassThroughProfiler,
    _DataFetcher,
    _TrainingEpochLoop,
    call,
    is_overridden,
    is_param_in_hook_signature,
)
from lightning_fed.core.errors import FederatedError
from lightning_fed.engines.batch_hooks import has_transfer_hooks, is_users_own, uses_batch_hook
from lightning_fed.engines.logged import RoundResults
from lightning_fed.engines.sequential.optimization import ClientOptimization
from lightning_fed.engines.sequential.readings import ClientNumbers
from lightning_fed.strategies.ddp import split_of
from lightning_fed.strategies.split import NO_EXAMPLES, BatchSplit

_NO_CONTEXT = nullcontext()


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

    Calls have Lightning's order. Lightning's other work per batch is left out: validation, step loggers, schedulers per
    step, and the collective that checks every rank for a signal, which would hang for clients of different lengths.
    Hooks that neither the module nor a callback overrides cost nothing.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer)
        self.automatic_optimization: ClientOptimization = ClientOptimization(trainer)
        self._results: RoundResults = RoundResults()
        self._losses: list[Any] = []  # the current client's batch losses: numbers, or an accelerator's tensors
        self._loss_weights: list[int] = []
        self._split = BatchSplit()
        self.own_examples = 0  # examples of the current client in this process, counted in every local epoch
        self.is_in_first_step = False  # of the first client of a round
        self.schedule_step: int | None = None  # while a schedule by local step takes a step

    def teardown(self) -> None:
        """End a fit."""
        self.automatic_optimization.rest()
        super().teardown()

    @property
    def global_step(self) -> int:
        """The number of completed rounds: the step axis of loggers and checkpoints.

        In ``lr_scheduler_step`` of a schedule by local step, the steps that the schedule has counted.
        """
        return int(self.trainer.fit_loop.round) if self.schedule_step is None else self.schedule_step

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

    def prepare(self) -> None:
        """Find the hooks in use, once per fit."""
        trainer, module = self.trainer, self.trainer.lightning_module
        self._takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self._precision = trainer.precision_plugin  # the property takes several calls a step
        self._profiles = not isinstance(trainer.profiler, PassThroughProfiler)
        self._uses = {
            hook: self._profiles
            or is_overridden(hook, module, pl.LightningModule)
            or is_users_own(trainer.strategy, hook)
            or any(uses_batch_hook(callback, hook) for callback in trainer.callbacks)
            for hook in ("on_train_batch_start", "on_train_batch_end")
        }
        self.automatic_optimization.prepare(trainer.callbacks)
        self._has_hooks = any(self._uses.values()) or not self.automatic_optimization.has_fast_path
        self._split = split_of(trainer)
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

    @property
    def step_losses(self) -> list[float]:
        """Return the mean loss of each local step of the current client."""
        return ClientNumbers(self._losses, self._loss_weights, {}, self.trainer.accumulate_grad_batches).step_losses()

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
        kwargs = OrderedDict(batch=batch, batch_idx=batch_idx) if self._takes_index else OrderedDict(batch=batch)
        optimizer: Any = trainer.optimizers[0]
        if self._has_hooks:  # which may have assigned to `.data`
            optimizer.flat.gather()
        with trainer.profiler.profile("run_training_batch") if self._profiles else _NO_CONTEXT:
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
