"""The state of a run between rounds: the start and end of a fit, and the contents of its checkpoints."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

from lightning_fed.checkpoints.client_states import ClientStatesStorage
from lightning_fed.checkpoints.contents import check_loads
from lightning_fed.checkpoints.restoring import EarlierFit, notes_of, restored_from, sampler_state, start_server
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import rank_zero_warn
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import RoundReport
from lightning_fed.core.seeds import capture_random_state
from lightning_fed.core.types import ClientId
from lightning_fed.data.datamodule import FederatedDataModule, check_clients
from lightning_fed.engines.base import Engine
from lightning_fed.engines.prepared import PreparedModule
from lightning_fed.rounds.client_half import ClientHalf
from lightning_fed.rounds.client_work import ClientWork, prepare_clients
from lightning_fed.rounds.cohort import CohortSampling, secret_seed
from lightning_fed.rounds.local_plans import limited
from lightning_fed.rounds.round import Rounds
from lightning_fed.server.participation import Population
from lightning_fed.server.privacy import ClientPrivacy, DifferentialPrivacy, PrivacyLedger
from lightning_fed.server.server import Server
from lightning_fed.settings.settings import Settings
from lightning_fed.strategies.ddp import WithinClientStrategy
from lightning_fed.strategies.processes import Ranks
from lightning_fed.trainer.alike import check_alike
from lightning_fed.trainer.own_parts import OwnParts
from lightning_fed.trainer.server_model import EARLY_HOOKS, RoundStart, ServerModel, has_round_hooks


class RunState:
    """The state of a trainer's run between rounds and between fits."""

    def __init__(self, trainer: pl.Trainer, settings: Settings) -> None:
        self.trainer, self.settings = trainer, settings
        self.client_states = ClientStatesStorage(trainer, settings.client_states, settings.client_states_dir)
        self.population: Population | None = None  # None before the first fit
        self.prepared: PreparedModule | None = None  # set while a fit is running or clients work without one
        self.server_model: ServerModel | None = None  # set while a fit is running
        self.clients: ClientHalf | None = None  # None before the first fit, and in a copy of the trainer
        self.rounds: Rounds | None = None  # set while a fit is running
        self.ranks = Ranks()
        self.steps_taken = 0  # local steps of all clients in all completed rounds
        # Remote clients only: "run" is the run's name at their sites. "versions" has the versions of the states there,
        # by stored index, each with its fit. "numbers" has the numbers that clients have registered with, by id.
        self.sites: dict[str, Any] = {}
        self._server: Server | None = None
        self._elsewhere: ClientHalf | None = None  # answers for remote clients of a starting fit
        self._rounds_elsewhere = 0  # rounds completed in launched processes that have ended
        self._checkpoint: dict[str, Any] | None = None  # loaded for the run, until a fit starts from it
        self._earlier: EarlierFit | None = None  # the last fit if it completed a round
        self._notes: dict[str, str] = {}  # notes on data and optimizer
        self._engines_before: list[str] = []  # chosen by "auto" before this fit; see ClientWork.engine_names
        self._chunk_before: int | None = None  # see ClientWork.chunk_size
        self._drew_before: bool | None = None  # see ClientWork.draws
        # the buffers that the module has before Lightning's sanity check, which may set more of them
        self.first_buffers: Collection[str] = ()
        self.round_start: RoundStart | None = None  # set until the current round is complete
        self.has_hooks = False  # whether user hooks may change the run, or draw numbers, between clients' work
        self.may_draw = False  # whether the server's step has a user-defined method, aggregator or optimizer
        self._own_parts: OwnParts | None = None  # watched in a fit's first rounds
        self._sampler_is_checked = False  # whether its state is known to load from a checkpoint
        self._restore_generators: Callable[[], None] | None = None  # set once the fit's rounds have begun

    @property
    def round(self) -> int:
        """The number of completed rounds."""
        if self._checkpoint is not None:
            return int(self._checkpoint["round"])
        if self._server is None:
            return self._rounds_elsewhere if self.prepared is None else self.prepared.round
        return self._server.round

    @property
    def has_server(self) -> bool:
        """Return whether there is a server state."""
        return self._server is not None

    @property
    def server(self) -> Server:
        """The server's side of the run."""
        if self._server is None:
            self.check_is_here("The server state")
            raise FederatedError(
                "There is no server state before trainer.fit(), nor after a fit that had nothing to do since all"
                " rounds of its checkpoint were done."
            )
        return self._server

    @property
    def engine(self) -> Engine:
        """The engine of the current or last fit, for local clients."""
        if self.clients is None:
            raise FederatedError("Clients can be measured once this trainer has begun a fit; a copy has not.")
        if not isinstance(self.clients, ClientWork):
            raise FederatedError("The clients of this run are trained on their sites.")
        return self.clients.engine

    def client_epsilons(self) -> dict[ClientId, float]:
        """Return the record-level privacy spent by each client, even right after a checkpoint is loaded."""
        if self.settings.client_privacy is None:
            return {}
        self.check_is_here("The privacy that clients have spent")
        ids: Sequence[ClientId] = ()
        ledger: PrivacyLedger | None = None
        if (saved := self._checkpoint) is not None and "ledger" in saved:
            ids = range(saved["clients"]) if isinstance(saved["clients"], int) else saved["clients"]
            ledger = PrivacyLedger(self.settings.client_privacy, lambda *_: 0, lambda *_: 0)
            ledger.load(saved["ledger"])
        elif saved is None and self._server is not None:
            ids, ledger = self._server.ids, self._server.ledger
        return {} if ledger is None else {ids[index]: epsilon for index, epsilon in ledger.epsilons().items()}

    def check_is_here(self, what: str) -> None:
        """Raise if the state has ended with the processes that held it."""
        if self._rounds_elsewhere:
            raise FederatedError(
                f"{what} after round {self._rounds_elsewhere - 1} has ended with the processes that the trainer"
                " started. Read or save it in a callback, such as ModelCheckpoint, or resume from a checkpoint."
            )

    def end_elsewhere(self, rounds: int) -> None:
        """Record that other processes have completed the rounds of the fit, and ended."""
        self._rounds_elsewhere = rounds

    def at_round_start(self) -> AbstractContextManager[None]:
        """Give the server the model from the round's start, before its hooks, and restore the current one on exit."""
        return nullcontext() if self.server_model is None else self.server_model.without_hook_changes()

    @contextmanager
    def showing_server_model(self) -> Iterator[None]:
        """Load the server's model into the module, and restore the module on exit."""
        with self.preserving_module():
            if self.server_model is not None:
                self.server_model.show()
            yield

    def preserving_module(self) -> AbstractContextManager[None]:
        """Restore the module's parameters and buffers on exit."""
        return nullcontext() if self.server_model is None else self.server_model.preserving_module()

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last completed round, with client states on rank zero, or their place on disk."""
        if self._checkpoint is not None:  # nothing has run since it was loaded
            return {**self._checkpoint, "client_states": self.client_states.copied(self._checkpoint)}
        if self._server is None:
            return {}
        if self.ranks.size > 1 and self.rounds is not None and self.rounds.current_round is not None:
            raise FederatedError(
                "A checkpoint in the middle of a round cannot be written by several processes, which are then at"
                " different clients. Save at the end of a round, or train in one process."
            )
        # keep the last metrics: a schedule or a checkpoint callback may need one that is not logged in every round
        logged = self.trainer.callback_metrics if self.round_start is None else self.round_start.metrics
        metrics = {name: value.detach().cpu() for name, value in logged.items()}
        client_states = self.client_states.record(self._server, self.ranks)
        engines, chunk, draws = self._engines_before, self._chunk_before, self._drew_before
        if self.clients is not None and self.prepared is not None:
            engines, chunk, draws = self.clients.engine_names, self.clients.chunk_size, self.clients.draws
        noted: dict[str, Any] = {
            "transport": self.settings.transport(),
            "work": self._notes,
            "engine": {"asked": self.settings.engine, "taken": engines, "draws": draws},
            "chunk_size": {"asked": self.settings.chunk_size, "taken": chunk},
            "steps_taken": self.steps_taken,
        }
        noted |= {"sites": self.sites} if self.sites else {}
        if self.ranks.size > 1 and (precision := self.trainer.precision_plugin.state_dict()):
            noted["precision"] = self.ranks.gather_at_zero(precision)  # each process scales its own clients' losses
        if self.settings.aggregator is not None and (kept := self.settings.aggregator.state_dict()):
            noted["aggregator"] = kept
        if self.settings.sampler_learns:
            noted["sampler"] = sampler_state(self.settings)
        return {**self._server.state_dict(client_states), "metrics": metrics, **noted}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a checkpoint's state for the next fit."""
        self._checkpoint = {**saved, "client_states": self.client_states.resolved(saved["client_states"])}
        self.sites = dict(saved.get("sites", {}))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy of a fitted trainer; its next fit creates a new engine."""
        return {**self.__dict__, "clients": None, "_elsewhere": None}

    # ------------------------------------------------------------------ clients

    def connect_clients(self) -> None:
        """Let the data module connect to remote clients, if it has any, and read the population."""
        self._elsewhere = self.trainer.datamodule.connect_clients()
        if self._elsewhere is None:
            if versions := self.sites.get("versions"):
                of = (
                    f"The checkpoint {self.trainer.ckpt_path}"
                    if self.trainer.ckpt_path
                    else "This trainer's earlier fit"
                )
                raise FederatedError(
                    f"{of} is of a run with real clients, and {len(versions)} of them keep states on their sites: a"
                    " simulation cannot continue without these. Continue with fit(model, RemoteClients(...))."
                )
            self.sites = {}
        self.load_population()

    def load_population(self, among: Sequence[ClientId] | None = None) -> Population:
        """Read the population before a fit, or between rounds if new clients have arrived.

        ``among`` are the ids of all clients, if the data module has only some of them.
        """
        data: FederatedDataModule = self.trainer.datamodule
        check_clients(data)
        if among is not None:
            population = Population(among, data.client_size)
        else:
            population = Population(data.client_ids, data.client_size, data.known_sizes)
            if empty := population.empty:
                shown = ", ".join(repr(i) for i in empty[:5]) + (", ..." if len(empty) > 5 else "")
                rank_zero_warn(f"{len(empty)} of {len(data.client_ids)} clients are empty and never sampled: {shown}.")
            for sampler in (self.settings.sampler, self.settings.gradient_sampler):
                if callable(count := getattr(sampler, "count", None)):  # refuses a population that is too small
                    count(len(population))
        if self.rounds is not None and self.prepared is not None:
            self.rounds.sampling.population, self._notes = population, notes_of(self.prepared, population)
        self.population = population
        return population

    def prepare_without_fit(
        self, clients: Sequence[ClientId] | None, among: Sequence[ClientId] | None
    ) -> tuple[PreparedModule, Population, ClientWork]:
        """Return module, population and clients, ready to work without a fit; ``clients`` are those with data here."""
        population = self.load_population(among)
        self.prepared = prepared = PreparedModule(self.trainer)
        self.clients = work = prepare_clients(prepared, population, self.settings.engine, clients)
        return prepared, population, work

    def _make_ledger(self, privacy: ClientPrivacy) -> PrivacyLedger:
        """Return the ledger of the record-level privacy that clients spend."""
        population = self.population
        assert population is not None
        largest = max(population.sizes, default=1) if population.sizes_are_known else 1
        if privacy.delta >= 1 / largest:
            rank_zero_warn(
                f"client_privacy has delta={privacy.delta:g}, which is not below 1/n = {1 / largest:.3g} of the largest"
                " client: such a guarantee says little about one example."
            )
        trainer, ids = self.trainer, population.ids  # hooks may change batches between rounds
        return PrivacyLedger(
            privacy,
            lambda index, size: trainer.datamodule.batches_in_epoch(ids[index], size),
            lambda batches: limited(batches, trainer.limit_train_batches),
        )

    # ------------------------------------------------------------------ start and end of a fit

    def start(self) -> None:
        """Prepare the module, the server in the current state of the run, and the clients."""
        trainer, settings, population = self.trainer, self.settings, self.population
        assert population is not None
        # the run exchanges the buffers that the module had when it started
        exchanged: Collection[str] = self.first_buffers if self._earlier is None else self._earlier.server.buffers
        if self._checkpoint is not None:
            with restored_from(trainer.ckpt_path, "the server's buffers"):
                exchanged = tuple(self._checkpoint["buffers"])
        self.prepared = prepared = PreparedModule(trainer, exchanged)
        if trainer.world_size > 1 and not isinstance(trainer.strategy, WithinClientStrategy):
            self.ranks = Ranks.of(trainer)
        notes = notes_of(prepared, population)
        saved, self._checkpoint = self._checkpoint, None
        try:
            seed = settings.seed if saved is None or settings.seed_is_given else saved["seed"]
            if self.ranks.size > 1 or prepared.split.size > 1:
                check_alike(prepared, population, notes, seed, self.ranks)
            if saved is not None:
                self._resume_counts(saved)
                self._resume_precision(saved)
            self._server = server = start_server(
                prepared,
                self.client_states,
                self.ranks,
                notes,
                saved,
                None if saved is not None else self._earlier,
                None if settings.client_privacy is None else self._make_ledger(settings.client_privacy),
            )
        except BaseException:  # this module must not show the server of an earlier fit
            prepared.release()
            self.prepared = None
            raise
        self._notes, prepared.seed = notes, server.seed
        privacy, is_here = settings.client_privacy, self._elsewhere is None  # sites have their own secrets
        if privacy is not None and privacy.noise_multiplier and is_here and server.seed < 2**64:
            rank_zero_warn(
                f"With client_privacy, noise and samples follow from seed={server.seed}, which can be guessed: epsilon"
                " holds in a simulation only. To release what clients send, set seed=secrets.randbits(128), and keep it"
                " secret."
            )
        self.server_model = ServerModel(prepared, server)
        seed = server.seed
        if isinstance(settings.aggregator, DifferentialPrivacy):
            seed = secret_seed(trainer, settings.aggregator, population)
        sampling = CohortSampling(settings, population, seed)
        elsewhere, self._elsewhere = self._elsewhere, None
        self._own_parts = OwnParts(settings, trainer.datamodule if elsewhere is None else None)
        if elsewhere is None:
            before = self._engines_before, self._chunk_before, self._drew_before
            self.clients = work = prepare_clients(prepared, population, settings.engine, None, *before)
            if self.ranks.size > 1:
                work.agree(self.ranks)
        else:
            self.clients = elsewhere
        self.rounds = Rounds(server, sampling, self.clients, self.ranks)
        self.round_start, self.has_hooks = None, has_round_hooks(trainer)
        parts = settings.algorithm, settings.aggregator, server.step.optimizer
        modules = [type(part).__module__.split(".")[0] for part in parts]
        self.may_draw = any(module not in ("torch", "lightning_fed", "builtins") for module in modules)
        self.server_model.keeps_untrained = has_round_hooks(trainer, EARLY_HOOKS)
        self.server_model.show()

    def _resume_counts(self, saved: Mapping[str, Any]) -> None:
        """Restore a checkpoint's count of local steps, the engines that "auto" chose, and the chunk size."""
        asked = self.settings.chunk_size
        with restored_from(self.trainer.ckpt_path, "the choice of the engine"):
            self._engines_before, self._drew_before = [], saved.get("engine", {}).get("draws")
            if "engine" not in saved:  # an earlier version noted only that "auto" had left an engine
                self._engines_before = ["sequential"] * 2 if saved.get("gave_up") else []
            elif saved["engine"]["asked"] == "auto":
                self._engines_before = [str(name) for name in saved["engine"]["taken"]]
            before = saved.get("chunk_size", {"asked": None, "taken": None})
            is_other = before["taken"] is None or asked not in (None, before["asked"])
            self._chunk_before = None if is_other else max(1, int(before["taken"]))
        with restored_from(self.trainer.ckpt_path, "the count of local steps"):
            self.steps_taken = int(saved["steps_taken"])

    def _resume_precision(self, saved: Mapping[str, Any]) -> None:
        """Restore this process's gradient scaler, since Lightning has loaded process 0's in all processes."""
        plugin, ranks = self.trainer.precision_plugin, self.ranks
        if not plugin.state_dict():
            return
        with restored_from(self.trainer.ckpt_path, "the gradient scaler"):
            states = saved.get("precision", [None])
            count = len(states)
            if count == ranks.size > 1:
                plugin.load_state_dict(states[ranks.rank])
        if count != ranks.size:
            rank_zero_warn(
                f"This run does not continue exactly: the checkpoint {self.trainer.ckpt_path} was written by {count}"
                f" processes with a gradient scaler each, and this run has {ranks.size}. All start from the scale of"
                " the first one, so other local steps may overflow and be skipped."
            )

    def show_rates(self) -> None:
        """Show the initial rates of the next round, which a schedule by local step sets."""
        assert self.prepared is not None
        self.prepared.begin_round(self.settings.first_step(self.server.round, self.server.longest_steps))

    def begin_round(self) -> None:
        """Record the state at the start of the next round, before its hooks."""
        if self._restore_generators is None:
            self._restore_generators = capture_random_state(self.trainer.strategy.root_device)
        self.round_start = RoundStart(self.trainer, self.server_model if self.has_hooks else None)

    def close_round(self, report: RoundReport) -> None:
        """Complete a round."""
        assert self.rounds is not None
        assert self.server_model is not None
        assert self.clients is not None
        if self.settings.sampler_learns:
            self._teach_sampler(report)
        self.steps_taken += sum(report.steps.values())
        self.clients.completed(report)
        if self._own_parts is not None and not self._own_parts.look(report):
            self._own_parts = None
        self.rounds.leave()
        self.server_model.show()

    def _teach_sampler(self, report: RoundReport) -> None:
        """Give the reports to a learning sampler; processes that split batches use the first one's reports."""
        sampler: Any = self.settings.sampler
        assert self.clients is not None
        (reports, *_) = self.clients.split.gather(dict(report.clients))
        sampler.update(report.round, reports)
        if not self._sampler_is_checked:
            self._sampler_is_checked = True
            check_loads(sampler.state_dict(), f"{type(sampler).__name__}.state_dict()")

    def leave_round(self) -> None:
        """Abandon the current round, and return to the state after the last completed one."""
        assert self.rounds is not None
        assert self.server_model is not None
        try:
            self.rounds.leave()  # staged states are discarded when the fit ends
        finally:
            self.server_model.undo_hook_changes()
            if self.round_start is not None:
                self.round_start.put_back(self.trainer)

    def end(self) -> None:
        """End a fit, and leave the server's model in the module.

        Rounds seed the global generators. This restores them, so that a script does not draw the same after each fit.
        """
        with ExitStack() as ends:  # called in reverse order, each of them also after an error in another
            ends.callback(self._close)
            if self.prepared is not None and self.server_model is not None:
                ends.callback(self.server_model.show)
            if self._restore_generators is not None:
                ends.callback(self._restore_generators)
                self._restore_generators = None
            if self.prepared is not None and self.round_start is not None and self.rounds is not None:
                with suppress(FederatedError):  # a setting that cannot be restored has ended the run
                    self.leave_round()

    def _close(self) -> None:
        """Note what the next fit continues from, give everything back, and unlock the client states."""
        with ExitStack() as ends:
            ends.callback(self.client_states.close, None if self._server is None else self._server.clients)
            prepared, self.round_start = self.prepared, None
            if prepared is not None:
                self.prepared = self.server_model = self.rounds = None
                ends.callback(prepared.give_back_optimizers)
                ends.callback(prepared.release)
                if (server := self._server) is not None:
                    self._earlier = EarlierFit.of(prepared, server, self._notes) if server.round > 0 else None
                if self.clients is not None:
                    self._engines_before, self._chunk_before = self.clients.engine_names, self.clients.chunk_size
                    self._drew_before = self.clients.draws
            if self._server is not None:
                self._server.advance_solver = None
