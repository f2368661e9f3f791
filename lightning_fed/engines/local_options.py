"""The options of the local optimizer, which every client starts with, and the steps of its schedules."""

from typing import Any

from torch import Tensor

from lightning_fed.compat.package import pl
from lightning_fed.core.errors import FederatedError

__all__ = ["LocalOptions"]


class LocalOptions:
    """The options of the local optimizer and the steps of its schedules before some local work.

    Every client has a new local optimizer, as if ``configure_optimizers`` were called for it. A rate that
    ``training_step`` or a hook of batches sets must therefore not reach the next client.

    Args:
        trainer: The trainer of the local work.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._held = [(group, _copies(group)) for group in trainer.optimizers[0].param_groups]
        self._schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._steps = self._steps_now()

    def changed(self) -> str | None:
        """Return the name of the first option that has changed, or None."""
        for group, before in self._held:
            for name, value in _copies(group).items():
                if name not in before or not _equal(value, before[name]):
                    return name
        return None

    def stepped(self) -> str | None:
        """Return the name of a schedule that has taken a step, or None."""
        now = zip(self._schedules, self._steps, self._steps_now(), strict=True)
        return next((type(schedule).__name__ for schedule, was, is_now in now if was != is_now), None)

    def check_schedules(self, module: pl.LightningModule) -> None:
        """Raise if the work has stepped a schedule."""
        if (schedule := self.stepped()) is not None:
            raise FederatedError(
                f"{type(module).__name__} steps its schedule {schedule} while a client trains: the next client would"
                " start with the changed rate. Remove the call of step(), return {'scheduler': ..., 'interval':"
                " 'step'} from configure_optimizers(), and choose what it counts: local_schedule='restart', 'continue'"
                " or 'total'."
            )

    def restore(self) -> None:
        """Give the optimizer its options back."""
        for group, before in self._held:
            for name, value in before.items():
                if isinstance(value, Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value

    def _steps_now(self) -> list[Any]:
        return [getattr(schedule, "last_epoch", None) for schedule in self._schedules]


def _copies(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group, with copies of tensors."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"
    }


def _equal(one: Any, other: Any) -> bool:
    return bool(one.equal(other)) if isinstance(one, Tensor) and isinstance(other, Tensor) else one == other
