"""Checks before the first round for what record-level differential privacy on clients does not cover."""

from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm

from lightning_fed.callbacks import ClientModels, Inexactness, Measure, SplitPicture
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import PassThroughProfiler
from lightning_fed.core.errors import FederatedError
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.server.client_privacy import ClientPrivacy
from lightning_fed.strategies import WithinClientStrategy


def check_private_clients(trainer: Any, privacy: ClientPrivacy) -> None:
    """Raise for settings of the trainer under which noise would not cover all that clients release."""
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
        # clients' own models have noise
        if isinstance(callback, (Measure, Inexactness, SplitPicture)) and not isinstance(callback, ClientModels):
            raise FederatedError(
                f"{what} the callback {type(callback).__name__}: it measures or shows clients' data without noise."
                " Remove it."
            )


def check_private_module(trainer: Any, privacy: ClientPrivacy) -> None:
    """Raise for a module or data without gradients of single examples."""
    module, what = trainer.lightning_module, f"client_privacy={privacy!r} cannot be combined with"
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and (layer.training or not layer.track_running_stats):
            raise FederatedError(
                f"{what} {name} ({type(layer).__name__}), which mixes the examples of a batch: no example would have"
                " its own gradient. Use GroupNorm, or opacus.validators.ModuleValidator.fix(network)."
            )
    data = trainer.datamodule
    names = ("client_dataloader", "client_batches")
    own = [name for name in names if getattr(type(data), name) is not getattr(FederatedDataModule, name)]
    if own:
        raise FederatedError(
            f"{what} {type(data).__name__}.{own[0]}: how often your own loader uses an example is unknown. Override"
            " client_dataset(client_id) instead."
        )
