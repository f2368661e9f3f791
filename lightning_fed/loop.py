"""The loop that replaces Lightning's epochs by federated rounds."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

from lightning_fed._compat import SIGTERMException, _FitLoop, call, rank_zero_info, rank_zero_warn
from lightning_fed.callbacks.base import call_round_hook
from lightning_fed.checks import (
    check_algorithm_fits,
    check_batch_statistics,
    check_hyper_parameters,
    check_module,
    check_optimizers,
    check_schedulers,
    check_trainer,
)
from lightning_fed.core.buffers import Buffers
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.flat import FlatParameters
from lightning_fed.core.rounds import RoundReport
from lightning_fed.core.seeds import Purpose, derive_seed, preserved_random_state, seed_global
from lightning_fed.core.types import ClientId, State, Vector
from lightning_fed.data.batches import ClientBatches
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.engines.base import Engine
from lightning_fed.engines.choice import make_engine
from lightning_fed.engines.client_loop import ClientEpochLoop
from lightning_fed.engines.evaluation import ClientEvaluation, validation_batches
from lightning_fed.engines.gradients import buffer_owners
from lightning_fed.engines.plan import Planner
from lightning_fed.engines.ranks import Ranks, metrics_alone
from lightning_fed.engines.round import Round
from lightning_fed.optim import FederatedOptimizer
from lightning_fed.server.population import Population
from lightning_fed.server.sampling import check_count
from lightning_fed.server.server import Server
from lightning_fed.server.step import steps_not_counted
from lightning_fed.settings import Settings
from lightning_fed.strategies.ddp import WithinClientStrategy
from lightning_fed.strategies.split import BatchSplit

__all__ = ["FederatedLoop"]


class FederatedLoop(_FitLoop):
    """Run federated rounds where Lightning would run epochs.

    A round is a Lightning epoch, and the step axis of loggers and checkpoints is the number of completed rounds::

        x, server, clients = x^0, algorithm.init_server(x^0), {}
        for round in range(max_rounds):
            cohort = sampler(seed, round)
            if the method asks: full-batch gradients of the (gradient) cohort at x, and their mean
            for client in cohort:
                y = x; local steps on the client's batches, each gradient corrected; messages and new state, staged
            average the messages as declared; server optimizer steps along update_server(...); staged states committed
            validation of the server model when due; one report; checkpoint

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
        self.population: Population | None = None
        self._state: Server | None = None
        self._module: pl.LightningModule | None = None
        self._restored: dict[str, Any] | None = None
        self._carried: dict[str, Any] | None = None
        self._flat: FlatParameters | None = None
        self._plateau_round = 0
        self._work: Round | None = None
        self._ranks = Ranks()  # that share the clients
        self._split = BatchSplit()  # whose processes share every batch
        self._received_sigterm = False
        self.corrected_clip: tuple[float, Any] | None = None  # value and algorithm, to clip after the correction

    # ------------------------------------------------------------------ what outlives a round

    @property
    def round(self) -> int:
        """The number of completed rounds."""
        if self._restored is not None:
            return int(self._restored["round"])
        return 0 if self._state is None else self._state.round

    @property
    def state(self) -> Server:
        """The server's side of the run.

        Raises:
            FederatedError: Before the first fit.
        """
        if self._state is None:
            raise FederatedError("There is no server state before trainer.fit().")
        return self._state

    @property
    def server(self) -> State:
        """The method's server state after the last completed round, by name."""
        return self.state.state

    @property
    def round_state(self) -> State:
        """The server state that clients read in the current round; outside of one, :attr:`server`."""
        return self.server if self._work is None else self._work.server_state

    def full_gradient(self, client_id: ClientId, point: Vector) -> Vector:
        """Return the full-batch gradient [P] of a client's training loss at a point [P], for callbacks that measure.

        It leaves no trace, and is a function of (seed, round, client) like every other gradient.
        """
        batches, index = self._client(client_id)
        with preserved_random_state(point.device):
            return self._engine.gradient_at(point, batches, self.round, index)

    def hessian_vector(self, client_id: ClientId, point: Vector, vector: Vector) -> Vector:
        """Return the full-batch Hessian of a client's training loss at a point [P], times a vector [P].

        The Hessian is that of :meth:`full_gradient`, with the same dropout masks for every vector.

        Raises:
            FederatedError: If the model has an operation that cannot be differentiated twice.
        """
        batches, index = self._client(client_id)
        with preserved_random_state(point.device):
            return self._engine.hessian_vector_at(point, vector, batches, self.round, index)

    def evaluate_client(self, client_id: ClientId, on: str = "val", steps: int = 0) -> dict[str, float]:
        """Return what ``validation_step`` logs of the server model on one client's own examples, by name.

        It leaves no trace, and is a function of (seed, round, client).

        Args:
            client_id: The client.
            on: "val" for the client's own validation set, "train" for its training set.
            steps: Local steps of fine-tuning on the client's training set, with the user's optimizer, before that.

        Raises:
            FederatedError: If the client has no validation set, or ``validation_step`` logs nothing.
        """
        train, index = self._client(client_id)
        examples = train if on == "train" else validation_batches(self.trainer.datamodule, client_id)
        state = self.state
        return ClientEvaluation(self._engine).run(
            state.shown(), state.buffers, examples, train, steps, self.round, index
        )

    def gather(self, record: Any) -> list[Any]:
        """Return the record of every process, in the order of ranks, for callbacks that measure; all must call it."""
        return self._ranks.gather(record)

    def client_state(self, client_id: ClientId) -> State | None:
        """Return what a client keeps after the last completed round; None where another process holds it."""
        assert self.population is not None
        index = self.population.index_of(client_id)
        return self.state.client_state(index) if self._ranks.is_home_of(index) else None

    def _client(self, client_id: ClientId) -> tuple[ClientBatches, int]:
        assert self.population is not None
        return self.trainer.datamodule.client_batches(client_id), self.population.index_of(client_id)

    @property
    def local_steps(self) -> int:
        """The optimizer steps that the client at work has taken so far in this round."""
        work = self._optimizer.work
        return 0 if work is None else work.num_steps

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Return the state after the last completed round."""
        if self._restored is not None:  # loaded, and nothing has run since
            return self._restored
        if self._state is None:
            return {}
        # the last metrics too: a schedule or a checkpoint callback may look at one that is not made anew every round
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        return {**self._state.state_dict(), "client_states": self._all_client_states(), "metrics": metrics}

    def _all_client_states(self) -> dict[int, State]:
        """Return the kept states of all clients, brought together on rank zero.

        Raises:
            FederatedError: In the middle of a round of several processes, which are then not at one place.
        """
        if self._ranks.size > 1 and self._work is not None:
            raise FederatedError(
                "A checkpoint in the middle of a round cannot be written by several processes, which are then at"
                " different clients. Save at the end of a round, or train in one process."
            )
        parts = self._ranks.gather_at_zero(self.state.clients.state_dict())
        return dict(sorted((i, state) for part in parts for i, state in part.items()))

    def load_state_dict(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        """Take a checkpoint's state, to be used when the fit starts; counters follow from its round."""
        self._restored = state_dict[f"{prefix}state_dict"]
        self._set_progress(self.round)
        self.epoch_loop.val_loop._restarting = True  # tells Lightning that this is no place for a sanity check

    def show_server_model(self) -> None:
        """Let the module hold the server model, also in the middle of a client's work."""
        if self._flat is not None and self._state is not None:
            self._flat.y.copy_(self._state.shown())
            self._flat.restore()
            self._buffers.write(self._state.buffers)

    @property
    def client_model(self) -> tuple[Vector, State] | None:
        """The parameters [P] and buffers of the client whose hooks are called, if training."""
        return None if self._flat is None else (self._engine.parameters_at_work.clone(), self._buffers.read())

    @contextmanager
    def showing_server_model(self) -> Iterator[None]:
        """Let the module hold the server model inside, and afterwards what it held before."""
        if self._flat is None:
            yield
            return
        y, buffers = self._flat.y.clone(), self._buffers.read()
        self.show_server_model()
        try:
            yield
        finally:
            self._flat.y.copy_(y)
            self._buffers.write(buffers)

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
        data: FederatedDataModule = trainer.datamodule
        self.population = Population(data.client_ids, data.client_size, data.known_sizes)
        if empty := self.population.empty:
            shown = ", ".join(repr(i) for i in empty[:5]) + (", ..." if len(empty) > 5 else "")
            rank_zero_warn(f"{len(empty)} of {len(data.client_ids)} clients are empty and never sampled: {shown}.")
        for sampler in (self.settings.sampler, self.settings.gradient_sampler):
            check_count(sampler, len(self.population))
        self.max_batches = 1  # set anew for every local epoch
        trainer.val_check_batch = math.inf

    def reset(self) -> None:
        """Lay out the parameters, wrap the optimizer, and bring the server state to where the run stands."""
        torch.set_grad_enabled(True)
        trainer, settings = self.trainer, self.settings
        module = trainer.lightning_module
        assert self.population is not None
        base = check_optimizers(trainer.optimizers, module)
        check_schedulers(trainer)
        check_algorithm_fits(settings.algorithm, base, module)
        if trainer.checkpoint_callbacks:
            check_hyper_parameters(module, "model")
            check_hyper_parameters(trainer.datamodule, "data module")
        self._flat = FlatParameters(_trained_parameters(module, base))
        self._optimizer = FederatedOptimizer(base, self._flat)
        trainer.strategy.optimizers = [self._optimizer]
        if self.corrected_clip is not None:
            self._optimizer.clip = partial(
                trainer.precision_plugin.clip_gradients, self._optimizer, *self.corrected_clip
            )
        self._buffers = Buffers(buffer_owners(module), settings.buffers)
        if isinstance(trainer.strategy, WithinClientStrategy):
            trainer.strategy.share(self._flat.params)
            self._split = trainer.strategy.split
        else:
            self._ranks = Ranks.of(trainer)
        self._state = self._make_state(module, base)
        self._planner = Planner(trainer, settings, self.population, self._state.seed)
        self._engine = self._make_engine()
        self._plateau_round = self._state.round
        self._set_progress(self._state.round)
        self.restarting = False
        self.epoch_loop.val_loop._restarting = False
        self.show_server_model()

    def _make_engine(self) -> Engine:
        trainer, settings = self.trainer, self.settings
        assert self._flat is not None
        options: dict[str, Any] = {
            "trainer": trainer,
            "algorithm": settings.algorithm,
            "flat": self._flat,
            "optimizer": self._optimizer,
            "buffers": self._buffers,
            "seed": self.state.seed,
            "shuffle": trainer.datamodule.shuffle and not trainer.overfit_batches,
            "keeps_solver": settings.keeps_solver,
        }
        return make_engine(settings.engine, settings.chunk_size, self.epoch_loop, self._planner.first, options)

    def _make_state(self, module: pl.LightningModule, base: torch.optim.Optimizer) -> Server:
        assert self._flat is not None
        s, flat, kept = self.settings, self._flat, self._state
        state = Server(
            s.algorithm, flat.y, flat.layout, s.server_optimizer, s.server_lr_scheduler,
            self.trainer.datamodule.client_ids, s.seed,
        )  # fmt: skip
        state.buffers = self._buffers.read()
        restored, self._restored = self._restored, None
        if restored is not None:
            state.load_state_dict(restored, any_seed=not s.seed_is_given, is_mine=self._ranks.is_home_of)
            metrics = {name: torch.tensor(value) for name, value in restored["metrics"].items()}
            self.trainer._logger_connector._callback_metrics.update(metrics)
        elif kept is not None and kept.round > 0:
            if module is not self._module:
                raise FederatedError(
                    f"This trainer has already run {kept.round} rounds on another model. Make a new FederatedTrainer,"
                    " or resume with fit(..., ckpt_path=...)."
                )
            state.load_state_dict(kept.state_dict(), any_seed=True)
            self._load_carried(base)
        self._module = module
        return state

    def _load_carried(self, base: torch.optim.Optimizer) -> None:
        """Go on with the learning rates and schedules of the previous fit of this trainer."""
        if self._carried is not None:
            base.load_state_dict(self._carried["optimizer"])
            for config, saved in zip(self.trainer.lr_scheduler_configs, self._carried["schedulers"], strict=True):
                config.scheduler.load_state_dict(saved)

    def _set_progress(self, round: int) -> None:
        """Set every counter from the round: the one source of truth."""
        for counter in (self.epoch_progress.total, self.epoch_progress.current):
            counter.ready = counter.started = counter.processed = counter.completed = round

    def teardown(self) -> None:
        """Leave the module with the server model, and its parameters with storage of their own."""
        if self._flat is not None:
            if self._state is not None:
                self._state.clients.discard()
                self._carried = {
                    "optimizer": self._optimizer.state_dict(),
                    "schedulers": [config.scheduler.state_dict() for config in self.trainer.lr_scheduler_configs],
                }
            self._work = None
            self.show_server_model()
            self._flat.release()
            self._flat = None
        self.epoch_loop.teardown()

    # ------------------------------------------------------------------ one round

    def on_advance_start(self) -> None:
        """Draw the cohort and call the hooks that start a round."""
        trainer = self.trainer
        self._plans, self._dropped = self._planner.cohort(self.round)
        if not self._plans:
            rank_zero_info(f"Nobody takes part in round {self.round}: it changes nothing.")
        self.epoch_progress.increment_ready()
        call._call_callback_hooks(trainer, "on_train_epoch_start")
        call._call_lightning_module_hook(trainer, "on_train_epoch_start")
        self.epoch_progress.increment_started()
        call_round_hook(trainer, "on_round_start", self.round)

    def advance(self) -> None:
        """Run one round, and validate the server model when that is due."""
        trainer = self.trainer
        with trainer.profiler.profile("run_federated_round"):
            report = self._run_round()
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
        if self._received_sigterm:
            raise SIGTERMException

    def step_plateau_schedulers(self) -> None:
        """Step ``ReduceLROnPlateau`` once a round: after validation, before a checkpoint could be written."""
        if self._plateau_round < self.round:
            self._plateau_round = self.round
            self.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)

    def log_round(self, values: dict[str, float]) -> None:
        """Write a round's values to the loggers, and let callbacks monitor them."""
        connector = self.trainer._logger_connector
        connector._callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})
        connector.log_metrics({name: torch.tensor(value) for name, value in values.items()}, step=self.round)

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
        trainer, state, settings, ranks = self.trainer, self.state, self.settings, self._ranks
        assert self.population is not None
        gathers = bool(self._plans and settings.algorithm.full_grad_at)
        gradient_plans = self._planner.gradient_cohort(self.round, self._plans) if gathers else ()
        work = self._work = Round(
            self._engine, state, settings.weighting, self.population, self._plans, gradient_plans, self._dropped, ranks
        )
        if self._split.size > 1:
            check_batch_statistics(trainer.lightning_module)
        with self._split.in_step(), metrics_alone(trainer):
            if self._plans:
                if gathers:
                    work.take_gradients()
                work.begin(self._population_loss() if settings.algorithm.population_loss else None)
            outlines = ranks.exchange(lambda: self._train_clients(work))
            if self._split.size > 1:
                outlines = self._split.gather(outlines[0])
        work.merge(outlines)
        results = self.epoch_loop._results
        if len(outlines) > 1:
            results.merge([outline["logged"] for outline in outlines])
        self._received_sigterm = any(outline["sigterm"] for outline in outlines)
        trainer._logger_connector.epoch_end_reached()
        metrics = {name: float(value) for name, value in trainer._logger_connector.metrics["callback"].items()}
        round_report = work.close(metrics, time.perf_counter() - started)
        self._work = None
        self.show_server_model()
        return round_report

    def _train_clients(self, work: Round) -> dict[str, Any]:
        """Train this process's clients, and return what other processes need to know of it."""
        trainer, engine = self.trainer, self._engine
        for plans in engine.chunks(work.mine):
            for plan in plans:
                call_round_hook(trainer, "on_client_start", self.round, plan.participant.client_id)
            result = work.train(plans)
            for row, report in enumerate(result.reports):
                engine.point_to(result, row)
                call_round_hook(trainer, "on_client_end", report)
        engine.end_round()
        outline = work.outline() if self._ranks.size > 1 else {}
        logged = self.epoch_loop._results.outline() if trainer.world_size > 1 else {}
        return {**outline, "logged": logged, "sigterm": trainer.received_sigterm}

    def _population_loss(self) -> torch.Tensor:
        """Return the mean loss over all examples of all clients at x (0-dim)."""
        x, ranks = self.state.x, self._ranks
        parts = ranks.exchange(
            lambda: self._engine.population_loss(x, self._planner.everyone(ranks.is_home_of), self.round)
        )
        total, examples = (sum(column) for column in zip(*parts, strict=True))
        return torch.tensor(total / examples, device=x.device, dtype=x.dtype)


def _trained_parameters(module: pl.LightningModule, optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    """The trainable parameters that the optimizer holds, in the module's order, tied ones once."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad and id(p) in held]
    strangers = len([1 for g in optimizer.param_groups for p in g["params"] if p.requires_grad]) - len(named)
    if strangers > 0:
        raise FederatedError(
            f"{type(module).__name__}.configure_optimizers() returned an optimizer with {strangers} parameters that are"
            " not the module's own: server and clients could not exchange them. Assign them to the module."
        )
    return named
