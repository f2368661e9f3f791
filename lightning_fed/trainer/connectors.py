"""Replacements for three of Lightning's connectors, with rounds as epochs, and for its evaluation loops."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from lightning_fed.checkpoints.contents import SafeContents, fill_in
from lightning_fed.checkpoints.files import AtomicCheckpointIO
from lightning_fed.checkpoints.folders import (
    adapt_checkpoint_callbacks,
    best_of_newest_run,
    check_exists,
    folders,
    last_of_newest_run,
    newest,
    restore_scores,
    roots,
)
from lightning_fed.checkpoints.restoring import check_optimizer_states, restored_from, warning_of_options
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import (
    MisconfigurationException,
    TrainerFn,
    _CheckpointConnector,
    _LoggerConnector,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.origin import CHECKPOINT
from lightning_fed.engines.logged import EvaluationResults
from lightning_fed.server.server import FORMAT
from lightning_fed.strategies.stopping import RoundSignalConnector
from lightning_fed.trainer.evaluation import SharedEvaluationLoop


class RoundCheckpointConnector(_CheckpointConnector):
    """Writes checkpoints of the server model and the state after the last completed round, at any time.

    From a checkpoint of an ordinary Lightning run, or of weights alone, it loads only the weights, as x^0.
    """

    last_saved: tuple[int, Any] | None = None  # the completed rounds of the newest whole checkpoint, and its path

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer)
        self.contents = SafeContents()
        # loggers that will number their own version; afterwards, this number looks like a given one
        self.unnumbered = [logger for logger in trainer.loggers if getattr(logger, "_version", 0) is None]

    def resume_start(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        """Load the checkpoint, and keep only its weights if it has no federated state."""
        checkpoint_path = self.trainer.strategy.broadcast(checkpoint_path)
        try:
            super().resume_start(checkpoint_path, weights_only=weights_only)
        except KeyError as error:
            raise FederatedError(
                f"{checkpoint_path} is not a Lightning checkpoint: it has no entry {error}."
            ) from error
        if self._loaded_checkpoint and self.trainer.state.fn == TrainerFn.FITTING:
            self._take(self._loaded_checkpoint, checkpoint_path)
        if self._loaded_checkpoint:
            fill_in(self._loaded_checkpoint, self.trainer)

    def _restore_modules_and_callbacks(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        """Load the checkpoint into module, data module and callbacks, or raise an error that names any mismatch."""
        trainer = self.trainer
        # all callbacks exist now, and their states are not loaded yet
        adapt_checkpoint_callbacks(trainer, is_fit=trainer.state.fn == TrainerFn.FITTING)
        # Lightning converts later, so loaded values would be rounded to the dtype that the module was created with
        trainer.precision_plugin.convert_module(trainer.lightning_module)
        with restored_from(checkpoint_path, "the model and the callbacks"):
            super()._restore_modules_and_callbacks(checkpoint_path, weights_only=weights_only)

    def restore_training_state(self) -> None:
        """Load loops, optimizers and schedules, or raise an error that names any mismatch with the checkpoint.

        It also loads callback states that Lightning leaves out, and marks a run that was stopped early as ended.
        """
        if not self._loaded_checkpoint or self.trainer.state.fn != TrainerFn.FITTING:
            super().restore_training_state()
            return
        optimizers = self.trainer.optimizers
        schedules = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        remedy = (
            " To train with other options, start from its weights alone: Model.load_from_checkpoint(path), then fit"
            " without ckpt_path."
        )
        with restored_from(self.trainer.ckpt_path, "optimizers and schedules"), ExitStack() as watched:
            run = self._loaded_checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
            here = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
            if (there := run.get("work", {}).get("optimizer", here)) != here:
                raise FederatedError(
                    f"The checkpoint's local optimizer is {there}, this run's is {here}. {CHECKPOINT.remedy('the one')}"
                )
            kinds = ", ".join(type(schedule).__name__ for schedule in schedules) or "none"
            if (before := run.get("work", {}).get("schedules", kinds)) != kinds:
                raise FederatedError(
                    f"The checkpoint's schedules: {before}. This run's: {kinds}. {CHECKPOINT.remedy('the schedules')}"
                )
            for optimizer in optimizers:
                watched.enter_context(warning_of_options("local optimizer", optimizer, schedules, CHECKPOINT, remedy))
            super().restore_training_state()
            for optimizer in optimizers:
                check_optimizer_states(optimizer, "the local optimizer")
        restore_scores(self.trainer, self._loaded_checkpoint.get("callbacks") or {})
        for callback in self.trainer.callbacks:
            is_stopping = isinstance(callback, pl.callbacks.EarlyStopping)
            if is_stopping and (callback.stopped_epoch > 0 or callback.wait_count >= callback.patience):
                self.trainer.should_stop = True
                rank_zero_info(
                    f"EarlyStopping(monitor={callback.monitor!r}) had ended this run. To continue it, leave that"
                    " callback out."
                )

    def _take(self, checkpoint: dict[str, Any], path: Any) -> None:
        """Check a checkpoint before it is restored; keep only its weights if no federated run can resume from it."""
        weights, module = checkpoint.get("state_dict"), self.trainer.lightning_module
        if weights is None:
            raise FederatedError(f"{path} has no entry 'state_dict': it is not a Lightning checkpoint.")
        for name, value in module.state_dict().items():  # torch would list every mismatch
            other = weights.get(name)
            if isinstance(other, Tensor) and isinstance(value, Tensor) and other.shape != value.shape:
                raise FederatedError(
                    f"{path} is of another model: {name!r} has shape {tuple(other.shape)} there and"
                    f" {tuple(value.shape)} in {type(module).__name__}."
                )
        saved = (checkpoint.get("loops") or {}).get("fit_loop", {}).get("state_dict", {})
        if "format" in saved and "optimizer_states" in checkpoint:
            self._check_run(saved, path)
            self.last_saved = (int(saved["round"]), path)
            return
        if "format" in saved:
            rank_zero_warn(
                f"{path} was saved with save_weights_only=True: the run cannot continue from round {saved['round']}. It"
                " starts at round 0 from these weights."
            )
        else:
            rank_zero_info(f"{path} holds no federated run: training starts at round 0 from its weights.")
        for key in ("loops", type(self.trainer.precision_plugin).__qualname__, "native_amp_scaling_state"):
            checkpoint.pop(key, None)
        checkpoint.update(callbacks={}, optimizer_states=[], lr_schedulers=[])

    def _check_run(self, saved: Mapping[str, Any], path: Any) -> None:
        written, wanted = saved["format"], self.trainer.fit_loop.max_epochs
        if written != FORMAT:
            age, remedy = ("a newer", "Install that") if written > FORMAT else ("an older", "Finish the run with that")
            raise FederatedError(
                f"{path} was written by {age} version of lightning_fed: its format is {written!r}, this version's is"
                f" {FORMAT}. {remedy} version, or start from its weights alone: Model.load_from_checkpoint(path),"
                " then fit without ckpt_path."
            )
        if wanted is not None and -1 < wanted < (done := int(saved["round"])):
            raise FederatedError(
                f"{path} holds {done} completed rounds, more than max_rounds={wanted}. Raise max_rounds, or resume from"
                " an earlier checkpoint."
            )

    def dump_checkpoint(self, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the contents of a checkpoint; in the middle of a round, those from its start.

        Entries that cannot be loaded without running code are left out; see :class:`SafeContents`. Raise if a plateau
        schedule has yet to step for the last round, or if the state has ended with other processes.
        """
        if not weights_only:
            self.trainer.fit_loop.run_state.check_is_here("What a checkpoint holds")
        if not weights_only and self.trainer.fit_loop.awaits_plateau_schedulers:
            raise FederatedError(
                f"A checkpoint of round {self.trainer.fit_loop.round - 1} cannot be saved before ReduceLROnPlateau has"
                " stepped: a resumed run would miss that step. Save in on_train_epoch_end, or let a ModelCheckpoint do"
                " so; weights_only=True may be saved at any time."
            )
        run = self.trainer.fit_loop.run_state
        with run.at_round_start():
            checkpoint = super().dump_checkpoint(weights_only)
        if run.round_start is not None:
            run.round_start.put_into(checkpoint, self.trainer)
        return self.contents.of(checkpoint, self.trainer.lightning_module)

    def _parse_ckpt_path(self, state_fn: Any, ckpt_path: Any, model_provided: bool, model_connected: bool) -> Any:
        """Resolve "last" and "best" to a path; a trainer that has not trained uses the newest run's checkpoints."""
        trainer, is_fit = self.trainer, state_fn == TrainerFn.FITTING
        try:
            if ckpt_path == "last":
                latest = newest(trainer) if is_fit else last_of_newest_run(trainer)
                if latest is not None:
                    return latest
                if not is_fit:
                    places = dict.fromkeys(map(str, [*folders(trainer, whole=False), *roots(trainer)]))
                    raise FederatedError(
                        f"FederatedTrainer.{state_fn.value}(ckpt_path='last') found no checkpoint: none lies in"
                        f" {' or under '.join(places)}. Give the trainer the default_root_dir, logger and"
                        " ModelCheckpoint of the run, or pass the path of a checkpoint."
                    )
            noted = getattr(trainer.checkpoint_callback, "best_model_path", None)
            if ckpt_path == "best" and not is_fit and not noted and trainer.fit_loop.round == 0:
                return best_of_newest_run(trainer)
            path = super()._parse_ckpt_path(state_fn, ckpt_path, model_provided, model_connected)
            if path is not None:
                check_exists(trainer, path)
        except FederatedError:
            raise
        except (ValueError, MisconfigurationException) as error:
            raise FederatedError(f"ckpt_path={ckpt_path!r}: {error}") from error
        except OSError as error:
            raise FederatedError(
                f"ckpt_path={str(ckpt_path)!r} cannot be read: {error.strerror or error}, at {error.filename}. Let this"
                " user open the folder, or pass the path of another checkpoint."
            ) from error
        return path

    def _get_lightning_module_state_dict(self) -> dict[str, Tensor]:
        """Return the state dict of the server model, even while the module holds a client's model."""
        run = self.trainer.fit_loop.run_state
        if run.server_model is not None:
            run.server_model.sync_hook_changes()
        with run.showing_server_model():
            state_dict = super()._get_lightning_module_state_dict()
            return {k: v.clone() if isinstance(v, Tensor) else v for k, v in state_dict.items()}


class RoundLoggerConnector(_LoggerConnector):
    """Writes loggers once per round."""

    @property
    def should_update_logs(self) -> bool:
        """Return whether callbacks that log per batch may do so: in the first local step of every n-th round.

        That is at its first batch, and after each of its batches, since some callbacks wait for the last one.
        """
        if not super().should_update_logs:
            return False
        loop = self.trainer.fit_loop.epoch_loop
        count = loop.batch_progress.current
        is_after_batch = loop.is_in_first_step and count.processed == count.ready
        return bool(not self.trainer.training or self._first_loop_iter is not False or is_after_batch)


def install(trainer: pl.Trainer) -> None:
    """Install the connectors and the shared evaluation loops in a trainer."""
    trainer._checkpoint_connector = RoundCheckpointConnector(trainer)
    trainer._logger_connector.__class__ = RoundLoggerConnector
    trainer._signal_connector.__class__ = RoundSignalConnector
    users_own = trainer._accelerator_connector.checkpoint_io
    if users_own is None:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
    else:
        rank_zero_info(
            f"Checkpoints are written and read by {type(users_own).__name__}, as given: whether a save that is cut off,"
            " or a damaged file, is noticed is up to it."
        )
    for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        loop.__class__ = SharedEvaluationLoop
        loop._results = EvaluationResults(training=False)
