"""The metrics that EarlyStopping, ModelCheckpoint and ReduceLROnPlateau follow, and the error for a missing one."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any

from lightning_fed.compat.package import pl
from lightning_fed.compat.private import TrainerFn, rank_zero_warn
from lightning_fed.core.errors import FederatedError


class Monitors:
    """Defer the error for a missing metric from the middle of a round's hooks to the end of the round.

    ``error`` is the error to raise then.
    """

    def __init__(self) -> None:
        self.error: FederatedError | None = None
        self._tracked: list[pl.callbacks.EarlyStopping] = []

    def watch(self, trainer: pl.Trainer) -> None:
        """Make EarlyStopping note a missing metric here, until :meth:`release`."""
        self.error = None
        for callback in trainer.callbacks:
            if isinstance(callback, pl.callbacks.EarlyStopping):
                callback._validate_condition_metric = partial(self._is_there, callback)  # type: ignore[method-assign]
                self._tracked.append(callback)

    def release(self) -> None:
        """Restore the callbacks."""
        for callback in self._tracked:
            vars(callback).pop("_validate_condition_metric", None)
        self._tracked = []

    def note(self, who: str, monitor: str, available: Iterable[str]) -> None:
        """Note that the metric that ``who`` follows is missing."""
        names = sorted(available)
        close = get_close_matches(monitor, names, n=1)
        meant = f" Did you mean {close[0]!r}?" if close else ""
        self.error = self.error or FederatedError(
            f"{who} follows the metric {monitor!r}, which was not logged.{meant} Logged so far:"
            f" {', '.join(names) or 'nothing'}. Change monitor, or log it with self.log({monitor!r}, ...)."
        )

    def _is_there(self, callback: pl.callbacks.EarlyStopping, logs: Mapping[str, Any]) -> bool:
        try:
            return type(callback)._validate_condition_metric(callback, logs)  # type: ignore[arg-type]
        except RuntimeError:
            if callback.monitor in logs:
                raise
            self.note(type(callback).__name__, callback.monitor, logs)
            return False


def warn_of_misspelt(trainer: pl.Trainer) -> None:
    """Warn of monitored names that resemble names logged by validation, at the end of Lightning's sanity check.

    Training and callbacks may log other names later, so this only warns.
    """
    names = list(trainer.callback_metrics)
    followed = [
        (type(c).__name__, c.monitor) for c in trainer.callbacks if isinstance(getattr(c, "monitor", None), str)
    ]
    configs = trainer.lr_scheduler_configs
    followed += [("ReduceLROnPlateau", str(config.monitor)) for config in configs if config.reduce_on_plateau]
    for who, monitor in followed:
        close = get_close_matches(monitor, names, n=1, cutoff=0.8)
        if close and monitor not in names:
            rank_zero_warn(
                f"{who} follows the metric {monitor!r}, and validation logs {close[0]!r}. If training does not log"
                f" {monitor!r} either, change monitor: the run may stop at the end of the first round without it."
            )


class PlateauSchedulers(pl.Callback):
    """Step ``ReduceLROnPlateau`` right after validation, so that a checkpoint written then holds the step.

    Lightning steps these schedulers after the callbacks that save, and a run resumed from such a checkpoint would miss
    one step.
    """

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Step the schedulers, once a round."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            trainer.fit_loop.step_plateau_schedulers()
