"""Evaluation of the server model, shared by the processes of a run."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning_fed.compat.private import _EvaluationLoop
from lightning_fed.core.errors import FederatedError
from lightning_fed.data.batches.counting import count_examples, sampled_length
from lightning_fed.data.batches.evaluation import EvaluationLoader
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.engines.logged import EvaluationResults
from lightning_fed.engines.processor import lstm_errors
from lightning_fed.strategies.processes import Ranks, metrics_alone

__all__ = ["SharedEvaluationLoop"]

_OURS = ("lightning_fed", "pytorch_lightning", "lightning")


class SharedEvaluationLoop(_EvaluationLoop):
    """Lightning's evaluation loop, with batch k given to process k mod n, under its own index.

    What is logged in a step is put together exactly when a loader is done, and metric objects exchange their states
    then; nothing is exchanged in a step. Where that would not give what one process gives, every process evaluates
    everything: with loaders of the user's own, with fewer batches than processes, and with hooks that see the outputs
    of all batches.
    """

    _results: EvaluationResults
    _ranks = Ranks()
    _is_shared = False

    def setup_data(self) -> None:
        """Make the loaders, and take this process's part of them."""
        before = self._combined_loader
        super().setup_data()
        combined = self._combined_loader
        if combined is None or combined is before:
            return
        self._ranks = Ranks.of(self.trainer)
        self._is_shared = self._ranks.size > 1 and self._can_share(combined.flattened)
        if self._is_shared:
            rank, size = self._ranks.rank, self._ranks.size
            loaders = zip(combined.flattened, self._max_batches, strict=True)
            combined.flattened = [loader.part(rank, size, stop=int(batches)) for loader, batches in loaders]

    def run(self) -> Any:
        """Evaluate."""
        with ExitStack() as self._alone:
            return super().run()

    def on_run_start(self) -> None:
        """Call the hooks that start an evaluation."""
        self._alone.enter_context(metrics_alone(self.trainer))
        super().on_run_start()

    def _evaluation_step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        if dataloader_iter is None and self._is_sequential:
            self._results.count = partial(self._count, batch, batch_idx, dataloader_idx)
        if self._is_shared:
            batch_idx = batch_idx * self._ranks.size + self._ranks.rank
        try:
            with lstm_errors(self.trainer):
                super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)
        finally:
            self._results.count = None

    def _count(self, batch: Any, batch_idx: int, dataloader_idx: int) -> int | None:
        """Return the number of examples in a batch, None if neither loader, user nor batch tells."""
        assert self._combined_loader is not None
        length = sampled_length(self._combined_loader.flattened[dataloader_idx], batch_idx)
        if length is not None:
            return length
        data = self.trainer.datamodule
        batch_size_of = data.batch_size_of if isinstance(data, FederatedDataModule) else None
        if batch_size_of is not None:
            return count_examples(batch, batch_size_of)
        try:
            return count_examples(batch)
        except FederatedError:
            return None  # Lightning warns that the batch is ambiguous

    def _store_dataloader_outputs(self) -> None:
        if self._is_shared:
            self._alone.close()
            self._results.share(self._ranks)
        super()._store_dataloader_outputs()
        if self._is_shared:
            self._alone.enter_context(metrics_alone(self.trainer))

    def _can_share(self, loaders: Sequence[Any]) -> bool:
        trainer, module, stage = self.trainer, self.trainer.lightning_module, self._stage.dataloader_prefix
        enough = all(batches >= self._ranks.size for batches in self._max_batches)
        if not enough or not all(isinstance(loader, EvaluationLoader) for loader in loaders):
            return False
        prefix = "on_test" if stage == "test" else "on_validation"
        hooks = [f"{prefix}_{name}" for name in ("batch_end", "epoch_end", "end")]
        return not any(_is_users_own(owner, hook) for owner in (module, *trainer.callbacks) for hook in hooks)


def _is_users_own(owner: Any, hook: str) -> bool:
    """Whether a hook of a module or callback is anybody's but Lightning's and this package's."""
    if hook in vars(owner):
        return True
    definer = next(cls for cls in type(owner).__mro__ if hook in vars(cls))
    return definer.__module__.split(".")[0] not in _OURS
