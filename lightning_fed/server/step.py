"""The server's step: any torch optimizer applied to the direction of a round."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.flat import Layout
from lightning_fed.core.origin import CHECKPOINT, Origin
from lightning_fed.core.torch_optimizers import is_plain_sgd, refuse_unsupported
from lightning_fed.core.types import Vector

ServerOptimizerFactory: TypeAlias = Callable[[Iterable[Tensor]], Optimizer]
"""A function from parameters to a torch optimizer, such as ``functools.partial(torch.optim.Adam, lr=0.01)``."""

ServerSchedulerFactory: TypeAlias = Callable[[Optimizer], LRScheduler]
"""A function from the server's optimizer to a learning rate scheduler, which steps once a round."""


def plain_sgd(params: Iterable[Tensor]) -> Optimizer:
    """Return SGD with rate one, which sets the server model to the mean of the client models."""
    return torch.optim.SGD(params, lr=1.0)


@contextmanager
def steps_not_counted() -> Iterator[None]:
    """Suppress torch's warning about scheduler.step() before optimizer.step(); a round may have no step."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*")
        yield


class ServerStep:
    """The server parameters ``x`` [P] and their optimizer.

    The optimizer gets parameters with the model's shapes (some need them) and the negative direction as gradient.
    """

    def __init__(
        self,
        build: ServerOptimizerFactory,
        x: Vector,
        layout: Layout,
        build_scheduler: ServerSchedulerFactory | None = None,
    ) -> None:
        self.x = x.clone()
        self.params = [nn.Parameter(view) for view in layout.views(self.x)]
        self.layout, self._is_checked = layout, False
        self.optimizer = build(self.params)
        if not isinstance(self.optimizer, Optimizer):
            raise FederatedError(
                f"server_optimizer must return a torch optimizer, found {self.optimizer!r}. Pass a callable such as"
                " functools.partial(torch.optim.SGD, lr=1.0)."
            )
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        if held != {id(p) for p in self.params}:
            raise FederatedError("server_optimizer must be built from the parameters that it is handed, all of them.")
        refuse_unsupported(self.optimizer, "server_optimizer")
        self.scheduler = None if build_scheduler is None else build_scheduler(self.optimizer)
        if build_scheduler is not None and (
            not isinstance(self.scheduler, LRScheduler) or isinstance(self.scheduler, ReduceLROnPlateau)
        ):
            raise FederatedError(
                "server_lr_scheduler must return a torch scheduler that steps without a metric, found"
                f" {type(self.scheduler).__name__}. Pass a callable such as functools.partial(StepLR, step_size=100)."
            )

    @property
    def takes_mean(self) -> bool:
        """Whether the optimizer is plain SGD with rate one, whose step along the mean change is the mean model."""
        (group, *others) = self.optimizer.param_groups
        return is_plain_sgd(self.optimizer) and not others and group["lr"] == 1 and not group["weight_decay"]

    def step(self, direction: Vector, models: Vector | None) -> None:
        """Move ``x`` along a direction [P].

        ``models`` is the mean of the client models if ``direction`` equals ``models - x``. Plain SGD with rate one then
        sets ``x`` to it, without the rounding of ``x + (mean - x)``.
        """
        if models is not None and self.takes_mean:
            self.x.copy_(models)
            return
        for p, g in zip(self.params, self.layout.views(-direction), strict=True):
            p.grad = g
        before = None if self._is_checked else self._counts()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._is_checked = True
        if before is not None and (
            changed := [name for name, value in self._counts().items() if before[name] != value]
        ):
            raise FederatedError(
                f"server_optimizer {type(self.optimizer).__name__} changes its attribute {changed[0]!r} as it steps,"
                " and checkpoints hold no attributes. Keep it in self.state[parameter], or in a parameter group."
            )

    def _counts(self) -> dict[str, Any]:
        """Return the numbers in attributes of the optimizer, except those of schedulers."""
        named = vars(self.optimizer).items()
        return {name: value for name, value in named if type(value) in (int, float) and not name.startswith("_")}

    def end_round(self) -> None:
        """Step the scheduler, which there is, also after a round without clients."""
        assert self.scheduler is not None
        with steps_not_counted():
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return ``x``, the states of optimizer and scheduler, and their class names."""
        return {
            "x": self.x.clone(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": None if self.scheduler is None else self.scheduler.state_dict(),
            "classes": [type(self.optimizer).__name__, type(self.scheduler).__name__],
        }

    def load_state_dict(self, state: dict[str, Any], origin: Origin = CHECKPOINT) -> None:
        """Load the result of :meth:`state_dict`, including rates and options; raise if the classes differ."""
        mine = [type(self.optimizer).__name__, type(self.scheduler).__name__]
        for name, saved, here in zip(("server_optimizer", "server_lr_scheduler"), state["classes"], mine, strict=True):
            if saved != here:
                raise FederatedError(
                    f"{origin.name}'s {name} is {saved}, {origin.this}'s is {here}. {origin.remedy(f'the {name}')}"
                )
        self.x.copy_(state["x"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["schedule"])
