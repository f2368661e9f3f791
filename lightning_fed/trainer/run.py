"""What a run is between rounds: how it starts, what its checkpoints hold, and how it ends."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_fed.callbacks.monitors import Monitors
from lightning_fed.checkpoints.client_states import ClientStatesPlace
from lightning_fed.checkpoints.restoring import EarlierFit, notes_of, restored_from, start_server
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import _FitLoop
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.engines.batch_hooks import time_by_rounds
from lightning_fed.engines.prepared import PreparedModule
from lightning_fed.engines.sequential.local_loop import ClientEpochLoop
from lightning_fed.rounds.client_work import ClientWork, prepare_clients, prepare_module
from lightning_fed.rounds.cohort import CohortSampling, cohort_seed
from lightning_fed.rounds.local_plans import population_of
from lightning_fed.rounds.round import Rounds
from lightning_fed.server.participation import Population
from lightning_fed.server.server import Server
from lightning_fed.settings.module_checks import check_module
from lightning_fed.settings.settings import Settings
from lightning_fed.settings.trainer_checks import check_trainer
from lightning_fed.strategies.ddp import WithinClientStrategy
from lightning_fed.strategies.processes import Ranks
from lightning_fed.strategies.stopping import Stop
from lightning_fed.trainer.measurements import Inspection

__all__ = ["RunState"]


class RunState(Inspection, _FitLoop):
    """The side of :class:`lightning_fed.FederatedLoop` that outlives a round.

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
        self._earlier: EarlierFit | None = None  # if that has completed a round
        self._plateau_round = 0
        self._work_notes: dict[str, str] = {}
        self.clients_elsewhere: Callable[[PreparedModule, Population], ClientWork] | None = None  # than in this process
        self.sites: dict[str, Any] = {}  # of clients elsewhere: which run they know, and the versions of their states
        self._warned: set[ClientId] = set()  # of whose failures the user has been warned
        self._engines_before: list[str] = []  # that "auto" took before this fit; see ClientWork.engine_names
        self._stop = Stop.NO  # what any process was asked for in this round
        self.steps_taken = 0  # of all clients in all completed rounds
        self._batches_checked = False  # in this fit
        self.monitors = Monitors()
        self._goes_on = False  # whether it has been said that the run is not stopped yet
        self.runs_several = False  # while a step is that of several clients
        self.is_closing = False  # between the server's step and the end of the round's hooks
        self.precision_at_start: dict[str, Any] | None = None  # of the round at work, where a gradient scaler has state
        self.corrected_clip: tuple[float, Any] | None = None  # value and algorithm, to clip after the correction

    # ------------------------------------------------------------------ checkpoints

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
        engines = self._engines_before if self.clients is None or self.prepared is None else self.clients.engine_names
        engine = {"asked": self.settings.engine, "taken": engines}
        noted = {"transport": transport, "work": self._work_notes, "engine": engine}
        noted["steps_taken"] = self.steps_taken
        noted |= {"sites": self.sites} if self.sites else {}
        if self.settings.aggregator is not None and (kept := self.settings.aggregator.state_dict()):
            noted["aggregator"] = kept
        return {**self._state.state_dict(client_states), "metrics": metrics, **noted}

    def load_state_dict(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        """Take a checkpoint's state, to be used when the fit starts; counters follow from its round."""
        saved = state_dict[f"{prefix}state_dict"]
        self._restored = {**saved, "client_states": self.kept_states.resolved(saved["client_states"])}
        self.set_progress(self.round)
        self.epoch_loop.val_loop._restarting = True  # tells Lightning that this is no place for a sanity check

    # ------------------------------------------------------------------ start and end of a fit

    def setup_data(self) -> None:
        """Learn who the clients are."""
        trainer = self.trainer
        check_trainer(trainer)
        check_module(trainer)
        time_by_rounds(trainer)
        self.population = population_of(trainer)
        self.max_batches = 1  # set anew for every local epoch
        trainer.val_check_batch = math.inf
        trainer._last_val_time = time.monotonic()

    def reset(self) -> None:
        """Lay out the parameters, wrap the optimizer, and bring the server state to where the run stands."""
        torch.set_grad_enabled(True)
        trainer, settings = self.trainer, self.settings
        assert self.population is not None
        self.prepared = prepared = prepare_module(trainer)
        if not isinstance(trainer.strategy, WithinClientStrategy):
            self._ranks = Ranks.of(trainer)
        sizes = self.population.sizes if self.population.sizes_are_known else None
        batch_size = trainer.datamodule.batch_size
        notes = {**settings.work(), **notes_of(sizes, batch_size, prepared.optimizer.base, prepared.flat)}
        try:
            self._state = self._start_server(notes)
        except BaseException:  # the state there may be is of an earlier fit: this module is not to be shown with it
            prepared.release()
            self.prepared = None
            raise
        self._work_notes = notes
        prepared.seed = self._state.seed
        sampling = CohortSampling(
            settings, self.population, cohort_seed(trainer, settings, self.population, self._state.seed)
        )
        if self.clients_elsewhere is None:
            self.clients = prepare_clients(prepared, self.population, settings.engine, before=self._engines_before)
        else:
            self.clients = self.clients_elsewhere(prepared, self.population)
        self._rounds = Rounds(self._state, sampling, self.clients, self._ranks)
        self._plateau_round = self._state.round
        self.set_progress(self._state.round)
        self.is_closing, self.precision_at_start, self._stop = False, None, Stop.NO
        self.monitors.watch(trainer)
        self.restarting = self._goes_on = self._batches_checked = False
        self.epoch_loop.val_loop._restarting = False
        self.show_server_model()

    def meet_clients(self) -> None:
        """Learn anew, between rounds, who the clients are, of whom more is known by now."""
        assert self._rounds is not None
        assert self.clients is not None
        population = population_of(self.trainer)
        self.population = self._rounds.sampling.population = self.clients.plans.population = population

    def _start_server(self, notes: Mapping[str, str]) -> Server:
        """Return the server's side: that of the checkpoint or of this trainer's earlier fit, or a new one.

        Args:
            notes: What this fit notes of its work.
        """
        assert self.prepared is not None
        restored, self._restored = self._restored, None
        earlier = self._earlier if restored is None else None
        if restored is not None:
            with restored_from(self.trainer.ckpt_path, "the choice of the engine"):
                self._engines_before = _engines_of(restored)
            with restored_from(self.trainer.ckpt_path, "the count of local steps"):
                self.steps_taken = int(restored["steps_taken"])
            self._check_sites(restored.get("sites", {}))
        if earlier is not None:
            earlier.check_model(self.prepared.module)
        server = start_server(self.prepared, self.kept_states, self._ranks, notes, restored, earlier)
        aggregator = self.settings.aggregator
        if aggregator is not None and earlier is None:
            with restored_from(self.trainer.ckpt_path, "the messages on their way"):
                aggregator.load_state_dict((restored or {}).get("aggregator", {}), server.x)
        return server

    def _check_sites(self, sites: Mapping[str, Any]) -> None:
        """Refuse to go on without what clients keep on their sites.

        Raises:
            FederatedError: If there are such clients, and they are to work here.
        """
        kept = sites.get("versions") or {}
        if kept and self.clients_elsewhere is None:
            raise FederatedError(
                f"The checkpoint {self.trainer.ckpt_path} is of a run with real clients, {len(kept)} of which keep"
                " states on their sites: a simulation cannot go on without them. Go on with FederatedServer.load."
            )

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
            if (state := self._state) is not None:
                self._earlier = EarlierFit.of(self.prepared, state, self._work_notes) if state.round > 0 else None
            if self.clients is not None:
                self._engines_before = self.clients.engine_names
            self._rounds = self.precision_at_start = None
            self.show_server_model()
            self.prepared.release()
            self.trainer.strategy.optimizers = [self.prepared.optimizer.base]
            self.prepared = None
        if self._state is not None:
            self._state.advance_solver = None
        self.kept_states.close(None if self._state is None else self._state.clients)
        self.monitors.release()
        self.epoch_loop.teardown()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy of a fitted trainer needs; its next fit makes a new engine."""
        return {**self.__dict__, "clients": None}

    # ------------------------------------------------------------------ several processes

    def _tell(self) -> dict[str, Any]:
        """Return what this process tells the others of a round beside its clients' part."""
        trainer = self.trainer
        return {
            "logged": self.epoch_loop._results.partial() if trainer.world_size > 1 else {},
            "stop": trainer._signal_connector.asked,
            "edit": self._edit,
            "gave_up": self.clients is not None and self.clients.have_given_up,
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
            assert self.clients is not None
            self.clients.give_up()
        self._stop = Stop(max(part["stop"] for part in told))


def _engines_of(saved: Mapping[str, Any]) -> list[str]:
    """Return the engines that "auto" took in the run that wrote a checkpoint, none if it was told which to take."""
    if "engine" not in saved:  # written by an earlier version, which noted only that "auto" had left one
        return ["sequential"] * 2 if saved.get("gave_up") else []
    return [str(name) for name in saved["engine"]["taken"]] if saved["engine"]["asked"] == "auto" else []
