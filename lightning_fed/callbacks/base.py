"""Callback hooks for rounds and clients, in addition to Lightning's own."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from lightning_fed.compat.package import pl
from lightning_fed.core.rounds import ClientReport, RoundReport
from lightning_fed.core.types import ClientId
from lightning_fed.core.unset import NamesUnset

_LOGS_AS = {"on_round_start": "on_train_epoch_start", "on_round_end": "on_train_epoch_end"}


class FederatedCallback(NamesUnset, pl.Callback):
    """A Lightning callback with additional hooks for rounds and clients.

    Reports are read-only. ``pl_module.log`` works in ``on_round_start`` and ``on_round_end``.

    Example:
        >>> class Print(FederatedCallback):
        ...     def on_round_end(self, trainer, pl_module, round_report):
        ...         print(round_report.round, round_report.loss)
    """

    needs_loss = False
    """Whether it measures the loss of ``training_step`` or its gradient. Manual optimization returns no loss."""

    def on_round_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round: int) -> None:
        """Called when the cohort of a round is drawn, before any client works.

        Args:
            trainer: The trainer.
            pl_module: The module; it holds the server model.
            round: The round, from 0.
        """

    def on_round_restart(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round: int) -> None:
        """Called when a round starts again.

        There are three reasons. With ``on_client_error="drop"``, the work of other clients depends on a failed client,
        and the round starts again without it. With ``engine="auto"``, the vectorized engine cannot run the clients
        after all, and the round starts again with the sequential engine. For example, a hook has given the clients
        different settings (see :meth:`on_client_start`). If the vectorized engine runs out of memory, the round starts
        again with fewer clients at once.

        All clients of the round train again and their hooks are called again, so a callback must discard the data of
        this round.

        Args:
            trainer: The trainer.
            pl_module: The module.
            round: The round, from 0.
        """

    def on_client_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, round: int, client_id: ClientId
    ) -> None:
        """Called before a client's local work.

        If the client fails, no ``on_client_end`` follows; :attr:`RoundReport.failed` has the reason. If other clients'
        work depends on it, the round runs again without it: see :meth:`on_round_restart`.

        The hook may set attributes of the module, options of the optimizer (``trainer.optimizers[0]``) and the like for
        one client. They are restored after its ``on_client_end``, so neither the next client nor the server's model has
        them. ``engine="vectorized"`` refuses different values for different clients of a round. ``engine="auto"`` then
        restarts the round with the sequential engine, once in a run. It first restores everything that client hooks
        have set in this round: settings, and the attributes of the callbacks with such hooks. If all clients get the
        same values, the vectorized engine continues with them.

        Args:
            trainer: The trainer.
            pl_module: The module; it holds the model that the client starts from, the server's with the client's
                personal parts. Changes to its weights and buffers are discarded, with a warning.
            round: The round, from 0.
            client_id: The client.
        """

    def on_client_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, client_report: ClientReport) -> None:
        """Called after a client's local work.

        Args:
            trainer: The trainer.
            pl_module: The module; it holds the client's model. Changes to its weights and buffers are discarded, since
                the message is complete. Other attributes keep their new values for all later clients, except those
                that :meth:`on_client_start` has set for this one.
            client_report: The report of the client's work.
        """

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round_report: RoundReport) -> None:
        """Called after the server's step, before validation.

        Args:
            trainer: The trainer.
            pl_module: The module; it holds the new server model.
            round_report: The report of the round.
        """


def uses_hook(callback: pl.Callback, hook: str, base: type[pl.Callback] = pl.Callback) -> bool:
    """Return whether a callback overrides a hook, in its class or on the instance, like ``LambdaCallback``."""
    return getattr(getattr(callback, hook), "__func__", None) is not getattr(base, hook)


def any_uses_hook(trainer: pl.Trainer, *hooks: str, of_users: bool = False) -> bool:
    """Return whether any :class:`FederatedCallback` overrides one of the hooks.

    With ``of_users``, the callbacks of this package do not count. In hooks for single clients, they set nothing and
    read no loss or norm of a client's report.
    """
    return any(
        isinstance(callback, FederatedCallback)
        and uses_hook(callback, hook, FederatedCallback)
        and not (of_users and getattr(getattr(callback, hook), "__module__", "").startswith("lightning_fed."))
        for callback in trainer.callbacks
        for hook in hooks
    )


def call_round_hook(trainer: pl.Trainer, hook: str, *args: Any) -> None:
    """Call a hook of every :class:`FederatedCallback` that overrides it."""
    module = trainer.lightning_module
    for callback in trainer.callbacks:
        if isinstance(callback, FederatedCallback) and uses_hook(callback, hook, FederatedCallback):
            previous, module._current_fx_name = module._current_fx_name, _LOGS_AS.get(hook)
            with trainer.profiler.profile(f"[Callback]{callback.state_key}.{hook}"):
                getattr(callback, hook)(trainer, module, *args)
            module._current_fx_name = previous


def boards(trainer: pl.Trainer) -> list[pl.loggers.TensorBoardLogger]:
    """Return the trainer's TensorBoard loggers."""
    return [logger for logger in trainer.loggers if isinstance(logger, pl.loggers.TensorBoardLogger)]


def write_histogram(trainer: pl.Trainer, tag: str, values: Iterable[float]) -> None:
    """Write the histogram of the finite values to TensorBoard, with the number of completed rounds as the step."""
    finite = np.array([value for value in values if np.isfinite(value)])
    for board in boards(trainer) if len(finite) and trainer.is_global_zero else ():
        board.experiment.add_histogram(tag, finite, trainer.fit_loop.round)
