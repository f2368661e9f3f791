"""What is known of torch's optimizers: which cannot be corrected, which add decay to gradients, where state lives."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.core.errors import FederatedError

__all__ = ["STEP_COUNTS", "coupled_decay", "home_of", "is_plain_sgd", "refuse_unsupported", "without_coupled_decay"]

STEP_COUNTS = ("step", "mu_product")
"""The statistics that depend on the number of steps alone: one number, whatever the parameter's shape."""

_CPU = torch.device("cpu")
_UNSUPPORTED = {
    "LBFGS": "it evaluates the closure several times a step, so that no correction of one gradient can be injected",
    "SparseAdam": "it needs sparse gradients, and corrections are dense",
    "ASGD": "it averages its own iterates across steps, which rounds would mix between clients",
    "Rprop": "it reads signs of successive full-batch gradients, which local minibatches do not give",
}
_COUPLED = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
)


def refuse_unsupported(optimizer: Optimizer, role: str) -> None:
    """Refuse optimizers that cannot take an injected gradient.

    Args:
        optimizer: The optimizer.
        role: What it is for, as the error names it.
    """
    for cls in type(optimizer).__mro__:
        if cls.__name__ in _UNSUPPORTED and cls.__module__.startswith("torch.optim"):
            raise FederatedError(
                f"{role} {cls.__name__} is not supported: {_UNSUPPORTED[cls.__name__]}. Use SGD, Adam, AdamW or"
                " RMSprop."
            )
    if any(group.get("maximize") for group in optimizer.param_groups):
        raise FederatedError(
            f"{role} {type(optimizer).__name__}(maximize=True) is not supported: negate the loss instead."
        )


def is_plain_sgd(optimizer: Optimizer) -> bool:
    """Whether every step is exactly ``y <- y - lr * g`` (coupled weight decay aside)."""
    return type(optimizer) is torch.optim.SGD and not any(map(itemgetter("momentum"), optimizer.param_groups))


@contextmanager
def without_coupled_decay(optimizer: Optimizer) -> Iterator[None]:
    """Switch coupled weight decay off: the gradients hold it already."""
    kept = [(group, group["weight_decay"]) for group in optimizer.param_groups if coupled_decay(optimizer, group)]
    for group, _ in kept:
        group["weight_decay"] = 0.0
    try:
        yield
    finally:
        for group, decay in kept:
            group["weight_decay"] = decay


def coupled_decay(optimizer: Optimizer, group: dict[str, Any]) -> float:
    """The decay that the optimizer adds to the gradient (and not to the step) for a parameter group."""
    if not isinstance(optimizer, _COUPLED) or group.get("decoupled_weight_decay", False):
        return 0.0
    return float(group.get("weight_decay", 0.0))


def home_of(name: str, param: Tensor, group: Mapping[str, Any]) -> torch.device:
    """Return the device of an optimizer's statistic of a parameter, by the rule of ``torch.optim``.

    It is the parameter's device. Step counts stay on the CPU, where reading them does not wait for a device, unless
    the group's step runs on the device as a whole (``capturable``, ``fused``).
    """
    if name in STEP_COUNTS and not group.get("capturable") and not group.get("fused"):
        return _CPU
    return param.device
