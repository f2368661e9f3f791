"""The options of the local optimizer, which every client starts with, and the steps of its schedules."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.compat.package import pl
from lightning_fed.core.errors import FederatedError


class LocalOptions:
    """The options of the local optimizer and the steps of its schedules before some local work.

    Every client has a new local optimizer, as if ``configure_optimizers`` were called for it. A rate that
    ``training_step`` or a hook of batches sets must therefore not reach the next client.

    Args:
        optimizer: The local optimizer.
        schedules: The configurations of its schedules, as Lightning keeps them.
    """

    def __init__(self, optimizer: Optimizer, schedules: Sequence[Any]) -> None:
        self._groups, self._schedules = optimizer.param_groups, schedules
        self._options, self._steps = list[dict[str, Any]](), list[Any]()
        for group in self._groups:
            options = group.copy()
            del options["params"]
            for name, value in options.items():
                if isinstance(value, Tensor):
                    options[name] = value.clone()
            self._options.append(options)
        for config in schedules:
            self._steps.append(getattr(config.scheduler, "last_epoch", None))

    def take_back(self) -> tuple[str | None, str | None]:
        """Give the optimizer its options back; return the name of a changed one, and of a schedule that has stepped."""
        option, schedule = None, None
        for group, before in zip(self._groups, self._options, strict=True):
            for name in [*group] if len(group) > len(before) + 1 else ():
                if name != "params" and name not in before:
                    option = name
                    del group[name]  # such as a count of steps
            for name, was in before.items():
                value = group[name]
                if isinstance(was, Tensor) and isinstance(value, Tensor):
                    if not was.equal(value):
                        option = name
                        value.copy_(was)
                elif value is not was and value != was:
                    option, group[name] = name, was
        for config, step in zip(self._schedules, self._steps, strict=True):
            if getattr(config.scheduler, "last_epoch", None) != step:
                schedule = type(config.scheduler).__name__
        return option, schedule


def stepped_schedule(module: pl.LightningModule, schedule: str) -> FederatedError:
    """Return the error for a module that steps a schedule while clients train."""
    return FederatedError(
        f"{type(module).__name__} steps its schedule {schedule} while a client trains: the next client would"
        " start with the changed rate. Remove the call of step(), return {'scheduler': ..., 'interval': 'step'}"
        " from configure_optimizers(), and choose what it counts: local_schedule='restart', 'continue' or 'total'."
    )
