"""The trainer that federates an ordinary LightningModule."""

import math
from collections.abc import Sequence
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from lightning_fed.algorithms import Algorithm
from lightning_fed.callbacks import RoundLines, RoundLogger, RoundProgressBar, RunSummary
from lightning_fed.callbacks.monitors import PlateauSchedulers
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import TrainerFn, rank_zero_info, rank_zero_warn
from lightning_fed.core.arguments import check_paths
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import LocalScheduleMode, Weighting
from lightning_fed.engines.gradients import buffer_owners
from lightning_fed.server.aggregation.compression import Compressor
from lightning_fed.server.aggregation.mean import Aggregator
from lightning_fed.server.asynchronous import Asynchronous
from lightning_fed.server.attacks import Attack
from lightning_fed.server.heterogeneity import SystemsHeterogeneity
from lightning_fed.server.privacy import ClientPrivacy
from lightning_fed.server.sampling import Sampler
from lightning_fed.server.server import ServerOptimizerFactory, ServerSchedulerFactory
from lightning_fed.settings.lightning_arguments import (
    as_callbacks,
    check_call,
    check_trainer_arguments,
    checked,
    defaults_of_environment,
    refusals_of_lightning,
)
from lightning_fed.settings.module_checks import no_federated_data
from lightning_fed.settings.settings import MAX_FAILED_SHARE, MAX_UPDATE_RATIO, Settings
from lightning_fed.settings.trainer_checks import check_local_options, check_strategy, check_trainer
from lightning_fed.strategies import ClientsStrategy
from lightning_fed.strategies.ddp import UnwrappedDDPStrategy, WithinClientStrategy, adopt
from lightning_fed.strategies.launcher import adopt_launcher
from lightning_fed.trainer.connectors import RoundCheckpointConnector, install
from lightning_fed.trainer.logger import name_default_runs, numbered
from lightning_fed.trainer.loop import FederatedLoop
from lightning_fed.trainer.one_thread import one_thread
from lightning_fed.trainer.threads import threads_for

__all__ = ["ClientsStrategy", "FederatedTrainer"]


class _NoLoaderError(FederatedError, AttributeError):
    """An error that ``getattr`` with a default value handles as a missing attribute."""


class FederatedTrainer(pl.Trainer):
    """A Lightning Trainer whose epochs are federated rounds.

    Every argument of :class:`pytorch_lightning.Trainer` keeps its meaning, counted in rounds:
    ``check_val_every_n_epoch`` validates the server model every n rounds. ``fast_dev_run`` is one round of n batches
    per client. ``limit_train_batches`` limits the batches of a client's epoch. ``max_time`` ends the run after the
    round that exceeds it. ``max_steps`` and ``min_steps`` count the local steps of all clients and are checked after
    each round. ``val_check_interval=n`` with ``check_val_every_n_epoch=None``, and ``every_n_train_steps=n`` of a
    ``ModelCheckpoint``, count rounds, as the global step does. A ``val_check_interval`` that is a time, such as
    "00:00:10:00", validates after the first round that ends when this time has passed since the last validation.
    Environment variables ``PL_TRAINER_...`` set the arguments that are not given, as for Lightning's Trainer:
    ``PL_TRAINER_MAX_ROUNDS=3``.

    Args:
        algorithm: The method, an instance; FedAvg by default.
        personal: Names of parameters and buffers that stay with each client, or patterns of them such as
            ``["head.*"]``. They are trained with the others, and neither sent nor averaged. Every client keeps its own
            from round to round, and starts with the module's.
        as_buffers: Names of parameters that the optimizer does not train but local work changes, or patterns of them
            such as ``["teacher.*"]``: moving averages of weights, as in BYOL, MoCo and DINO. Like buffers, they start
            from the server's for every client, and are averaged by examples, or treated as ``buffers`` sets.
        lora: The mean of LoRA adapters of peft. "separate" takes the means of A and B, as of any other parameters.
            "frozen_a" freezes A, so that the mean is that of the merged weights (FFA-LoRA). "exact" trains both, and
            adds the missing part to the base weights of the server and all clients (FedEx-LoRA).
        max_rounds: The number of rounds; -1 for no limit. Another name for Lightning's ``max_epochs``.
        clients_per_round: The clients drawn uniformly without replacement each round: an int is a count, a float in
            (0, 1] a share. By default all of them.
        local_epochs: Passes of a client over its data in a round. Set exactly one of this and ``local_steps``, or
            neither for methods without local work.
        local_steps: Optimizer steps of a client in a round.
        local_schedule: The steps that schedules with ``interval="step"`` count. "restart" counts a client's steps in
            the round, so the schedule begins again in every round. "continue" counts the client's own steps in all
            rounds in which it took part. "total" counts those of the run: a round begins ``local_steps`` after the last
            one, or with ``local_epochs`` as many steps later as its longest client took. None if schedules step once a
            round (``interval="epoch"``); other schedules then raise an error.
        server_optimizer: A function from parameters to the torch optimizer of the server's step. Its gradient is the
            negative direction. By default SGD with rate 1: the server takes the mean of the client models.
        server_lr_scheduler: A function from the server's optimizer to a torch scheduler, stepped once a round.
        heterogeneity: Clients that do less work than required, are too late, or drop out:
            :class:`lightning_fed.server.SystemsHeterogeneity`.
        sampler: ``sampler(seed, round, population)`` or ``sampler(seed, round)`` returns the round's client ids. A
            :class:`lightning_fed.server.LearningSampler` also reads the clients' reports.
        gradient_sampler: The same for methods that average gradients over a separate cohort (FedDANE).
        weighting: The weights of messages: "examples", "uniform", "steps", or a function of (client_id, size, steps).
            By default the method's own.
        aggregator: Replaces these averages: a robust rule such as :class:`lightning_fed.server.CoordinateMedian`,
            :class:`lightning_fed.server.DifferentialPrivacy`, or ``OptimalClientSampling``. None for the weighted
            means.
        attack: Simulated bad clients, to try a rule: :class:`lightning_fed.server.SignFlipAttack`, ``NoiseAttack`` or
            ``LabelFlipAttack``.
        client_privacy: Differential privacy of each client's examples:
            :class:`lightning_fed.server.ClientPrivacy`.
        asynchronous: The server steps whenever some answers have arrived, by a simulated clock, without waiting for a
            cohort: :class:`lightning_fed.server.FedBuff` or ``FedAsync``, in place of sampler and aggregator.
        compression: The compression of clients' messages: :class:`lightning_fed.server.TopK` or
            :class:`lightning_fed.server.QSGD`. None sends them uncompressed.
        engine: The way to train a cohort's clients. "sequential" trains one after another through Lightning's own loop:
            any module, any hook. "vectorized" trains several at once through ``torch.func``, and refuses modules and
            hooks that it cannot run. "auto" takes "vectorized" when supported, otherwise "sequential", and reports the
            reason.
        chunk_size: The number of clients that the vectorized engine trains at once. By default it depends on the
            model's size, and on an accelerator on the memory of a trial step: the clients take at most half of the
            memory. A resumed run keeps the number. Random layers draw other masks with another number. If memory runs
            out, the round starts again with half as many clients, with a warning, even if you set the number.
        seed: The seed of the cohorts, batch orders and random layers; by default that of ``seed_everything``, else 0.
        buffers: The combination of buffers such as BatchNorm's running statistics: "average" takes the mean over
            clients, "server" drops clients' changes, "local" lets each client keep its own.
        local_optimizer_state: Whether clients start with a new local optimizer every round ("reset"), or keep its
            state, such as momentum, from their last round ("keep").
        gradient_clip_on: The gradient that ``gradient_clip_val`` clips: the client's own one before the correction, or
            the corrected one.
        on_client_error: The reaction to a client that fails. A client fails if its loader or ``training_step`` raises,
            if its loss or update is not finite, or if its update exceeds ``max_update_ratio``. "raise" stops the run
            and names the client, the round, the local step and the cause. "drop" removes the client from the round, as
            if it had not been drawn. A warning, the log and the summary report it.
        max_failed_share: The largest share of a round's clients, in (0, 1], that "drop" may drop. The run stops if more
            fail, or all.
        max_update_ratio: The largest norm of a client's update, as a multiple of the cohort's median norm. If the
            median is below rounding error, that error is used instead. None for no limit, as with
            ``DifferentialPrivacy``, which clips.
        client_states: The storage of client states between rounds. "memory" keeps them all in host memory, also if
            clients are trained on an accelerator, and copies them into every checkpoint. "disk" appends them to files,
            and checkpoints refer to the files; memory then holds only the states of the clients in training. "auto"
            takes "disk" if the states may exceed 1 GiB, and reports it.
        client_states_dir: The folder for "disk"; by default ``client_states`` next to the checkpoints.
        callbacks: Callbacks; see :class:`lightning_fed.FederatedCallback` for hooks of rounds and clients.
        max_epochs: Lightning's name for ``max_rounds``.
        kwargs: Any other argument of :class:`pytorch_lightning.Trainer`.

    Raises:
        FederatedError: If an argument is not allowed. The message has its name, its value and the change to make.

    Example:
        >>> from lightning_fed import FederatedTrainer
        >>> from lightning_fed.algorithms import Scaffold
        >>> trainer = FederatedTrainer(
        ...     algorithm=Scaffold(),
        ...     max_rounds=100,
        ...     clients_per_round=20,
        ...     local_epochs=5,
        ...     logger=False,
        ...     enable_checkpointing=False,
        ...     accelerator="cpu",
        ... )
        >>> trainer.max_rounds
        100
    """

    _has_reported_threads = False
    _val_check_time_interval: float | None  # in seconds, parsed from val_check_interval by Lightning

    @defaults_of_environment
    def __init__(
        self,
        *,
        algorithm: Algorithm | None = None,
        personal: Sequence[str] = (),
        as_buffers: Sequence[str] = (),
        lora: Literal["separate", "frozen_a", "exact"] = "separate",
        max_rounds: int | None = None,
        clients_per_round: int | float | None = None,
        local_epochs: int | None = None,
        local_steps: int | None = None,
        local_schedule: LocalScheduleMode | None = None,
        server_optimizer: ServerOptimizerFactory | None = None,
        server_lr_scheduler: ServerSchedulerFactory | None = None,
        heterogeneity: SystemsHeterogeneity | None = None,
        sampler: Sampler | None = None,
        gradient_sampler: Sampler | None = None,
        weighting: Weighting | None = None,
        aggregator: Aggregator | None = None,
        attack: Attack | None = None,
        client_privacy: ClientPrivacy | None = None,
        asynchronous: Asynchronous | None = None,
        compression: Compressor | None = None,
        engine: Literal["sequential", "vectorized", "auto"] = "sequential",
        chunk_size: int | None = None,
        seed: int | None = None,
        buffers: Literal["average", "server", "local"] = "average",
        local_optimizer_state: Literal["reset", "keep"] = "reset",
        gradient_clip_on: Literal["gradient", "corrected"] = "gradient",
        client_states: Literal["memory", "disk", "auto"] = "auto",
        client_states_dir: str | Path | None = None,
        on_client_error: Literal["raise", "drop"] = "raise",
        max_failed_share: float = MAX_FAILED_SHARE,
        max_update_ratio: float | None = MAX_UPDATE_RATIO,
        callbacks: list[pl.Callback] | pl.Callback | None = None,
        max_epochs: int | None = None,
        **kwargs: Any,
    ) -> None:
        check_trainer_arguments(kwargs, own=signature(FederatedTrainer.__init__).parameters)
        settings = Settings.of(locals())
        if gradient_clip_on == "corrected" and kwargs.get("gradient_clip_val") is None:
            raise FederatedError(
                "gradient_clip_on='corrected' is of no use without gradient_clip_val, which says at what norm or value"
                " to clip. Pass gradient_clip_val too, or leave gradient_clip_on at 'gradient'."
            )
        check_strategy(kwargs.get("strategy", "auto"))
        callbacks, rounds = _with_defaults(callbacks, kwargs), _rounds(max_rounds, max_epochs)
        with refusals_of_lightning():
            super().__init__(callbacks=callbacks, max_epochs=rounds, **kwargs)
        if kwargs.get("logger") is None or kwargs["logger"] is True:
            name_default_runs(self, type(settings.algorithm).__name__)
        self.fit_loop: FederatedLoop = FederatedLoop(self, settings, self.fit_loop.min_epochs, self.fit_loop.max_epochs)
        if not kwargs.get("fast_dev_run"):  # Lightning counts it in steps; here it is n batches per client in one round
            steps, given = self.fit_loop.epoch_loop, dict(kwargs)  # kwargs.get would set what --help shows
            steps.max_steps, steps.min_steps = given.get("max_steps", -1), given.get("min_steps")
        if (seconds := self._val_check_time_interval) is not None:
            if seconds < 0:
                raise FederatedError(
                    f"val_check_interval must be a time that is not negative, found {seconds:g} seconds."
                )
            # Lightning leaves it unset; EarlyStopping needs it, to check only after rounds that validate
            self.val_check_interval = timedelta(seconds=seconds)  # type: ignore[assignment]
        elif self.check_val_every_n_epoch is None and type(every := self.val_check_interval) is int and every > 0:
            self.check_val_every_n_epoch, self.val_check_interval = every, 1.0  # a step over all epochs is a round
        if gradient_clip_on == "corrected" and self.gradient_clip_val:
            self.fit_loop.corrected_clip = (self.gradient_clip_val, self.gradient_clip_algorithm or "norm")
            self.gradient_clip_val = None  # else Lightning would also clip before the correction
        check_strategy(self.strategy)
        check_local_options(self)
        adopt(self)
        adopt_launcher(self)
        if settings.drops_failed and isinstance(self.strategy, WithinClientStrategy):
            raise FederatedError(
                "on_client_error='drop' cannot be combined with strategy='ddp', whose processes work on one client"
                " together and stop together. Use strategy='clients', or leave on_client_error at 'raise'."
            )
        if isinstance(self.strategy, UnwrappedDDPStrategy):  # Lightning's sampler would repeat some examples
            self._accelerator_connector.use_distributed_sampler = False
        install(self)

    @property
    def max_rounds(self) -> int | None:
        """The number of rounds, -1 for no limit. Raise it to continue with a finished trainer."""
        return self.fit_loop.max_epochs

    @max_rounds.setter
    def max_rounds(self, value: int) -> None:
        self.fit_loop.max_epochs = _rounds(value, None)

    @property
    def current_epoch(self) -> int:
        """The number of completed rounds.

        Raises:
            FederatedError: In ``lr_scheduler_step`` of a schedule by local step, which may be computed in any round.
        """
        if self.fit_loop.epoch_loop.schedule_step is not None:
            raise FederatedError(
                "lr_scheduler_step reads current_epoch, the number of rounds, for a schedule with interval='step': its"
                " rates must depend on its own steps alone. Read global_step, which is their number there, or set"
                " interval='epoch'."
            )
        return super().current_epoch

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The number of schedule steps in the run; infinite without a limit.

        This is the number of rounds. With ``local_schedule`` it is the maximum number of steps that the schedule
        counts: ``local_steps`` for "restart", and that times the rounds for "continue" and "total".

        Raises:
            FederatedError: If ``max_steps`` alone limits the run: the number of rounds depends on the clients drawn. If
                schedules count local steps, and ``local_epochs`` lets clients take different numbers of them.
        """
        steps = self._steps_of_round("estimated_stepping_batches")
        if self.fit_loop.settings.local_schedule == "restart":
            return steps
        if self.max_epochs is not None and self.max_epochs != -1:
            return max(self.max_epochs, 1) * steps
        if self.max_steps != -1:
            raise FederatedError(
                f"trainer.estimated_stepping_batches is the number of rounds. With max_steps={self.max_steps} it is"
                " unknown before the run: it depends on the clients drawn. Pass max_rounds too."
            )
        return float("inf")

    def _steps_of_round(self, name: str) -> int:
        """Return the maximum number of schedule steps in a round; ``name`` is the attribute that needs it."""
        settings = self.fit_loop.settings
        steps = 1 if settings.local_schedule is None else settings.local_steps
        if steps is None:
            raise FederatedError(
                f"trainer.{name} depends on the number of local steps that local_schedule={settings.local_schedule!r}"
                f" counts, which local_epochs={settings.local_epochs} does not tell: it depends on the clients' data."
                " Set local_steps instead, or give the module the length of its schedule."
            )
        return steps

    @property
    def train_dataloader(self) -> None:
        """``None`` in the module's ``setup`` and ``configure_*`` hooks, as in any fit before its loaders are set up.

        After ``trainer.fit_loop.setup_data()`` there it raises an error: Lightning's Trainer would have a loader.

        Raises:
            FederatedError: Elsewhere, since each client has its own loader. It is an ``AttributeError`` as well, so
                ``getattr`` with a default value returns that.
        """
        module, early = self.lightning_module, ("setup", "configure_model", "configure_optimizers")
        if self.fit_loop.max_batches != math.inf or module is None or module._current_fx_name not in early:
            raise _NoLoaderError(
                "trainer.train_dataloader does not exist, since each client has its own loader. While a client trains,"
                " trainer.num_training_batches is its number of batches. For the length of a schedule, use"
                " trainer.estimated_stepping_batches."
            )

    @property
    def num_training_batches(self) -> int | float:
        """The batches in the local epoch of the client at work; 1 between the work of clients.

        In ``configure_optimizers``, modules multiply it by ``max_epochs``. There it is the number of schedule steps in
        a round (one, or ``local_steps`` with ``local_schedule``) times ``accumulate_grad_batches``.

        Raises:
            FederatedError: In ``configure_optimizers``, if schedules count local steps, and ``local_epochs`` lets
                clients take different numbers of them.
        """
        module = self.lightning_module
        if module is not None and module._current_fx_name == "configure_optimizers":
            return self._steps_of_round("num_training_batches") * self.accumulate_grad_batches
        self._check_is_one("num_training_batches")
        return super().num_training_batches

    @property
    def is_last_batch(self) -> bool:
        """Whether the current client is at the last batch of its local epoch."""
        self._check_is_one("is_last_batch")
        return super().is_last_batch

    def _check_is_one(self, name: str) -> None:
        if self.fit_loop.runs_several:
            raise FederatedError(
                f"engine='vectorized' has no value for trainer.{name} in training_step: clients are run at once, and it"
                " differs from one to another. Do not use it, or use engine='sequential'."
            )

    @one_thread()
    def fit(
        self,
        model: pl.LightningModule,
        train_dataloaders: pl.LightningDataModule | None = None,
        val_dataloaders: Any = None,
        datamodule: pl.LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Run the rounds; see :meth:`pytorch_lightning.Trainer.fit`.

        Afterwards the module holds the server model. A second call continues the run, up to a higher
        :attr:`max_rounds`, and refuses another model or other clients. With ``ckpt_path`` the run continues after the
        checkpoint's round; a checkpoint of an ordinary Lightning run gives the initial weights.

        Args:
            model: Any LightningModule: with automatic optimization and one optimizer, or with manual optimization.
            train_dataloaders: The data module, if it is given by position.
            val_dataloaders: Refused, since the data module has the validation set.
            datamodule: The data module: a :class:`lightning_fed.FederatedDataModule`.
            ckpt_path: A checkpoint to resume from; "last" is the newest of the run, "best" and "hpc" as for Lightning.
            weights_only: Whether loading may only make tensors and plain containers; PyTorch's default, True, if None.

        Raises:
            FederatedError: If settings, model, data or checkpoint cannot be federated; before the first round.
        """
        check_call(
            "fit", self, model, train_dataloaders, datamodule=datamodule, ckpt_path=ckpt_path, weights_only=weights_only
        )
        if train_dataloaders is not None and not isinstance(train_dataloaders, pl.LightningDataModule):
            raise no_federated_data(train_dataloaders)
        if val_dataloaders is not None:
            raise FederatedError(
                "fit(val_dataloaders=...) cannot be combined with a data module, which has the validation set:"
                " FederatedDataModule(val=...), a data set or a loader."
            )
        check_trainer(self)
        self.fit_loop.max_batches = math.inf  # until the data are set up, as in Lightning's first fit
        with numbered(self):
            try:
                super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only)
            except RuntimeError as error:
                if isinstance(error, NotImplementedError) and (missing := _on_meta(model)) is not None:
                    raise FederatedError(
                        f"{type(model).__name__}.{missing} is on the device 'meta' and has no numbers. Make it on a"
                        " real device in configure_model, or call to_empty(device='cpu') there and set its numbers."
                    ) from error
                if "multiple optimizers" not in str(error):
                    raise
                raise FederatedError(
                    f"{type(model).__name__}.configure_optimizers() returned several optimizers, which only a module"
                    " with manual optimization can step (self.automatic_optimization = False). Use parameter groups of"
                    " one optimizer for different settings."
                ) from error

    def _run_stage(self) -> Any:
        """Run a stage with a thread count that suits the model: it is complete here, and processes have started."""
        with threads_for(self.lightning_module, self.strategy.root_device) as before:
            if before is not None and not self._has_reported_threads:
                self._has_reported_threads = True
                rank_zero_info(
                    f"The model is small: this run takes 1 thread instead of PyTorch's {before}. To choose yourself,"
                    " set OMP_NUM_THREADS or call torch.set_num_threads."
                )
            if self.training:
                self.fit_loop.run_state.first_buffers = tuple(buffer_owners(self.lightning_module))
            return super()._run_stage()

    def _teardown(self) -> None:
        """End the run before the strategy moves the module, so that parameters are not views of the run's memory."""
        try:
            if self.state.fn == TrainerFn.FITTING:  # also after an error in validation
                self.fit_loop.run_state.end()
        finally:
            super()._teardown()

    validate = checked(pl.Trainer.validate)
    test = checked(pl.Trainer.test)
    predict = checked(pl.Trainer.predict)

    def save_checkpoint(
        self, filepath: str | Path, weights_only: bool | None = None, storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint of the last completed round; all processes must call it.

        Nothing is saved after an exception between a round's server step and its end. Schedules and callbacks have then
        seen only a part of the round, and a resumed run would differ.

        Args:
            filepath: The path or URL to write to.
            weights_only: Whether to save the model's weights alone.
            storage_options: Options for the CheckpointIO plugin.

        Raises:
            FederatedError: If the path is not one, or there is nothing to save; or, unless ``weights_only``, if a
                ``ReduceLROnPlateau`` has not yet stepped for the ending round, as in ``on_round_end``.
        """
        if self.interrupted and self.fit_loop.is_closing:
            rank_zero_warn(f"{filepath} is not saved: the run was interrupted while round {self.fit_loop.round} ended.")
            return
        check_paths(type(self).__name__ + ".save_checkpoint", filepath=filepath)
        if self.model is None:
            raise FederatedError("save_checkpoint: there is nothing to save before the trainer has seen a model.")
        with self.fit_loop.run_state.client_states.writing(filepath):
            super().save_checkpoint(filepath, weights_only, storage_options)
        if not weights_only and isinstance(self._checkpoint_connector, RoundCheckpointConnector):
            self._checkpoint_connector.last_saved = (self.fit_loop.round, filepath)


def _rounds(max_rounds: int | None, max_epochs: int | None) -> int | None:
    if max_rounds is not None and max_epochs is not None and max_rounds != max_epochs:
        raise FederatedError(
            f"max_rounds={max_rounds} and max_epochs={max_epochs} differ: they are two names for one number. Pass one."
        )
    value, name = (max_rounds, "max_rounds") if max_rounds is not None else (max_epochs, "max_epochs")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not -1 <= value < 2**63):
        raise FederatedError(f"{name} must be an int >= 0, or -1 for no limit, found {value!r}.")
    return value


def _on_meta(module: pl.LightningModule) -> str | None:
    """Return the name of a parameter or buffer on the device "meta", or None."""
    named = (*module.named_parameters(), *module.named_buffers())
    return next((name for name, value in named if value.is_meta), None)


def _with_defaults(callbacks: Sequence[pl.Callback] | pl.Callback | None, kwargs: dict[str, Any]) -> list[pl.Callback]:
    """Add the default callbacks of a federated run."""
    given = as_callbacks(callbacks)
    kinds = (RoundLogger,) if kwargs.get("barebones") else (RoundLogger, RoundLines, RunSummary)
    missing = [kind() for kind in kinds if not any(isinstance(c, kind) for c in given)]
    defaults: list[pl.Callback] = [PlateauSchedulers(), *missing]
    shows_bar = kwargs.get("enable_progress_bar") is not False and not kwargs.get("barebones")
    if shows_bar and not any(isinstance(c, pl.callbacks.ProgressBar) for c in given):
        defaults.append(RoundProgressBar())
    return [*given, *defaults]
