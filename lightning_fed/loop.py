"""The loop that replaces Lightning's epochs by federated rounds."""

import copy
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytorch_lightning as pl
import torch

from lightning_fed._compat import SIGTERMException, _FitLoop, call, rank_zero_info, rank_zero_warn
from lightning_fed.callbacks.base import call_round_hook
from lightning_fed.checkpoint_places import keep_last_round
from lightning_fed.checks import check_batch_statistics, check_hyper_parameters, check_module, check_trainer
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import RoundReport
from lightning_fed.core.seeds import Purpose, derive_seed, seed_global
from lightning_fed.engines.batch_hooks import time_by_rounds
from lightning_fed.engines.sequential.local_loop import ClientEpochLoop
from lightning_fed.inspection import Inspection
from lightning_fed.restoring import Schedules, notes_of, start_server
from lightning_fed.rounds.client_states import ClientStatesPlace
from lightning_fed.rounds.cohort import CohortSampling, cohort_seed
from lightning_fed.rounds.faults import FailureWarnings
from lightning_fed.rounds.prepare import population_of, prepare_clients, prepare_module
from lightning_fed.rounds.round import Rounds
from lightning_fed.server.server import Server
from lightning_fed.server.step import steps_not_counted
from lightning_fed.settings import Settings
from lightning_fed.stopping import Stop, exception_of, stop_of
from lightning_fed.strategies.ddp import WithinClientStrategy
from lightning_fed.strategies.processes import Ranks

__all__ = ["FederatedLoop"]


class FederatedLoop(Inspection, _FitLoop):
    """Run federated rounds where Lightning would run epochs.

    A round is a Lightning epoch, and the step axis of loggers and checkpoints is the number of completed rounds::

        for round in range(max_rounds):
            draw the cohort; let its clients work (see :class:`lightning_fed.rounds.round.Rounds`)
            the server takes its step along the mean of their messages, and their new states are kept
            schedules step; validation of the server model when due; one report; checkpoint

    Args:
        trainer: The trainer.
        settings: How rounds are run.
        min_epochs: The least number of rounds before early stopping.
        max_epochs: The number of rounds; -1 for no limit.
    """

    def __init__(
        self, trainer: pl.Trainer, settings: Settings, min_epochs: int | None = 0, max_epochs: int | None = None
    ) -> None:
        super().__init__(trainer, min_epochs, max_epochs)
        self.epoch_loop: ClientEpochLoop = ClientEpochLoop(trainer)
        self.settings = settings
        self.kept_states = ClientStatesPlace(trainer, settings.client_states, settings.client_states_dir)
        self._module: pl.LightningModule | None = None
        self._schedules: Schedules | None = None  # of the previous fit
        self._plateau_round = 0
        self._work_notes: dict[str, str] = {}
        self._failure_warnings = FailureWarnings()
        self._gave_up = False  # whether engine="auto" has left the vectorized engine for the sequential one
        self._stop = Stop.NO  # what any process was asked for in this round
        self.runs_several = False  # while a step is that of several clients
        self.is_closing = False  # between the server's step and the end of the round's hooks
        self.precision_at_start: dict[str, Any] | None = None  # of the round at work, where a gradient scaler has state
        self.corrected_clip: tuple[float, Any] | None = None  # value and algorithm, to clip after the correction

    # ------------------------------------------------------------------ what outlives a round

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Return the state after the last completed round; all client states on rank zero, or where they are.

        Raises:
            FederatedError: In the middle of a round of several processes, which are then not at one place.
        """
        if self._restored is not None:  # loaded, and nothing has run since
            return {**self._restored, "client_states": self.kept_states.copied(self._restored)}
        if self._state is None:
            return {}
        # the last metrics too: a schedule or a checkpoint callback may look at one that is not made anew every round
        metrics = {name: value.detach().cpu() for name, value in self.trainer.callback_metrics.items()}
        if self._ranks.size > 1 and self._at_work is not None:
            raise FederatedError(
                "A checkpoint in the middle of a round cannot be written by several processes, which are then at"
                " different clients. Save at the end of a round, or train in one process."
            )
        client_states = self.kept_states.record(self._state, self._ranks)
        transport = self.settings.transport()
        noted = {"transport": transport, "work": self._work_notes, "gave_up": self._gave_up}
        return {**self._state.state_dict(client_states), "metrics": metrics, **noted}

    def load_state_dict(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        """Take a checkpoint's state, to be used when the fit starts; counters follow from its round."""
        saved = state_dict[f"{prefix}state_dict"]
        self._restored = {**saved, "client_states": self.kept_states.resolved(saved["client_states"])}
        self.set_progress(self.round)
        self.epoch_loop.val_loop._restarting = True  # tells Lightning that this is no place for a sanity check

    # ------------------------------------------------------------------ start and end of a fit

    @property
    def done(self) -> bool:
        """Whether to leave the loop."""
        if self._is_finished():
            rank_zero_info(f"`Trainer.fit` stopped: `max_rounds={self.max_epochs}` reached.")
            return True
        return bool(self.trainer.should_stop and self._can_stop_early)

    @property
    def skip(self) -> bool:
        """Whether there is nothing to do at all."""
        if self.round > 0 and self._is_finished():
            rank_zero_warn(
                f"fit() has nothing to do: {self.round} rounds are done and max_rounds={self.max_epochs}."
                " Raise trainer.max_rounds to go on from there."
            )
            return True
        return self.trainer.limit_train_batches == 0 or self.done

    def _is_finished(self) -> bool:
        return self.max_epochs != -1 and self.round >= (self.max_epochs or 0)

    def setup_data(self) -> None:
        """Learn who the clients are."""
        trainer = self.trainer
        check_trainer(trainer)
        check_module(trainer)
        time_by_rounds(trainer)
        self.population = population_of(trainer)
        self.max_batches = 1  # set anew for every local epoch
        trainer.val_check_batch = math.inf

    def reset(self) -> None:
        """Lay out the parameters, wrap the optimizer, and bring the server state to where the run stands."""
        torch.set_grad_enabled(True)
        trainer, settings = self.trainer, self.settings
        assert self.population is not None
        if trainer.checkpoint_callbacks:
            check_hyper_parameters(trainer.lightning_module, "model")
            check_hyper_parameters(trainer.datamodule, "data module")
        self.prepared = prepared = prepare_module(trainer)
        if not isinstance(trainer.strategy, WithinClientStrategy):
            self._ranks = Ranks.of(trainer)
        sizes = self.population.sizes if self.population.sizes_are_known else None
        self._work_notes = {
            **settings.work(),
            **notes_of(sizes, trainer.datamodule.batch_size, prepared.optimizer.base),
        }
        self._state = self._start_server()
        prepared.seed = self._state.seed
        sampling = CohortSampling(
            settings, self.population, cohort_seed(trainer, settings, self.population, self._state.seed)
        )
        engine = "sequential" if settings.engine == "auto" and self._gave_up else settings.engine
        self.clients = prepare_clients(prepared, self.population, engine)
        self._rounds = Rounds(self._state, sampling, self.clients, self._ranks)
        self._plateau_round = self._state.round
        self.set_progress(self._state.round)
        self.is_closing, self.precision_at_start, self._stop = False, None, Stop.NO
        self.restarting = False
        self.epoch_loop.val_loop._restarting = False
        self.show_server_model()

    def _start_server(self) -> Server:
        """Return the server's side: that of the checkpoint or of this trainer's previous fit, or a new one."""
        assert self.prepared is not None
        restored, self._restored = self._restored, None
        previous = self._state if restored is None and self._state is not None and self._state.round > 0 else None
        if restored is not None:
            self._gave_up = bool(restored.get("gave_up"))
        if previous is not None and self.prepared.module is not self._module:
            raise FederatedError(
                f"This trainer has already run {previous.round} rounds on another model. Make a new FederatedTrainer,"
                " or resume with fit(..., ckpt_path=...)."
            )
        if previous is not None and self._schedules is not None:
            self._schedules.resume(self.trainer, self.prepared.optimizer.base)
        self._module = self.prepared.module
        return start_server(self.prepared, self.kept_states, self._ranks, self._work_notes, restored, previous)

    def set_progress(self, round: int) -> None:
        """Set every counter from the round: the one source of truth."""
        for counter in (self.epoch_progress.total, self.epoch_progress.current):
            counter.ready = counter.started = counter.processed = counter.completed = round

    def on_run_end(self) -> None:
        """Call the hooks that end training, and keep what they make of the model."""
        super().on_run_end()
        self.take_in_edits()

    def teardown(self) -> None:
        """Leave the module with the server model, and its parameters with storage of their own."""
        if self.prepared is not None:
            if self._state is not None:
                self._schedules = Schedules.of(self.trainer, self.prepared.optimizer.base)
            self._rounds = self.precision_at_start = None
            self.show_server_model()
            self.prepared.release()
            self.prepared = None
        self.kept_states.close(None if self._state is None else self._state.clients)
        self.epoch_loop.teardown()

    # ------------------------------------------------------------------ one round

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
            self.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)

    @property
    def awaits_plateau_schedulers(self) -> bool:
        """Whether ``ReduceLROnPlateau`` has yet to step for a round whose server step is taken."""
        waits = self.is_closing and self._plateau_round < self.round
        return waits and any(config.reduce_on_plateau for config in self.trainer.lr_scheduler_configs)

    def _validate(self) -> None:
        trainer, epoch_loop = self.trainer, self.epoch_loop
        if not epoch_loop._should_check_val_epoch():
            return
        seed_global(derive_seed(self.state.seed, Purpose.VALIDATION, self.round), trainer.strategy.root_device)
        call._call_lightning_module_hook(trainer, "on_validation_model_zero_grad")
        trainer.validating = True
        epoch_loop.val_loop.run()
        trainer.training = True
        trainer._logger_connector._first_loop_iter = None

    def _run_round(self) -> RoundReport:
        started = time.perf_counter()
        trainer, results = self.trainer, self.epoch_loop._results
        self.check_trained()
        if self._engine.split.size > 1:
            check_batch_statistics(trainer.lightning_module)
        self.take_in_edits()
        self._shown = None
        assert self._rounds is not None
        half, told = self._rounds.run(self._tell)
        self._take_in(told)
        self.is_closing, self.precision_at_start = True, None
        if self.settings.is_private:
            results.forget_clients()
        trainer._logger_connector.epoch_end_reached()
        metrics = {name: float(value) for name, value in trainer._logger_connector.metrics["callback"].items()}
        report = half.close(metrics, time.perf_counter() - started)
        self._rounds.leave()
        self.show_server_model()
        self._failure_warnings.warn_of(report)
        return report

    def _tell(self) -> dict[str, Any]:
        """Return what this process tells the others of a round beside its clients' part."""
        trainer = self.trainer
        return {
            "logged": self.epoch_loop._results.outline() if trainer.world_size > 1 else {},
            "stop": trainer._signal_connector.asked,
            "edit": self._edit,
            "gave_up": self._engine.has_given_up,
        }

    def _take_in(self, told: Sequence[Mapping[str, Any]]) -> None:
        """Go by what all processes have told.

        Raises:
            FederatedError: If hooks have changed the model in other ways in other processes.
        """
        if len(told) > 1:
            self.epoch_loop._results.merge([part["logged"] for part in told])
        if len({part["edit"] for part in told}) > 1:
            raise FederatedError(
                "Hooks have changed the model's parameters or buffers between rounds, and not alike in all processes:"
                " change them in every process, by the same values."
            )
        self._edit = None
        if any(part["gave_up"] for part in told):
            self._engine.give_up()
            self._gave_up = True
        self._stop = Stop(max(part["stop"] for part in told))
