"""The loop that replaces Lightning's epochs by federated rounds."""

import copy
import time

from lightning_fed.callbacks.base import call_round_hook
from lightning_fed.checkpoints.folders import keep_last_round
from lightning_fed.compat.private import (
    MisconfigurationException,
    SIGTERMException,
    call,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_fed.core.rounds import RoundReport
from lightning_fed.core.seeds import Purpose, derive_seed, seed_global
from lightning_fed.rounds.failures import warn_of
from lightning_fed.server.step import steps_not_counted
from lightning_fed.settings.module_checks import check_batch_statistics
from lightning_fed.strategies.stopping import Stop, exception_of, stop_of
from lightning_fed.trainer.run import RunState

__all__ = ["FederatedLoop"]


class FederatedLoop(RunState):
    """Run federated rounds where Lightning would run epochs.

    A round is a Lightning epoch, and the step axis of loggers and checkpoints is the number of completed rounds::

        for round in range(max_rounds):
            draw the cohort; let its clients work (see :class:`lightning_fed.rounds.round.Rounds`)
            the server takes its step along the mean of their messages, and their new states are kept
            schedules step; validation of the server model when due; one report; checkpoint

    The arguments are those of :class:`lightning_fed.trainer.run.RunState`.
    """

    @property
    def done(self) -> bool:
        """Whether to leave the loop."""
        if limit := self._limit_reached():
            rank_zero_info(f"`Trainer.fit` stopped: `{limit}` reached.")
            return True
        if self.trainer.should_stop and not self._can_stop_early and not self._goes_on:
            self._goes_on = True
            rank_zero_info(
                f"The run was asked to stop after {self.round} rounds and {self.steps_taken} local steps, but goes on"
                f" until min_epochs={self.min_epochs} rounds and min_steps={self.min_steps or 0} local steps are done."
            )
        return bool(self.trainer.should_stop and self._can_stop_early)

    @property
    def skip(self) -> bool:
        """Whether there is nothing to do at all."""
        if self.round > 0 and (limit := self._limit_reached()):
            raised = "trainer.max_rounds" if limit.startswith("max_rounds") else "max_steps"
            rank_zero_warn(
                f"fit() has nothing to do: {self.round} rounds are done and {limit}. Raise {raised} to go on from"
                " there."
            )
            return True
        return self.trainer.limit_train_batches == 0 or self.done

    def _limit_reached(self) -> str | None:
        """Return the number of rounds or of local steps that ends the run, as it was given; None if it goes on."""
        if self.max_epochs != -1 and self.round >= (self.max_epochs or 0):
            return f"max_rounds={self.max_epochs}"
        if self.max_steps != -1 and self.steps_taken >= self.max_steps:
            return f"max_steps={self.max_steps}"
        return None

    def _iteration_based_training(self) -> bool:
        return False  # or Lightning would restart in the middle of an epoch where max_steps is given

    @property
    def _can_stop_early(self) -> bool:
        return self.round >= (self.min_epochs or 0) and self.steps_taken >= (self.min_steps or 0)

    def on_advance_start(self) -> None:
        """Call the hooks that start a round, and draw its cohort in between Lightning's and those of rounds."""
        trainer = self.trainer
        assert self._rounds is not None
        self.epoch_progress.increment_ready()
        call._call_callback_hooks(trainer, "on_train_epoch_start")
        call._call_lightning_module_hook(trainer, "on_train_epoch_start")
        self.epoch_progress.increment_started()
        # after these hooks, where GradientAccumulationScheduler sets how many batches make a step of this round
        self._rounds.draw()
        self.precision_at_start = copy.deepcopy(trainer.precision_plugin.state_dict()) or None
        call_round_hook(trainer, "on_round_start", self.round)

    def advance(self) -> None:
        """Run one round, and validate the server model when that is due."""
        trainer = self.trainer
        try:
            with trainer.profiler.profile("run_federated_round"):
                report = self._run_round()
        except (KeyboardInterrupt, SIGTERMException) as request:
            self._leave_round()
            self._end_stopped(stop_of(request))
            raise
        trainer._logger_connector.on_epoch_end()
        with steps_not_counted():
            self.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        call_round_hook(trainer, "on_round_end", report)
        self._validate()
        self.step_plateau_schedulers()

    def on_advance_end(self) -> None:
        """Call the hooks that end a round, and log its metrics."""
        trainer = self.trainer
        self.epoch_progress.increment_processed()
        call._call_callback_hooks(trainer, "on_train_epoch_end", monitoring_callbacks=False)
        call._call_lightning_module_hook(trainer, "on_train_epoch_end")
        call._call_callback_hooks(trainer, "on_train_epoch_end", monitoring_callbacks=True)
        trainer._logger_connector.on_epoch_end()
        trainer._logger_connector.update_train_epoch_metrics()
        self.epoch_progress.increment_completed()
        self.is_closing = False
        if trainer.world_size == 1:
            self._stop = max(self._stop, trainer._signal_connector.asked)
        if self._stop:
            self._end_stopped(self._stop)
            raise exception_of(self._stop)
        if (error := self.monitors.error) is not None:
            keep_last_round(trainer, self.round, trainer._checkpoint_connector.kept)
            raise error

    def _leave_round(self) -> None:
        """Forget the round at work: everything is as after the last completed one."""
        assert self._rounds is not None
        self._rounds.leave()
        self.state.clients.discard()
        if self.precision_at_start is not None:
            self.trainer.precision_plugin.load_state_dict(self.precision_at_start)
            self.precision_at_start = None

    def _end_stopped(self, stop: Stop) -> None:
        """See to it that a checkpoint holds the last completed round, in all processes together."""
        trainer, connector = self.trainer, self.trainer._signal_connector
        if self.is_closing:
            return  # interrupted at once: there is no completed round to save
        connector.received_sigterm = stop >= Stop.TERMINATE
        keep_last_round(trainer, self.round, trainer._checkpoint_connector.kept)
        if stop == Stop.REQUEUE:
            connector.requeue()

    def step_plateau_schedulers(self) -> None:
        """Step ``ReduceLROnPlateau`` once a round: after validation, before a checkpoint could be written."""
        if self._plateau_round < self.round:
            self._plateau_round = self.round
            try:
                self.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
            except MisconfigurationException:
                metrics = self.trainer.callback_metrics
                followed = [config.monitor for config in self.trainer.lr_scheduler_configs if config.reduce_on_plateau]
                missing = next((name for name in followed if name is not None and name not in metrics), None)
                if missing is None:
                    raise
                self.monitors.note("ReduceLROnPlateau", missing, metrics)

    @property
    def awaits_plateau_schedulers(self) -> bool:
        """Whether ``ReduceLROnPlateau`` has yet to step for a round whose server step is taken."""
        waits = self.is_closing and self._plateau_round < self.round
        return waits and any(config.reduce_on_plateau for config in self.trainer.lr_scheduler_configs)

    def _validate(self) -> None:
        trainer, epoch_loop = self.trainer, self.epoch_loop
        if not epoch_loop._should_check_val_epoch() or not self._interval_has_passed():
            return
        seed_global(derive_seed(self.state.seed, Purpose.VALIDATION, self.round), trainer.strategy.root_device)
        call._call_lightning_module_hook(trainer, "on_validation_model_zero_grad")
        trainer.validating = True
        epoch_loop.val_loop.run()
        trainer.training = True
        trainer._logger_connector._first_loop_iter = None

    def _interval_has_passed(self) -> bool:
        """Whether the time between validations has passed, by the clock of the first process; True if none is set."""
        trainer = self.trainer
        interval = trainer._val_check_time_interval
        if interval is None:
            return True
        stops = trainer.should_stop and self._can_stop_early  # as in Lightning, a run that is asked to stop validates
        return bool(trainer.strategy.broadcast(stops or time.monotonic() - trainer._last_val_time >= interval))

    def _run_round(self) -> RoundReport:
        started = time.perf_counter()
        trainer, results = self.trainer, self.epoch_loop._results
        self.check_trained()
        if self._engine.split.size > 1:
            check_batch_statistics(trainer.lightning_module)
        self.take_in_edits()
        self._shown = None
        assert self._rounds is not None
        if not self._batches_checked and self.clients_elsewhere is None:
            self._rounds.check_batches()
            self._batches_checked = True
        half, told = self._rounds.run(self._tell)
        self._take_in(told)
        self.is_closing, self.precision_at_start = True, None
        if self.settings.is_private:
            results.forget_clients()
        trainer._logger_connector.epoch_end_reached()
        metrics = {name: float(value) for name, value in trainer._logger_connector.metrics["callback"].items()}
        report = half.close(metrics, time.perf_counter() - started)
        self.steps_taken += sum(report.steps.values())
        self._rounds.leave()
        self.show_server_model()
        warn_of(report.failed, self._warned)
        return report
