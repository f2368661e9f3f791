"""Which hooks between batches anybody uses."""

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_fed._compat import is_overridden
from lightning_fed.callbacks.base import uses_hook

__all__ = ["CALLBACK_STEP_HOOKS", "STEP_HOOKS", "TRANSFER_HOOKS", "overridden_hooks", "saves_at_round_ends"]

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

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""The hooks that a batch goes through."""

_BATCH_HOOKS = ("on_train_batch_start", "on_train_batch_end")


def overridden_hooks(trainer: pl.Trainer) -> list[str]:
    """Return the hooks of single batches and steps that the module or a callback has, as ``Class.hook``."""
    module = trainer.lightning_module
    found = [
        f"{type(module).__name__}.{hook}"
        for hook in (*_BATCH_HOOKS, *STEP_HOOKS)
        if is_overridden(hook, module, pl.LightningModule)
    ]
    for callback in trainer.callbacks:
        if isinstance(callback, ModelCheckpoint) and saves_at_round_ends(callback):
            continue
        found += [
            f"{type(callback).__name__}.{hook}"
            for hook in (*_BATCH_HOOKS, *CALLBACK_STEP_HOOKS)
            if uses_hook(callback, hook)
        ]
    return found


def saves_at_round_ends(callback: ModelCheckpoint) -> bool:
    """Whether a checkpoint callback does nothing between batches."""
    return callback._every_n_train_steps == 0 and callback._train_time_interval is None
