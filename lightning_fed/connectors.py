"""Two of Lightning's connectors, told that an epoch is a round; and its evaluation loops, shared by processes."""

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
from torch import Tensor

from lightning_fed._compat import TrainerFn, _CheckpointConnector, _LoggerConnector, rank_zero_info
from lightning_fed.core.errors import FederatedError
from lightning_fed.engines.evaluation_loop import SharedEvaluationLoop
from lightning_fed.engines.results import EvaluationResults

__all__ = ["RoundCheckpointConnector", "RoundLoggerConnector"]


class RoundCheckpointConnector(_CheckpointConnector):
    """Checkpoints hold the server model and the state after the last completed round, whenever they are written.

    A checkpoint of an ordinary Lightning run gives x^0: its weights are loaded and nothing else.
    """

    def resume_start(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        """Load the checkpoint, and keep only the weights of one that holds no federated state."""
        super().resume_start(checkpoint_path, weights_only=weights_only)
        checkpoint = self._loaded_checkpoint
        if not checkpoint or self.trainer.state.fn != TrainerFn.FITTING:
            return
        self._check_shapes(checkpoint, checkpoint_path)
        loops = checkpoint.get("loops") or {}
        if "format" in loops.get("fit_loop", {}).get("state_dict", {}):
            return
        rank_zero_info(f"{checkpoint_path} holds no federated run: training starts at round 0 from its weights.")
        for key in ("loops", type(self.trainer.precision_plugin).__qualname__, "native_amp_scaling_state"):
            checkpoint.pop(key, None)
        checkpoint.update(callbacks={}, optimizer_states=[], lr_schedulers=[])

    def _check_shapes(self, checkpoint: Mapping[str, Any], path: Any) -> None:
        """Refuse a checkpoint of another model by name, before torch does so by a long list.

        Raises:
            FederatedError: Naming the first parameter that differs.
        """
        saved = checkpoint.get("state_dict")
        if saved is None:
            raise FederatedError(f"{path} holds no 'state_dict': it is no Lightning checkpoint.")
        module = self.trainer.lightning_module
        for name, value in module.state_dict().items():
            other = saved.get(name)
            if isinstance(other, Tensor) and isinstance(value, Tensor) and other.shape != value.shape:
                raise FederatedError(
                    f"{path} is of another model: {name!r} has shape {tuple(other.shape)} there and"
                    f" {tuple(value.shape)} in {type(module).__name__}."
                )

    def _get_lightning_module_state_dict(self) -> dict[str, Tensor]:
        """Return the state dict of the server model, whatever the module holds in the middle of a client's work."""
        loop = self.trainer.fit_loop
        with loop.showing_server_model():
            state_dict = super()._get_lightning_module_state_dict()
            return {k: v.clone() if isinstance(v, Tensor) else v for k, v in state_dict.items()}


class RoundLoggerConnector(_LoggerConnector):
    """Loggers are written once a round."""

    @property
    def should_update_logs(self) -> bool:
        """Whether callbacks that log per batch may do so: at the first batch of every so many rounds."""
        return bool(super().should_update_logs and (not self.trainer.training or self._first_loop_iter is not False))


def install(trainer: pl.Trainer) -> None:
    """Let a trainer use the connectors of this module, and share evaluations."""
    trainer._checkpoint_connector = RoundCheckpointConnector(trainer)
    trainer._logger_connector.__class__ = RoundLoggerConnector
    for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        loop.__class__ = SharedEvaluationLoop
        loop._results = EvaluationResults(training=False)
