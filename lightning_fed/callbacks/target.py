"""The cost to reach a target."""

from typing import Any, Literal

from lightning_fed.callbacks.base import FederatedCallback, boards
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import rank_zero_info, rank_zero_warn
from lightning_fed.core.arguments import check_number, check_one_of, check_texts


class TargetMetric(FederatedCallback):
    """Record the rounds and the bytes until a metric first reaches a target.

    It then logs the totals of the run so far, once: ``target/rounds``, ``target/bytes_up`` and ``target/bytes_down``. A
    TensorBoard logger also gets the rounds as ``hp_metric``, for its page of hyper-parameters; -1 means that the target
    was not reached. A line at the end of the fit reports the result. The run continues; to stop it there, use
    Lightning's ``EarlyStopping(stopping_threshold=...)``. Several of these callbacks log under the same names.
    ``reached`` has the numbers of each one.

    Args:
        monitor: The metric's logged name, from ``validation_step`` or from a callback, such as
            ``clients/val_acc/worst_10``.
        target: The value to reach.
        mode: "max" to reach it from below, "min" from above.

    Attributes:
        reached: Rounds, bytes up and bytes down, by name; None until the target is reached.

    Raises:
        FederatedError: If an argument is not allowed.

    Example:
        >>> TargetMetric("val_acc", 0.9).reached is None
        True
    """

    def __init__(self, monitor: str, target: float, mode: Literal["max", "min"] = "max") -> None:
        check_texts("TargetMetric", monitor=monitor)
        self.monitor = monitor
        self.target = check_number("TargetMetric", "target", target)
        self.mode = check_one_of("TargetMetric", "mode", mode, ("max", "min"))
        self.reached: dict[str, int] | None = None
        self._seen = False

    @property
    def state_key(self) -> str:
        """The key that separates this callback's state from that of another target."""
        return f"{type(self).__qualname__}{{'monitor': {self.monitor!r}, 'target': {self.target!r}}}"

    def state_dict(self) -> dict[str, Any]:
        """Return the result so far."""
        return {"reached": self.reached}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result from a checkpoint."""
        self.reached = state_dict["reached"]

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Reset for a new run, since the callback may have been in another one. A checkpoint is loaded later."""
        if stage == "fit" and not trainer.fit_loop.round:
            self.reached, self._seen = None, False

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the metric after validation, before a checkpoint may be written."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.check(trainer)

    def check(self, trainer: pl.Trainer) -> None:
        """Check the metric; the loop calls this at the end of a round, after all hooks that may log the metric."""
        value = trainer.callback_metrics.get(self.monitor)
        self._seen |= value is not None
        if self.reached is not None or value is None:
            return
        # compare tensors in the metric's own precision: 0.9 in float32 is less than Python's 0.9
        if bool(value >= self.target if self.mode == "max" else value <= self.target):
            loop = trainer.fit_loop
            self.reached = {
                "rounds": loop.round,
                "bytes_up": loop.state.bytes_up,
                "bytes_down": loop.state.bytes_down,
            }
            metrics = {f"target/{name}": float(amount) for name, amount in self.reached.items()}
            loop.log_round(metrics)
            for board in boards(trainer):
                board.log_metrics({"hp_metric": float(loop.round)}, step=loop.round)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the cost of the target, or that it was not reached."""
        wanted = f"{self.monitor} {'>=' if self.mode == 'max' else '<='} {self.target:g}"
        if self.reached is not None:
            rank_zero_info(
                f"{wanted} took {self.reached['rounds']} rounds, {self.reached['bytes_up']:,} bytes up and"
                f" {self.reached['bytes_down']:,} bytes down."
            )
        elif self._seen:
            rank_zero_info(f"{wanted} was not reached in {trainer.fit_loop.round} rounds.")
        elif trainer.fit_loop.round:
            known = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
            rank_zero_warn(f"TargetMetric: {self.monitor!r} was never logged; there is {known}.")
