"""What a round's hooks and clients change before it is complete, as it was when the round began."""

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from lightning_fed.callbacks.base import FederatedCallback
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import is_overridden
from lightning_fed.engines.batch_hooks import is_users_own
from lightning_fed.trainer.server_model import ServerModel

EARLY_HOOKS = ("on_train_epoch_start", "on_round_start", "on_round_restart", "on_client_start", "on_client_end")
"""The hooks of a round that are called before it is complete, and may change what nobody trains."""

_ALL_HOOKS = tuple(name for name in dir(FederatedCallback) if name.startswith("on_"))


def has_round_hooks(trainer: pl.Trainer, hooks: Sequence[str] = _ALL_HOOKS) -> bool:
    """Return whether the user has hooks that a round calls, other than the module's batch hooks."""
    module = trainer.lightning_module
    callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, pl.callbacks.Checkpoint)]
    of_module = [hook for hook in ("on_train_epoch_start", "on_train_epoch_end") if hook in hooks]
    return any(is_overridden(hook, module, pl.LightningModule) for hook in of_module) or any(
        is_users_own(callback, hook) for callback in callbacks for hook in hooks
    )


class RoundStart:
    """What a checkpoint in the middle of a round holds instead of the present values.

    It is a checkpoint of the last completed round. A run that resumes from it calls the round's hooks again, so it must
    not hold what they have changed: the server's model, the options of the local optimizer, the states of callbacks.
    Those of callbacks that save checkpoints are the present ones, with the files that are there.

    Args:
        trainer: The trainer.
        server_model: The server's model, if hooks may change it and the others.

    Attributes:
        precision: The state of the precision plugin.
        metrics: The metrics that callbacks may follow; without those of the round's first steps.
    """

    def __init__(self, trainer: pl.Trainer, server_model: ServerModel | None) -> None:
        self.precision: dict[str, Any] = copy.deepcopy(trainer.precision_plugin.state_dict())
        self.metrics: dict[str, Tensor] = dict(trainer._logger_connector._callback_metrics)
        self._callbacks: dict[str, Any] = {}
        self._options: list[dict[str, Any]] = []  # of each parameter group
        if server_model is None:
            return
        server_model.keep_from_here()
        groups = trainer.optimizers[0].state_dict()["param_groups"]
        self._options = [copy.deepcopy({k: v for k, v in group.items() if k != "params"}) for group in groups]
        for callback in trainer.callbacks:
            if is_users_own(callback, "state_dict") and not isinstance(callback, pl.callbacks.Checkpoint):
                state = callback.state_dict()
                with suppress(Exception):  # a checkpoint leaves out what cannot be copied
                    state = copy.deepcopy(state)
                self._callbacks[callback.state_key] = state

    def put_back(self, trainer: pl.Trainer) -> None:
        """Put back the precision and the options, when the round is left."""
        if self.precision:
            trainer.precision_plugin.load_state_dict(self.precision)
        for group, options in zip(trainer.optimizers[0].param_groups, self._options, strict=bool(self._options)):
            group.update(copy.deepcopy(options))

    def put_into(self, checkpoint: dict[str, Any], trainer: pl.Trainer) -> None:
        """Replace what a checkpoint holds of the present, except for the server's model."""
        if (name := type(trainer.precision_plugin).__qualname__) in checkpoint:
            checkpoint[name] = self.precision
        for state in checkpoint.get("optimizer_states", ()) if self._options else ():
            for group, options in zip(state["param_groups"], self._options, strict=True):
                group.update(options)
        if "callbacks" in checkpoint:
            checkpoint["callbacks"] |= self._callbacks
