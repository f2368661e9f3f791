"""The hooks between batches that a module or a callback uses."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.callbacks.base import uses_hook
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import is_overridden, rank_zero_warn

STEP_HOOKS = (
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
)
"""The module's hooks between batch and step."""

CALLBACK_STEP_HOOKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
"""The callbacks' hooks between batch and step."""

_PRECISION_HOOKS = (
    "pre_backward",
    "backward",
    "post_backward",
    "optimizer_step",
    "clip_gradients",
    "clip_grad_by_norm",
    "clip_grad_by_value",
)
_STRATEGY_HOOKS = (
    "on_train_batch_start",
    "training_step",
    "pre_backward",
    "backward",
    "post_backward",
    "optimizer_step",
)
_OURS = ("lightning_fed", "pytorch_lightning", "lightning", "lightning_fabric")
_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_BATCH_HOOKS = ("on_train_batch_start", "on_train_batch_end")
_GRADIENT_HOOKS = ("backward", "post_backward", "on_after_backward", "on_before_optimizer_step")

_IDLE: Mapping[type[pl.Callback], Callable[[Any], bool]] = {
    pl.callbacks.ModelCheckpoint: lambda c: c._train_time_interval is None,
    pl.callbacks.LearningRateMonitor: lambda c: c.logging_interval == "epoch",
    pl.callbacks.Timer: lambda c: c._interval == pl.callbacks.timer.Interval.epoch,
}
"""Lightning's callbacks whose per-batch hooks can be no-ops, each with the condition for that."""


def has_transfer_hooks(trainer: pl.Trainer) -> bool:
    """Return whether the module, the data module or a user's strategy overrides a hook for transferring batches."""
    owners = (trainer.lightning_module, pl.LightningModule), (trainer.datamodule, pl.LightningDataModule)
    return is_users_own(trainer.strategy, "batch_to_device") or any(
        is_overridden(hook, owner, base) for hook in _TRANSFER_HOOKS for owner, base in owners if owner is not None
    )


def overridden_hooks(trainer: pl.Trainer, of_batches: Sequence[str] = _BATCH_HOOKS) -> list[str]:
    """Return overridden hooks of module and callbacks, ``of_batches`` and between batch and step, as ``Class.hook``."""
    module, hooks = trainer.lightning_module, (*of_batches, *STEP_HOOKS)
    found = [f"{type(module).__name__}.{h}" for h in hooks if is_overridden(h, module, pl.LightningModule)]
    for callback in trainer.callbacks:
        hooks = (*of_batches, *CALLBACK_STEP_HOOKS)
        found += [f"{type(callback).__name__}.{hook}" for hook in hooks if uses_batch_hook(callback, hook)]
    return found


def plugin_step_hooks(trainer: pl.Trainer) -> list[str]:
    """Return the hooks between batch and step of a user's precision plugin or strategy, as ``Class.hook``."""
    owners: Any = ((trainer.precision_plugin, _PRECISION_HOOKS), (trainer.strategy, _STRATEGY_HOOKS))
    return [f"{type(owner).__name__}.{hook}" for owner, hooks in owners for hook in hooks if is_users_own(owner, hook)]


def warn_of_gradient_hooks(trainer: pl.Trainer, algorithm: Algorithm) -> None:
    """Warn if hooks may change the gradients of local steps, but not the other gradients that a method takes."""
    hooks = overridden_hooks(trainer) + plugin_step_hooks(trainer)
    found = [hook for hook in hooks if hook.rpartition(".")[2] in _GRADIENT_HOOKS]
    if found:
        others = "full-batch gradients" if algorithm.full_grad_at else "second gradients"
        rank_zero_warn(
            f"{type(algorithm).__name__} takes {others}, and these hooks are not called for them: {', '.join(found)}."
            " If they change gradients, the method combines changed and unchanged ones. Change the loss instead, or use"
            " a method without such gradients, such as FedAvg."
        )


def is_users_own(owner: Any, hook: str) -> bool:
    """Return whether a hook of a module, callback or plugin is the user's, not Lightning's or this package's."""
    if hook in vars(owner):
        return True
    definer = next((cls for cls in type(owner).__mro__ if hook in vars(cls)), None)
    return definer is not None and definer.__module__.split(".")[0] not in _OURS


def uses_batch_hook(callback: pl.Callback, hook: str) -> bool:
    """Return whether a callback uses a per-batch or per-step hook."""
    base = next((cls for cls, is_idle in _IDLE.items() if isinstance(callback, cls) and is_idle(callback)), pl.Callback)
    return uses_hook(callback, hook, base)


def time_by_rounds(trainer: pl.Trainer) -> None:
    """Make timers check the time only at the end of a round, when requests to stop take effect anyway.

    Between batches, they would log at every remaining batch, and communicate with processes that train other clients.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, pl.callbacks.Timer):
            callback._interval = pl.callbacks.timer.Interval.epoch


def hooked_parameter(module: pl.LightningModule) -> str | None:
    """Return the name of a parameter with a gradient hook, or None."""
    for name, p in module.named_parameters():
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            return name
    return None
