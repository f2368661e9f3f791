"""What federated rounds cannot take, refused before the first round with the reason and the remedy."""

import inspect
import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_fed._lightning import pl
from lightning_fed.algorithms.base import Algorithm
from lightning_fed.callbacks import Inexactness, Measure, PersonalizedAccuracy, SplitPicture
from lightning_fed.core.arguments import kind_of
from lightning_fed.core.buffers import Buffers
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.torch_optimizers import is_plain_sgd, refuse_unsupported
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.one_package import refuse_foreign
from lightning_fed.optim import looks_ahead
from lightning_fed.server.privacy import DifferentialPrivacy
from lightning_fed.settings import Settings
from lightning_fed.strategies import WithinClientStrategy
from lightning_fed.strategies.unwrapped import UnwrappedDDPStrategy

__all__ = [
    "check_algorithm_fits",
    "check_batch_statistics",
    "check_buffers",
    "check_hyper_parameters",
    "check_local_options",
    "check_module",
    "check_schedulers",
    "check_strategy",
    "check_trainer",
]

_CALLBACKS = {
    "StochasticWeightAveraging": "it averages weights along one optimizer path, while every client starts a path anew",
    "WeightAveraging": "it averages weights after every batch, while batches belong to different clients",
    "EMAWeightAveraging": "it averages weights after every batch, while batches belong to different clients",
    "BaseFinetuning": "it changes which parameters are trained, and with them what clients and server exchange",
    "ModelPruning": "it replaces parameters during training, and with them what clients and server exchange",
    "BatchSizeFinder": "it restarts the inner training loop, which here belongs to a client",
    "LearningRateFinder": "it steps through batches of a single training run, which here belong to different clients",
}
_REMEDIES = {
    "BaseFinetuning": "freeze parameters in the module's __init__",
    "BatchSizeFinder": "set batch_size on the data module",
    "LearningRateFinder": "sweep the learning rate over short runs",
}
_STRATEGIES = {
    "fsdp": "it shards the parameters, while server and clients exchange them as one vector",
    "modelparallel": "it spreads the parameters over devices, while server and clients exchange them as one vector",
    "deepspeed": "it keeps parameters, gradients and optimizer to itself, where no correction can be injected",
    "xla": "it records steps to run them later as one graph, while clients take steps of their own",
    "ddp": "it changes how gradients are reduced, which the corrections of clients rely on",
}


def check_strategy(strategy: Any) -> None:
    """Refuse strategies that cannot run clients.

    Args:
        strategy: A strategy or its name.

    Raises:
        FederatedError: Naming the strategy, the reason and what to use instead.
    """
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


def check_batch_statistics(module: pl.LightningModule) -> None:
    """Refuse layers that compute statistics of a batch, of which every process would see a part.

    Raises:
        FederatedError: Naming the layer.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and (layer.training or not layer.track_running_stats):
            raise FederatedError(
                f"{name} ({type(layer).__name__}) normalises by the statistics of a batch, of which processes see"
                " parts with strategy='ddp': results would depend on their number. Use GroupNorm, or"
                " strategy='clients', which leaves batches whole."
            )


def check_buffers(settings: Settings, buffers: Buffers) -> None:
    """Refuse buffers that clients send past an aggregator.

    Raises:
        FederatedError: Naming the aggregator and a buffer.
    """
    sent = [name for name in buffers.server if name not in buffers.personal]
    if settings.aggregator is not None and buffers.mode != "server" and sent:
        raise FederatedError(
            f"aggregator={settings.aggregator!r} does not go with buffers={buffers.mode!r}: it does not stand in for"
            f" the mean of buffers such as {sent[0]!r}. Set buffers='server', or use layers without"
            " running statistics, such as GroupNorm."
        )


def check_local_options(trainer: pl.Trainer) -> None:
    """Refuse options of the local work with a method that has none.

    Raises:
        FederatedError: Naming the option, its value and the method.
    """
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
        "gradient_clip_val": clip if clip and not fine_tunes else None,  # measures that fine-tune clip too
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
    for callback in trainer.callbacks:
        if (
            isinstance(callback, pl.callbacks.GradientAccumulationScheduler)
            and callback.going_to_accumulate_grad_batches()
        ):
            raise FederatedError(
                f"The callback {type(callback).__name__} does not apply to {type(algorithm).__name__}, whose clients"
                " take no local steps. Remove it."
            )


def check_trainer(trainer: pl.Trainer) -> None:
    """Refuse Trainer settings and callbacks that have no meaning in rounds.

    Raises:
        FederatedError: Naming the setting, the value and what to use instead.
    """
    check_strategy(trainer.strategy)
    engine = trainer.fit_loop.settings.engine
    if engine == "vectorized" and trainer.world_size > 1 and isinstance(trainer.strategy, WithinClientStrategy):
        raise FederatedError(
            f"engine='vectorized' does not go with strategy='ddp' on {trainer.world_size} devices: one runs several"
            " clients on one device, the other one client on several. Set strategy='clients', or engine='sequential'."
        )
    if trainer.check_val_every_n_epoch is None or trainer.val_check_interval != 1.0:
        raise FederatedError(
            f"val_check_interval={trainer.val_check_interval!r} with check_val_every_n_epoch="
            f"{trainer.check_val_every_n_epoch!r} asks for validation inside a round, where there is no server model to"
            " validate. Leave val_check_interval at 1.0 and set check_val_every_n_epoch, counted in rounds; or pass"
            " check_val_every_n_epoch=None and a whole number of rounds as val_check_interval."
        )
    _check_checkpoints(trainer)
    _check_second_gradients(trainer)
    if isinstance(trainer.fit_loop.settings.aggregator, DifferentialPrivacy):
        _check_private(trainer)
    for callback in trainer.callbacks:
        for cls in type(callback).__mro__:
            if cls.__name__ in _CALLBACKS and "lightning" in cls.__module__:
                remedy = _REMEDIES.get(cls.__name__, "remove the callback")
                raise FederatedError(
                    f"The callback {type(callback).__name__} is not supported: {_CALLBACKS[cls.__name__]}."
                    f" Instead, {remedy}."
                )


def _check_second_gradients(trainer: pl.Trainer) -> None:
    """Refuse what leaves open which gradient is meant, or on which batch, where a method makes one out of another."""
    algorithm = trainer.fit_loop.settings.algorithm
    if algorithm.steps_per_batch > 1 and trainer.accumulate_grad_batches != 1:
        raise FederatedError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} does not go with {algorithm!r}, which takes"
            f" {algorithm.steps_per_batch} steps on every batch. Raise batch_size instead."
        )
    if not looks_ahead(algorithm):
        return
    found = None
    if trainer.accumulate_grad_batches != 1:
        found = f"accumulate_grad_batches={trainer.accumulate_grad_batches}"
    for callback in trainer.callbacks:
        is_scheduler = isinstance(callback, pl.callbacks.GradientAccumulationScheduler)
        if is_scheduler and callback.going_to_accumulate_grad_batches():
            found = f"the callback {type(callback).__name__}"
    if found is not None:
        raise FederatedError(
            f"{found} does not go with {type(algorithm).__name__}, which takes a second gradient on the batch of every"
            " step, at a point made of the first one: there must be one batch a step. Raise batch_size instead."
        )
    if trainer.gradient_clip_val:
        raise FederatedError(
            f"gradient_clip_val={trainer.gradient_clip_val!r} would clip the first gradient of"
            f" {type(algorithm).__name__}, of which the point of the second one is made, and not the step. Set"
            " gradient_clip_on='corrected', which clips the step."
        )


def _check_private(trainer: pl.Trainer) -> None:
    """Refuse what would tell of clients' data past the noise, or add other noise in every process."""
    aggregator = trainer.fit_loop.settings.aggregator
    for callback in trainer.callbacks:
        if isinstance(callback, (Measure, Inexactness, SplitPicture)):
            raise FederatedError(
                f"The callback {type(callback).__name__} does not go with aggregator={aggregator!r}: it measures or"
                " shows clients' data without noise. Remove it."
            )
    if trainer.world_size > 1 and isinstance(trainer.strategy, WithinClientStrategy):
        raise FederatedError(
            f"aggregator={aggregator!r} does not go with strategy='ddp' on {trainer.world_size} devices, where every"
            " process would add noise of its own. Set strategy='clients'."
        )


def _check_checkpoints(trainer: pl.Trainer) -> None:
    """Refuse checkpoints that are due in the middle of a round of several processes."""
    for callback in trainer.callbacks:
        if not isinstance(callback, pl.callbacks.ModelCheckpoint):
            continue
        name = type(callback).__name__
        if (interval := callback._train_time_interval) is not None and trainer.world_size > 1:
            raise FederatedError(
                f"{name}(train_time_interval={interval!r}) saves in the middle of a round, where {trainer.world_size}"
                " processes see different clients or batches. Save at the end of a round with every_n_epochs, or train"
                " in one process."
            )


def no_federated_data(found: object) -> FederatedError:
    """Return the error that data are not split among clients; ``found`` is what was given, if anything."""
    what = "no datamodule" if found is None else kind_of(found)
    if isinstance(found, DataLoader):
        return FederatedError(
            "FederatedTrainer.fit needs to know the clients, found a DataLoader. Say how it is split among them:"
            " trainer.fit(model, FederatedDataModule.from_loader(loader, partition=Dirichlet(num_clients=10,"
            " alpha=0.5), val=val_loader)), with Dirichlet or another partition of lightning_fed.data."
        )
    return FederatedError(
        f"FederatedTrainer.fit needs a FederatedDataModule, found {what}. Pass trainer.fit(model,"
        " FederatedDataModule(clients=[...])) or FederatedDataModule(train=..., partition=...)."
    )


def check_module(trainer: pl.Trainer) -> None:
    """Refuse modules and data that rounds cannot drive.

    Raises:
        FederatedError: Naming the module or data module, the reason and the remedy.
    """
    module = trainer.lightning_module
    name = type(module).__name__
    refuse_foreign(trainer.callbacks)  # the module's own too, of configure_callbacks
    if not isinstance(trainer.datamodule, FederatedDataModule):
        raise no_federated_data(trainer.datamodule)
    if type(trainer.datamodule).train_dataloader is not FederatedDataModule.train_dataloader:
        raise FederatedError(
            f"{type(trainer.datamodule).__name__} overrides train_dataloader, which no round asks for: every client has"
            " a loader of its own. Override client_dataset(client_id), or client_dataloader(client_id, generator), or"
            " pass collate_fn, transform or augment. For a centralised baseline use Lightning's own Trainer."
        )
    if not module.automatic_optimization:
        raise FederatedError(
            f"{name} uses manual optimization, where no correction can be injected between backward and step."
            " Remove `self.automatic_optimization = False` and return the loss from training_step."
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise FederatedError(f"{name}.training_step(dataloader_iter) is not supported: take `batch` instead.")
    lazy = next((key for key, parameter in module.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise FederatedError(
            f"{name}.{lazy} has no shape yet, and all clients start from the same parameters. Give the layer its sizes,"
            " or run an example through the module before the fit."
        )


def check_optimizers(optimizers: list[Optimizer], module: pl.LightningModule) -> Optimizer:
    """Return the single local optimizer.

    Raises:
        FederatedError: If there is none, or one that cannot take corrections.
    """
    name = type(module).__name__
    (optimizer,) = optimizers  # Lightning has refused several
    if type(optimizer).__name__ == "_MockOptimizer":
        raise FederatedError(f"{name}.configure_optimizers() returned None; return a torch optimizer, such as SGD.")
    refuse_unsupported(optimizer, f"{name}.configure_optimizers(): the local optimizer")
    return optimizer


def check_schedulers(trainer: pl.Trainer) -> None:
    """Refuse schedulers that step within a client.

    Raises:
        FederatedError: Naming the scheduler.
    """
    for config in trainer.lr_scheduler_configs:
        if config.interval != "epoch":
            raise FederatedError(
                f"The LR scheduler {type(config.scheduler).__name__} has interval={config.interval!r}: a schedule over"
                " the local steps of one client would start anew in every round. Use interval='epoch' (the default):"
                " it is then stepped once a round."
            )


def check_algorithm_fits(algorithm: Algorithm, optimizer: Optimizer, module: pl.LightningModule) -> None:
    """Refuse a method that preconditions gradients over an optimizer that does so too.

    Raises:
        FederatedError: Naming both, and the two ways out.
    """
    base = getattr(algorithm, "base", None)
    if base is not None and not is_plain_sgd(optimizer):
        raise FederatedError(
            f"{type(algorithm).__name__}(base={type(base).__name__}) preconditions the gradient itself;"
            f" {type(module).__name__}.configure_optimizers() returned {type(optimizer).__name__}, which would do so"
            " once more. Return SGD with momentum 0, or drop `base` to mimic your own optimizer."
        )


def check_hyper_parameters(holder: Any, kind: str) -> None:
    """Refuse hyper-parameters that a checkpoint could not be read back with, before a round is spent on them.

    Args:
        holder: A module or data module with ``hparams``.
        kind: What it is, as the error names it.

    Raises:
        FederatedError: Naming the hyper-parameter.
    """
    hparams = getattr(holder, "hparams", None)
    for key, value in dict(hparams or {}).items() if isinstance(hparams, Mapping) else ():
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except Exception as error:
            raise FederatedError(
                f"The hyper-parameter {key!r} of the {kind} {type(holder).__name__} ({type(value).__name__}) cannot be"
                " saved so that it loads without running code. Leave it out:"
                f" self.save_hyperparameters(ignore=[{key!r}])."
            ) from error
