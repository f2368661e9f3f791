"""Checks before the first round for settings, strategies and callbacks that rounds do not support."""

from typing import Any

from lightning_fed.callbacks import (
    ClientModels,
    Inexactness,
    Measure,
    PersonalizedAccuracy,
    SimulatedTime,
    SplitPicture,
    TargetMetric,
)
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import PassThroughProfiler, rank_zero_warn
from lightning_fed.core.errors import FederatedError
from lightning_fed.server.privacy import ClientPrivacy
from lightning_fed.settings.settings import MAX_UPDATE_RATIO
from lightning_fed.strategies import WithinClientStrategy
from lightning_fed.strategies.ddp import UnwrappedDDPStrategy

_CALLBACKS = {
    "StochasticWeightAveraging": "it averages weights along one optimizer path, while every client starts a new path",
    "WeightAveraging": "it averages weights after every batch, while batches belong to different clients",
    "EMAWeightAveraging": "it averages weights after every batch, while batches belong to different clients",
    "BaseFinetuning": "it changes which parameters are trained, and with them what clients and server exchange",
    "ModelPruning": "it replaces parameters during training, and with them what clients and server exchange",
    "SpikeDetection": "it compares a batch's loss with those of the batches before, which here belong to other clients",
    "BatchSizeFinder": "it restarts the inner training loop, which here belongs to a client",
    "LearningRateFinder": "it steps through batches of a single training run, which here belong to different clients",
}
_AVERAGE = "average the server's models, in on_train_epoch_end of a callback of your own"
_REMEDIES = {
    "StochasticWeightAveraging": _AVERAGE,
    "WeightAveraging": _AVERAGE,
    "EMAWeightAveraging": _AVERAGE,
    "ModelPruning": "prune parameters in the module's __init__; hooks between rounds may change their masks",
    "SpikeDetection": "set on_client_error='drop', which leaves out clients whose loss is not finite",
    "BaseFinetuning": "freeze parameters in the module's __init__, or give them a group of the optimizer with rate 0,"
    " which a hook raises in a later round",
    "BatchSizeFinder": "set batch_size on the data module, with a new trainer if Tuner.scale_batch_size has added it",
    "LearningRateFinder": "sweep the learning rate over short runs, with a new trainer if Tuner.lr_find has added it",
}
_STRATEGIES = {
    "fsdp": "it shards the parameters, while server and clients exchange them as one vector",
    "modelparallel": "it spreads the parameters over devices, while server and clients exchange them as one vector",
    "deepspeed": "it keeps parameters, gradients and optimizer to itself, where no correction can be injected",
    "xla": "it records steps to run them later as one graph, while clients take their own steps",
    "ddp": "it changes how gradients are reduced, which the corrections of clients rely on",
}


def check_strategy(strategy: Any) -> None:
    """Raise for strategies, or their names, that cannot run clients."""
    if isinstance(strategy, str):
        name, kinds = strategy.lower(), [strategy.lower()]
        known = name.startswith(("auto", "clients", "ddp", "single_device")) or not any(k in name for k in _STRATEGIES)
    else:
        name, kinds = type(strategy).__name__, [cls.__name__.lower() for cls in type(strategy).__mro__]
        allowed = (pl.strategies.SingleDeviceStrategy, UnwrappedDDPStrategy)
        known = type(strategy) is pl.strategies.DDPStrategy or (
            isinstance(strategy, allowed) and "xla" not in name.lower()
        )
    if known:
        return
    reason = next(
        (reason for part, reason in _STRATEGIES.items() if any(part in kind for kind in kinds)),
        "how it trains is not known here",
    )
    raise FederatedError(
        f"The strategy {name} is not supported: {reason}. Set strategy='clients', which shares the clients of a round"
        " among the devices, or strategy='ddp', which splits every batch among them."
    )


def check_local_options(trainer: pl.Trainer) -> None:
    """Raise for options of local work if the method has none."""
    loop = trainer.fit_loop
    algorithm = loop.settings.algorithm
    if algorithm.local_work:
        return
    clip, limit = trainer.gradient_clip_val, trainer.limit_train_batches
    if loop.corrected_clip is not None:
        clip, _ = loop.corrected_clip
    fine_tunes = any(isinstance(callback, PersonalizedAccuracy) for callback in trainer.callbacks)
    is_whole = trainer.fast_dev_run or limit == 0 or (isinstance(limit, float) and limit == 1.0)
    options = {
        "gradient_clip_val": clip if clip and not fine_tunes else None,  # measures that fine-tune also clip
        "accumulate_grad_batches": trainer.accumulate_grad_batches if trainer.accumulate_grad_batches != 1 else None,
        "max_steps": loop.max_steps if loop.max_steps != -1 else None,
        "min_steps": loop.min_steps or None,
        "overfit_batches" if trainer.overfit_batches else "limit_train_batches": None if is_whole else limit,
    }
    for name, value in options.items():
        if value is not None:
            raise FederatedError(
                f"{name}={value!r} does not apply to {type(algorithm).__name__}, whose clients take no local steps."
                " Leave it unset."
            )
    if (accumulating := _accumulating(trainer)) is not None:
        raise FederatedError(
            f"The callback {accumulating} does not apply to {type(algorithm).__name__}, whose clients take no local"
            " steps. Remove it."
        )


def _accumulating(trainer: pl.Trainer) -> str | None:
    """Return the name of a callback that accumulates gradients over batches, or None."""
    kind = pl.callbacks.GradientAccumulationScheduler
    schedulers = (callback for callback in trainer.callbacks if isinstance(callback, kind))
    return next((type(one).__name__ for one in schedulers if one.going_to_accumulate_grad_batches()), None)


def check_trainer(trainer: pl.Trainer) -> None:
    """Raise for Trainer settings and callbacks that have no meaning in rounds."""
    settings, splits = trainer.fit_loop.settings, isinstance(trainer.strategy, WithinClientStrategy)
    if settings.engine == "vectorized" and trainer.world_size > 1 and splits:
        raise FederatedError(
            f"engine='vectorized' cannot be combined with strategy='ddp' on {trainer.world_size} devices: one runs"
            " several clients on one device, the other one client on several. Set strategy='clients', or"
            " engine='sequential'."
        )
    is_timed = trainer._val_check_time_interval is not None
    if not is_timed and (trainer.check_val_every_n_epoch is None or trainer.val_check_interval != 1.0):
        raise FederatedError(
            f"val_check_interval={trainer.val_check_interval!r} with"
            f" check_val_every_n_epoch={trainer.check_val_every_n_epoch!r} asks for validation inside a round, when"
            " there is no server model to validate. Leave val_check_interval at 1.0 and set check_val_every_n_epoch,"
            " counted in rounds. Or pass check_val_every_n_epoch=None with a whole number of rounds as"
            " val_check_interval, or with a time, such as val_check_interval='00:00:10:00'."
        )
    if settings.algorithm.steps_per_batch > 1 or settings.algorithm.looks_ahead:
        _check_second_gradients(trainer)
    if settings.is_private:
        _check_private(trainer)
    if settings.client_privacy is not None:
        _check_private_clients(trainer, settings.client_privacy)
    written: dict[str, tuple[Measure, Any]] = {}
    for callback in trainer.callbacks:
        for name, what in callback.written.items() if isinstance(callback, Measure) else ():
            other, theirs = written.setdefault(name, (callback, what))
            if theirs != what:  # the second would hide the first
                raise FederatedError(
                    f"Two callbacks write {name!r}, {type(other).__name__} and {type(callback).__name__}, and the"
                    " values could not be told apart. Remove one, or let a subclass write under its own name, such as"
                    " tag = 'after_10_steps'."
                )
        interval = callback._train_time_interval if isinstance(callback, pl.callbacks.ModelCheckpoint) else None
        if interval is not None and trainer.world_size > 1:
            raise FederatedError(
                f"{type(callback).__name__}(train_time_interval={interval!r}) saves in the middle of a round, where"
                f" {trainer.world_size} processes see different clients or batches. Save at the end of a round with"
                " every_n_epochs, or train in one process."
            )
        for cls in type(callback).__mro__:
            if cls.__name__ in _CALLBACKS and "lightning" in cls.__module__:
                remedy = _REMEDIES.get(cls.__name__, "remove the callback")
                raise FederatedError(
                    f"The callback {type(callback).__name__} is not supported: {_CALLBACKS[cls.__name__]}."
                    f" Instead, {remedy}."
                )


def warn_of_rare_logs(trainer: pl.Trainer) -> None:
    """Warn if callbacks that log in every n-th round would log nothing, since the run has fewer rounds."""
    interval, rounds = trainer.log_every_n_steps, trainer.fit_loop.max_epochs
    if not trainer.loggers or rounds is None or not -1 < rounds < interval:
        return
    kinds = (pl.callbacks.DeviceStatsMonitor, pl.callbacks.ThroughputMonitor)
    names = [
        type(callback).__name__
        for callback in trainer.callbacks
        if isinstance(callback, kinds) or getattr(callback, "logging_interval", None) == "step"
    ]
    if names:
        rank_zero_warn(
            f"{' and '.join(names)} logs what happens in a local step every {interval} rounds (log_every_n_steps), and"
            f" this run has {rounds}. Set log_every_n_steps=1 to log in every round."
        )


def _check_second_gradients(trainer: pl.Trainer) -> None:
    """Raise if a method's second gradients or repeated steps would refer to an ambiguous gradient or batch."""
    algorithm = trainer.fit_loop.settings.algorithm
    if algorithm.steps_per_batch > 1 and trainer.accumulate_grad_batches != 1:
        raise FederatedError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} cannot be combined with {algorithm!r}, which"
            f" takes {algorithm.steps_per_batch} steps on every batch. Raise batch_size instead."
        )
    if not algorithm.looks_ahead:
        return
    accumulating = _accumulating(trainer)
    if accumulating is not None or trainer.accumulate_grad_batches != 1:
        found = (
            f"the callback {accumulating}"
            if accumulating
            else f"accumulate_grad_batches={trainer.accumulate_grad_batches}"
        )
        raise FederatedError(
            f"{found} cannot be combined with {type(algorithm).__name__}, which takes a second gradient on the batch of"
            " every step, at a point made of the first one: there must be one batch a step. Raise batch_size instead."
        )
    if trainer.gradient_clip_val:
        raise FederatedError(
            f"gradient_clip_val={trainer.gradient_clip_val!r} would clip the first gradient of"
            f" {type(algorithm).__name__}, which determines the point of the second one, and not the step. Set"
            " gradient_clip_on='corrected', which clips the step."
        )


def _check_private(trainer: pl.Trainer) -> None:
    """Raise for settings that reveal clients' data without noise, or add different noise in every process."""
    aggregator, loop = trainer.fit_loop.settings.aggregator, trainer.fit_loop
    if loop.max_steps != -1 or loop.min_steps:
        name = "max_steps" if loop.max_steps != -1 else "min_steps"
        raise FederatedError(
            f"{name}={getattr(loop, name)} cannot be combined with aggregator={aggregator!r}: a run that ends by the"
            " local steps of those who took part shows how many they were. Set max_rounds or min_epochs."
        )
    if (ratio := loop.settings.max_update_ratio) not in (None, MAX_UPDATE_RATIO):
        raise FederatedError(
            f"max_update_ratio={ratio} cannot be combined with aggregator={aggregator!r}: a stop would show the client,"
            " whose update is clipped. Leave max_update_ratio unset."
        )
    for callback in trainer.callbacks:
        if isinstance(callback, (Measure, Inexactness, SimulatedTime, SplitPicture, TargetMetric)):
            raise FederatedError(
                f"The callback {type(callback).__name__} cannot be combined with aggregator={aggregator!r}: it measures"
                " or shows clients' data, or who took part, without noise. Remove it."
            )
    if trainer.world_size > 1 and isinstance(trainer.strategy, WithinClientStrategy):
        raise FederatedError(
            f"aggregator={aggregator!r} cannot be combined with strategy='ddp' on {trainer.world_size} devices: every"
            " process would add its own noise. Set strategy='clients'."
        )


def _check_private_clients(trainer: pl.Trainer, privacy: ClientPrivacy) -> None:
    """Raise for trainer settings with which noise would not cover everything that clients release."""
    loop = trainer.fit_loop
    what = f"client_privacy={privacy!r} cannot be combined with"
    if trainer.accumulate_grad_batches != 1:
        raise FederatedError(
            f"{what} accumulate_grad_batches={trainer.accumulate_grad_batches}: each batch gets its own noise. Raise"
            " batch_size instead, and set examples_at_once to save memory."
        )
    if trainer.gradient_clip_val or loop.corrected_clip is not None:
        raise FederatedError(
            f"{what} gradient_clip_val: max_grad_norm={privacy.max_grad_norm} already clips the gradient of every"
            " example. Leave it unset."
        )
    plugins = pl.plugins.precision
    if type(trainer.precision_plugin) not in (plugins.Precision, plugins.DoublePrecision):
        raise FederatedError(
            f"{what} precision={trainer.precision!r}: loss scaling and half precision do not keep the bound of clipped"
            " gradients. Set precision='32-true' or '64-true'."
        )
    if isinstance(trainer.strategy, WithinClientStrategy) and trainer.world_size > 1:
        raise FederatedError(
            f"{what} strategy='ddp' on {trainer.world_size} devices, which see parts of a batch. Set"
            " strategy='clients'."
        )
    if not isinstance(trainer.profiler, PassThroughProfiler):
        raise FederatedError(
            f"{what} profiler={type(trainer.profiler).__name__}: local steps do not go through the actions that it"
            " times. Leave it unset."
        )
    if trainer._detect_anomaly:
        raise FederatedError(
            f"{what} detect_anomaly=True: an error where the gradient of one example is NaN shows that it is there."
            " Leave it unset."
        )
    for callback in trainer.callbacks:
        # ClientModels may stay, because clients' own models have noise
        if isinstance(callback, (Measure, Inexactness, SplitPicture)) and not isinstance(callback, ClientModels):
            raise FederatedError(
                f"{what} the callback {type(callback).__name__}: it measures or shows clients' data without noise."
                " Remove it."
            )
