"""The loop that replaces Lightning's epochs with federated rounds."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from operator import itemgetter
from typing import Any

import torch

from lightning_fed.callbacks.base import call_round_hook
from lightning_fed.callbacks.monitors import Monitors
from lightning_fed.callbacks.target import TargetMetric
from lightning_fed.checkpoints.folders import save_last_round
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import (
    MisconfigurationException,
    SIGTERMException,
    _FitLoop,
    call,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import RoundReport
from lightning_fed.core.seeds import Purpose, derive_seed, seed_global
from lightning_fed.core.types import ClientId, State, Vector
from lightning_fed.engines.batch_hooks import time_by_rounds
from lightning_fed.engines.prepared import PreparedModule
from lightning_fed.engines.sequential.local_loop import ClientEpochLoop
from lightning_fed.rounds.client_half import ClientHalf
from lightning_fed.rounds.failures import warn_of
from lightning_fed.server.asynchronous import Asynchronous
from lightning_fed.server.participation import Population
from lightning_fed.server.privacy import DifferentialPrivacy
from lightning_fed.server.server import Server, steps_not_counted
from lightning_fed.settings.module_checks import check_batch_statistics, check_module
from lightning_fed.settings.settings import Settings
from lightning_fed.settings.trainer_checks import check_trainer, warn_of_rare_logs
from lightning_fed.strategies.stopping import Stop, exception_of, stop_of
from lightning_fed.trainer.measurements import Measurements
from lightning_fed.trainer.run_state import RunState


class FederatedLoop(_FitLoop):
    """Runs federated rounds in place of Lightning's epochs.

    A round is a Lightning epoch, and the step axis of loggers and checkpoints is the number of completed rounds::

        for round in range(max_rounds):
            sample the cohort, and train its clients
            step the server along the mean of their messages
            store the clients' new states
            step schedules, validate if due, report, save a checkpoint

    Callbacks reach it as ``trainer.fit_loop``: the current round and state (:attr:`round`, :attr:`state`), and
    measurements of clients (:meth:`full_gradient`, :meth:`evaluate_clients`). A measurement leaves no trace in the run,
    and is a function of (seed, round, client).

    Args:
        trainer: The trainer.
        settings: The settings of rounds.
        min_epochs: The minimum number of rounds before early stopping.
        max_epochs: The number of rounds; -1 for no limit.

    Attributes:
        settings: The settings of rounds.
        run_state: The run between rounds: its start and end, checkpoints, and the server's model in the module.
        measurements: Measurements of clients.
        monitors: The metrics that callbacks and schedules follow.
        runs_several: Whether a training step runs several clients.
        is_closing: Whether a round is between the server's step and the end of its hooks.
        has_run: Whether a round has ended in this trainer.
        after_round: Functions that save ModelCheckpoints after the other hooks of the round's end, each with whether a
            run can resume from its checkpoint.
        corrected_clip: Value and algorithm of gradient clipping after the correction, if set.
    """

    def __init__(
        self, trainer: pl.Trainer, settings: Settings, min_epochs: int | None = 0, max_epochs: int | None = None
    ) -> None:
        super().__init__(trainer, min_epochs, max_epochs)
        self.epoch_loop: ClientEpochLoop = ClientEpochLoop(trainer)
        self.settings = settings
        self.run_state = RunState(trainer, settings)
        self.measurements = Measurements(self.run_state)
        self.monitors = Monitors()
        self.runs_several = self.is_closing = self.has_run = False
        self.corrected_clip: tuple[float, Any] | None = None
        self.after_round: list[tuple[bool, Callable[[], None]]] = []
        self._plateau_round = 0  # the round in which ReduceLROnPlateau last stepped
        self._of_hooks: dict[str, float] = {}  # values that this process logged in hooks of the last round
        self._differing: set[str] = set()  # names of such values that processes do not agree on
        self._names: set[str] = set()  # names of logged values of rounds
        self._reserved_names: set[str] = set()  # names of server values that sites have reported
        self._warned: set[ClientId] = set()  # clients already named in a warning about a failure
        self._stop = Stop.NO  # the strongest stop request to any process in this round
        self._has_checked_batches = False  # whether this fit has checked batches
        self._says_why_it_continues = True  # whether to log why after an early request to stop

    @property
    def done(self) -> bool:
        """Return whether to leave the loop."""
        if limit := self._limit_reached():
            rank_zero_info(f"`Trainer.fit` stopped: `{limit}` reached.")
            return True
        if self.trainer.should_stop and not self._can_stop_early and self._says_why_it_continues:
            self._says_why_it_continues = False
            rank_zero_info(
                f"The run was asked to stop after {self.round} rounds and {self.steps_taken} local steps, but continues"
                f" until min_epochs={self.min_epochs} rounds and min_steps={self.min_steps or 0} local steps are done."
            )
        return bool(self.trainer.should_stop and self._can_stop_early)

    @property
    def skip(self) -> bool:
        """Return whether the fit has nothing to do."""
        if self.round > 0 and (limit := self._limit_reached()):
            raised = "trainer.max_rounds" if limit.startswith("max_rounds") else "max_steps"
            rank_zero_warn(
                f"fit() has nothing to do: {self.round} rounds are done and {limit}. Raise {raised} to continue from"
                " there."
            )
            return True
        return self.trainer.limit_train_batches == 0 or self.done

    def _limit_reached(self) -> str | None:
        """Return the limit on rounds or local steps that the run has reached, as text; None if it continues."""
        if self.max_epochs != -1 and self.round >= (self.max_epochs or 0):
            return f"max_rounds={self.max_epochs}"
        if self.max_steps != -1 and self.steps_taken >= self.max_steps:
            return f"max_steps={self.max_steps}"
        return None

    def _iteration_based_training(self) -> bool:
        return False  # else Lightning would restart in the middle of an epoch if max_steps is set

    @property
    def _can_stop_early(self) -> bool:
        return self.round >= (self.min_epochs or 0) and self.steps_taken >= (self.min_steps or 0)

    # ------------------------------------------------------------------ start and end of a fit

    def setup_data(self) -> None:
        """Check the trainer and the module, and read the population."""
        trainer = self.trainer
        check_trainer(trainer)
        check_module(trainer)
        warn_of_rare_logs(trainer)
        time_by_rounds(trainer)
        self.run_state.connect_clients()
        self.max_batches = 1  # set again for every local epoch
        trainer.val_check_batch = float("inf")
        trainer._last_val_time = time.monotonic()

    def reset(self) -> None:
        """Start the run at round 0, after the round of a checkpoint, or after the rounds of an earlier fit."""
        torch.set_grad_enabled(True)
        if self.is_closing and not self.trainer.ckpt_path:
            rank_zero_warn(
                f"This run does not continue exactly: this trainer's earlier fit ended with an error while round"
                f" {self.round - 1} ended, so schedules and callbacks have seen only a part of that round. To continue"
                " exactly, resume from a checkpoint of that round or an earlier one: fit(..., ckpt_path=...)."
            )
        self.run_state.start()
        self._plateau_round = self.round
        self.set_progress(self.round)
        self.is_closing, self._stop, self.after_round = False, Stop.NO, []
        self.monitors.watch(self.trainer)
        self.restarting = self._has_checked_batches = False
        self._of_hooks = {}
        self._says_why_it_continues = True
        self.epoch_loop.val_loop._restarting = False

    def on_run_end(self) -> None:
        """Call the hooks that end training, and keep their changes to the model."""
        super().on_run_end()
        assert self.run_state.server_model is not None
        self.run_state.server_model.sync_hook_changes()

    def teardown(self) -> None:
        """Release the run; :meth:`FederatedTrainer._teardown` has already ended it."""
        self.monitors.release()
        self.epoch_loop.teardown()

    def set_progress(self, round: int) -> None:
        """Set Lightning's epoch counters to the round."""
        for counter in (self.epoch_progress.total, self.epoch_progress.current):
            counter.ready = counter.started = counter.processed = counter.completed = round

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Return the state after the last completed round."""
        return self.run_state.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        """Load a checkpoint's state for the next fit, and set the epoch counters to its round."""
        self.run_state.load_state_dict(state_dict[f"{prefix}state_dict"])
        self.set_progress(self.round)
        self.epoch_loop.val_loop._restarting = True  # makes Lightning skip its sanity check

    # ------------------------------------------------------------------ a round

    def on_advance_start(self) -> None:
        """Call the hooks that start a round, and draw its cohort between Lightning's hooks and those of rounds."""
        trainer = self.trainer
        assert self.run_state.rounds is not None
        self.epoch_progress.increment_ready()
        self.run_state.begin_round()
        if self.run_state.has_hooks:
            self._seed_hooks(Purpose.HOOKS_BEFORE_ROUND)
        if self.settings.local_schedule is not None:
            self.run_state.show_rates()
        call._call_callback_hooks(trainer, "on_train_epoch_start")
        call._call_lightning_module_hook(trainer, "on_train_epoch_start")
        self.epoch_progress.increment_started()
        # draw after these hooks, since GradientAccumulationScheduler sets the batches per step of this round there
        self.run_state.rounds.draw(self.measurements.training_losses)
        call_round_hook(trainer, "on_round_start", self.round)

    def advance(self) -> None:
        """Run one round, and validate the server model if due."""
        trainer = self.trainer
        try:
            with trainer.profiler.profile("run_federated_round"):
                report = self._run_round()
        except (KeyboardInterrupt, SIGTERMException) as request:
            self.run_state.leave_round()
            self._end_stopped(stop_of(request))
            raise
        if self.run_state.has_hooks:
            self._seed_hooks(Purpose.HOOKS_AFTER_ROUND)
        trainer._logger_connector.on_epoch_end()
        with steps_not_counted():
            self.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if self.settings.local_schedule is not None:
            self.run_state.show_rates()
        call_round_hook(trainer, "on_round_end", report)
        self._validate()
        self.step_plateau_schedulers()

    def on_advance_end(self) -> None:
        """Call the hooks that end a round, and log its metrics."""
        trainer = self.trainer
        self.epoch_progress.increment_processed()
        call._call_callback_hooks(trainer, "on_train_epoch_end", monitoring_callbacks=False)
        call._call_lightning_module_hook(trainer, "on_train_epoch_end")
        for callback in trainer.callbacks:  # check before callbacks save
            if isinstance(callback, TargetMetric):
                callback.check(trainer)
        call._call_callback_hooks(trainer, "on_train_epoch_end", monitoring_callbacks=True)
        saves, self.after_round = self.after_round, []
        for _, save in sorted(saves, key=itemgetter(0)):
            save()
        trainer._logger_connector.on_epoch_end()
        if trainer.world_size > 1:
            self._of_hooks = self.epoch_loop._results.of_hooks()
        trainer._logger_connector.update_train_epoch_metrics()
        self.epoch_progress.increment_completed()
        self.is_closing, self.has_run = False, True
        if trainer.world_size == 1:
            self._stop = max(self._stop, trainer._signal_connector.asked)
        if self._stop:
            self._end_stopped(self._stop)
            raise exception_of(self._stop)
        if (error := self.monitors.error) is not None:
            save_last_round(trainer, self.round, trainer._checkpoint_connector.last_saved)
            raise error

    def _seed_hooks(self, purpose: Purpose) -> None:
        """Seed the global generators for user hooks; all processes and a resumed run draw the same numbers."""
        seed_global(derive_seed(self.state.seed, purpose, self.round), self.trainer.strategy.root_device)

    def _end_stopped(self, stop: Stop) -> None:
        """Save the last completed round unless a checkpoint has it, in all processes together."""
        trainer, connector = self.trainer, self.trainer._signal_connector
        if self.is_closing:
            return  # an immediate interrupt: the state is not that of a completed round
        connector.received_sigterm = stop >= Stop.TERMINATE
        save_last_round(trainer, self.round, trainer._checkpoint_connector.last_saved)
        if stop == Stop.REQUEUE:
            connector.requeue()

    def step_plateau_schedulers(self) -> None:
        """Step ``ReduceLROnPlateau`` once per round, after validation and before any checkpoint."""
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
        """Return whether ``ReduceLROnPlateau`` has yet to step for a round whose server step is taken."""
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
        if self.run_state.sites:
            self._drop_reserved_names()
        trainer.training = True
        trainer._logger_connector._first_loop_iter = None

    def _interval_has_passed(self) -> bool:
        """Return whether the time between validations has passed, by the first process's clock; True if none is set."""
        trainer = self.trainer
        interval = trainer._val_check_time_interval
        if interval is None:
            return True
        stops = trainer.should_stop and self._can_stop_early  # a run that is asked to stop validates, as in Lightning
        return bool(trainer.strategy.broadcast(stops or time.monotonic() - trainer._last_val_time >= interval))

    def _run_round(self) -> RoundReport:
        started = time.perf_counter()
        trainer, results, run = self.trainer, self.epoch_loop._results, self.run_state
        assert run.rounds is not None
        assert run.server_model is not None
        if run.rounds.work.split.size > 1:
            check_batch_statistics(trainer.lightning_module)
        run.server_model.begin_round()
        if not self._has_checked_batches:
            run.rounds.check_batches()
            self._has_checked_batches = True
        server_round, statuses = run.rounds.run(self._process_status)
        self._merge_statuses(statuses)
        self.is_closing, run.round_start = True, None  # from here on, checkpoints hold this round
        self.max_batches = 1  # reset: it has the last client's value
        if run.has_hooks:
            run.server_model.stop_keeping()
        if self.settings.is_private or self.settings.client_privacy is not None:
            results.forget_clients()
        if run.sites:
            self._drop_reserved_names()
        trainer._logger_connector.epoch_end_reached()
        metrics = {name: float(value) for name, value in trainer._logger_connector.metrics["callback"].items()}
        if run.may_draw:  # identical in every process
            self._seed_hooks(Purpose.SERVER)
        report = server_round.close(metrics, time.perf_counter() - started)
        run.close_round(report)
        if report.failed:
            warn_of(report.failed, self._warned)
        return report

    def _process_status(self) -> dict[str, Any]:
        """Return the status of this process for the others when its clients are done."""
        trainer, run = self.trainer, self.run_state
        assert run.clients is not None
        assert run.server_model is not None
        return {
            "logged": self.epoch_loop._results.partial() if trainer.world_size > 1 else {},
            "of_hooks": self._of_hooks,
            "stop": trainer._signal_connector.asked,
            "change": run.server_model.change_digest,
            "gave_up": run.clients.have_given_up,
        }

    def _merge_statuses(self, statuses: Sequence[Mapping[str, Any]]) -> None:
        """Combine the logged values of all processes, and apply stop requests and engine changes of any of them."""
        run = self.run_state
        assert run.clients is not None
        assert run.server_model is not None
        if len(statuses) > 1:
            self.epoch_loop._results.merge([status["logged"] for status in statuses])
            self._warn_of_differences([status["of_hooks"] for status in statuses])
            run.server_model.check_changes_agree([status["change"] for status in statuses])
            if any(status["gave_up"] for status in statuses):
                run.clients.give_up()
        self._stop = Stop(max(map(itemgetter("stop"), statuses)))

    def _warn_of_differences(self, of_hooks: Sequence[Mapping[str, float]]) -> None:
        """Warn if hooks of the last round logged different values in different processes: nothing combines them."""
        for name, value in of_hooks[0].items():
            theirs = [
                others[name] for others in of_hooks[1:] if name in others and not math.isnan(value + others[name])
            ]
            if name not in self._differing and any(not math.isclose(value, other, rel_tol=1e-6) for other in theirs):
                self._differing.add(name)
                rank_zero_warn(
                    f"A hook of the round logs {name!r} with another value in each process, such as what training_step"
                    " has collected from the clients that it trains; loggers get the first process's. Pass"
                    " sync_dist=True to self.log there, or log the value in training_step."
                )

    # ------------------------------------------------------------------ the state of the run, for callbacks

    @property
    def round(self) -> int:
        """The number of completed rounds."""
        return self.run_state.round

    @property
    def steps_taken(self) -> int:
        """The local steps of all clients in all completed rounds."""
        return self.run_state.steps_taken

    @property
    def state(self) -> Server:
        """The server's side of the run.

        Raises:
            FederatedError: Before the first fit, and after one that resumed a finished run and had nothing to do, or
                that ran in processes which have ended.
        """
        return self.run_state.server

    @property
    def server(self) -> State:
        """The method's server state after the last completed round, by name."""
        return self.state.state

    @property
    def round_state(self) -> State:
        """The server state that clients read in the current round; outside of one, :attr:`server`."""
        rounds = self.run_state.rounds
        return self.server if rounds is None or rounds.current_round is None else rounds.current_round.state

    @property
    def population(self) -> Population | None:
        """The clients; None before the first fit."""
        return self.run_state.population

    @property
    def prepared(self) -> PreparedModule | None:
        """The module as engines use it, while a fit is running."""
        return self.run_state.prepared

    @property
    def clients(self) -> ClientHalf | None:
        """Answers for the clients; None before the first fit, and in a copy of the trainer."""
        return self.run_state.clients

    @property
    def local_steps(self) -> int:
        """The optimizer steps that the current client has taken so far in this round."""
        work = self.run_state.engine.optimizer.work
        return 0 if work is None else work.num_steps

    @property
    def client_model(self) -> tuple[Vector, State] | None:
        """The parameters [P] and buffers of the client whose hooks are called; None without a running fit."""
        prepared = self.prepared
        return None if prepared is None else (self.run_state.engine.current_parameters.clone(), prepared.buffers.read())

    def client_state(self, client_id: ClientId) -> State | None:
        """Return a client's state after the last completed round; None if another process has it."""
        assert self.population is not None
        index = self.population.index_of(client_id)
        return self.state.client_state(index) if self.run_state.ranks.owns(index) else None

    @property
    def epsilon(self) -> float | None:
        """The privacy spent in the completed rounds; None without differential privacy."""
        aggregator = self.settings.aggregator
        return aggregator.epsilon(self.round) if isinstance(aggregator, DifferentialPrivacy) else None

    @property
    def client_epsilons(self) -> dict[ClientId, float]:
        """The record-level privacy spent by each client that has taken part; empty without ``client_privacy``.

        Raises:
            FederatedError: If the state of the run has ended with the processes that held it.
        """
        return self.run_state.client_epsilons()

    @property
    def is_asynchronous(self) -> bool:
        """Return whether the server steps when some answers have arrived, by a simulated clock."""
        return isinstance(self.settings.aggregator, Asynchronous)

    @property
    def arrived(self) -> float:
        """Return the simulated time, in seconds, when the last step's answers had arrived.

        Raises:
            FederatedError: In a synchronous run.
        """
        run = self.settings.aggregator
        if not isinstance(run, Asynchronous):
            raise FederatedError("fit_loop.arrived is of asynchronous runs: pass asynchronous=FedBuff(...).")
        return run.between().time

    def showing_server_model(self) -> AbstractContextManager[None]:
        """Load the server's model into the module, and restore the module on exit."""
        return self.run_state.showing_server_model()

    def log_round(self, values: dict[str, float]) -> None:
        """Write a round's values to the loggers, and let callbacks monitor them."""
        if new := values.keys() - self._names:
            self._names |= new
            if self.run_state.sites:
                self._drop_reserved_names()
            self._warn_of_clashes(new)
        connector = self.trainer._logger_connector
        connector._callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})
        connector.log_metrics({name: torch.tensor(value) for name, value in values.items()}, step=self.round)

    def _drop_reserved_names(self) -> None:
        """Drop values that sites report under the name of a server value: a single site could set that value."""
        for name in self.epoch_loop._results.forget_clients(self._names | self.epoch_loop.val_loop._results.names):
            if name not in self._reserved_names:
                self._reserved_names.add(name)
                rank_zero_warn(
                    f"Clients log {name!r}, which is the name of a value of the server. The server's counts, and theirs"
                    " are left out. Choose another name in training_step."
                )

    def _warn_of_clashes(self, names: Set[str]) -> None:
        """Warn if the module logs other values under a name that the run or a measure uses."""
        for results in (self.epoch_loop._results, self.epoch_loop.val_loop._results):
            for name in sorted(names & results.names):
                rank_zero_warn(
                    f"self.log({name!r}, ...) uses the name of a value that the run itself logs: loggers, callbacks and"
                    " the summary cannot tell the two apart. Choose another name in the module."
                )

    def gather(self, record: Any) -> list[Any]:
        """Return the record of every process, in the order of ranks, for callbacks that measure; all must call it."""
        return self.run_state.ranks.gather(record)

    # ------------------------------------------------------------------ measurements of clients, for callbacks

    def full_gradient(self, client_id: ClientId, point: Vector) -> Vector:
        """Return the full-batch gradient [P] of a client's training loss at a point [P].

        It leaves no trace, and is a function of (seed, round, client) like every other gradient.

        Raises:
            FederatedError: If there is no such client, or the point is not a vector of the model's size.
        """
        return self.measurements.full_gradient(client_id, point)

    def hessian_vector(self, client_id: ClientId, point: Vector, vector: Vector) -> Vector:
        """Return the full-batch Hessian of a client's training loss at a point [P], times a vector [P].

        This differentiates :meth:`full_gradient`, with the same dropout masks for every vector.

        Raises:
            FederatedError: If the model has an operation that cannot be differentiated twice, or point or vector are
                not of the model's size.
        """
        return self.measurements.hessian_vector(client_id, point, vector)

    def batch_gradients(self, client_id: ClientId, point: Vector, most: int) -> Iterator[Vector]:
        """Yield the gradients [P] at a point [P] of the first ``most`` batches of a client's local epoch.

        They leave no trace, and are a function of (seed, round, client); no fit trains on batches in this order.

        Raises:
            FederatedError: If there is no such client, or the point is not a vector of the model's size.
        """
        return self.measurements.batch_gradients(client_id, point, most)

    def training_loss(self, client_id: ClientId) -> float:
        """Return :meth:`training_losses` of one client.

        Raises:
            FederatedError: If it has no examples, or is on a site that does not answer.
        """
        losses = self.training_losses([client_id])
        if client_id not in losses:
            raise FederatedError(f"The site of client {client_id!r} has not answered, and its loss is unknown.")
        return losses[client_id]

    def training_losses(self, client_ids: Sequence[ClientId]) -> dict[ClientId, float]:
        """Return the mean training loss f_i of clients at the server model, in eval mode and without augmentation.

        It leaves no trace, and is a function of (seed, round, client). For sites, see :meth:`evaluate_clients`.

        Raises:
            FederatedError: If a client has no examples.
        """
        return self.measurements.training_losses(client_ids)

    def evaluate_client(
        self, client_id: ClientId, on: str = "val", steps: int = 0, own: bool = False
    ) -> dict[str, float]:
        """Return the values that ``validation_step`` logs for the server model on one client's own examples, by name.

        It leaves no trace, and is a function of (seed, round, client).

        Args:
            client_id: The client.
            on: "val" for the client's own validation set, "train" for its training set.
            steps: Local fine-tuning steps on the client's training set, with the user's optimizer, before evaluation.
            own: Whether to evaluate the client's own model instead. This process must keep the client's state.

        Raises:
            FederatedError: If the client has no validation set, or ``validation_step`` logs nothing.
        """
        return self.measurements.evaluate_client(client_id, on, steps, own)

    def evaluate_clients(
        self, client_ids: Sequence[ClientId], on: str = "val", steps: int = 0, own: bool = False
    ) -> dict[ClientId, dict[str, float]]:
        """Return :meth:`evaluate_client` of several clients, by client; remote clients are asked all at once.

        Clients on sites that do not answer are left out.
        """
        return self.measurements.evaluate_clients(client_ids, on, steps, own)

    def showing_client_model(self, client_id: ClientId) -> AbstractContextManager[None]:
        """Load a client's personal model into the module between rounds of a fit, and restore the module on exit.

        This is the model to save or to use for this client. It is the server's if clients have no personal models.

        Raises:
            FederatedError: If no fit is running, or if another process or a site has the client's state.
        """
        return self.measurements.showing_client_model(client_id)
