"""Properties of torch optimizers: support for corrections, coupled weight decay, devices of states."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from inspect import Parameter, signature, unwrap
from numbers import Real
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lightning_fed.core.errors import FederatedError

STEP_COUNTS = ("step", "mu_product")
"""The statistics that only depend on the number of steps: one number for a parameter of any shape."""

_CPU = torch.device("cpu")
_SGD_STEP: Any = torch.optim.SGD.step  # the first optimizer of a class wraps its step, and marks it as "hooked"
_SGD_STEP = _SGD_STEP.__wrapped__ if hasattr(_SGD_STEP, "hooked") else _SGD_STEP
_SGD_OPTIONS = itemgetter("momentum", "maximize", "differentiable", "fused")
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
    """Raise for optimizers that cannot use an injected gradient; the error names their role."""
    for cls in type(optimizer).__mro__:
        if cls.__name__ in _UNSUPPORTED and cls.__module__.startswith("torch.optim"):
            raise FederatedError(
                f"{role} {cls.__name__} is not supported: {_UNSUPPORTED[cls.__name__]}. Use SGD, Adam, AdamW or"
                " RMSprop."
            )
    closure = signature(type(optimizer).step).parameters.get("closure")
    is_sam = hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step")  # all well-known versions have both
    if is_sam or (closure is not None and closure.default is Parameter.empty):
        raise FederatedError(
            f"{role} {type(optimizer).__name__} is not supported: its step requires a closure to evaluate the loss"
            " again, so that no correction of one gradient can be injected. Use SGD, Adam, AdamW or RMSprop; for"
            " sharpness-aware minimization, algorithm=FedSAM(...)."
        )
    if any(group.get("maximize") for group in optimizer.param_groups):
        raise FederatedError(
            f"{role} {type(optimizer).__name__}(maximize=True) is not supported: negate the loss instead."
        )


class JointOptimizer(Optimizer):
    """Several optimizers as one: their parameter groups in order, and one state for all of them."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts: list[Optimizer] = []
        super().__init__([torch.zeros(0)], {})
        self.parts.extend(parts)
        for part in parts:
            part.state = self.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of all parts, in order."""
        return [group for part in self.parts for group in part.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """Do nothing: the parts own the groups."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the groups and the state of every part."""
        first, states = 0, dict[Any, Any]()
        for part in self.parts:
            groups = state_dict["param_groups"][first : first + len(part.param_groups)]
            own = {i for group in groups for i in group["params"]}
            state = {i: value for i, value in state_dict["state"].items() if i in own}
            part.load_state_dict({"state": state, "param_groups": groups})
            states |= part.state
            first += len(groups)
        self.state.clear()
        self.state.update(states)
        for part in self.parts:
            part.state = self.state


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers with a separate state that an optimizer wraps, as Lookahead does."""
    found, waiting = list[Optimizer](), [optimizer]
    while waiting:
        for value in vars(waiting.pop()).values():
            if isinstance(value, Optimizer) and not any(value is known for known in (optimizer, *found)):
                found.append(value)
                waiting.append(value)
    return [inner for inner in found if inner.state is not optimizer.state]


def copies_of_parameters(optimizer: Optimizer) -> str | None:
    """Return the name of an attribute that holds copies of parameters from before the first step, or None."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for name, value in vars(optimizer).items():
        for tensor in () if name in ("state", "param_groups") else _tensors_in(value):
            if any(tensor is not p and tensor.shape == p.shape and torch.equal(tensor, p) for p in params):
                return name
    return None


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        yield from _tensors_in(part)


def refuse_lost_statistics(optimizer: Optimizer, keeper: str) -> None:
    """Let steps raise if they change numbers that ``keeper`` does not keep.

    It keeps tensors and numbers in ``self.state[parameter]``. Many optimizers of other packages count their steps in a
    parameter group.
    """
    before: list[dict[str, Any]] = []

    def remember(*_: Any) -> None:
        before[:] = [
            {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()}
            for group in optimizer.param_groups
        ]

    def compare(*_: Any) -> None:
        lost = [
            f"the option {name!r} of a parameter group"
            for group, was in zip(optimizer.param_groups, before, strict=True)
            for name, value in group.items()
            if name != "params" and not _is_same(value, was.get(name))
        ]
        for key, entries in optimizer.state.items():
            kept = entries.items() if isinstance(key, Tensor) else [(key, entries)]
            lost += [
                f"{name!r} in its state"
                for name, value in kept
                if not isinstance(key, Tensor) or not isinstance(value, (Tensor, Real, type(None)))
            ]
        if lost:
            raise FederatedError(
                f"{type(optimizer).__name__} changes {lost[0]} as it steps, but {keeper} keeps only tensors and numbers"
                " in self.state[parameter]: a client would continue without a part of its state. Return an optimizer"
                f" that keeps everything there, such as torch.optim.Adam, or leave out {keeper}."
            )

    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(compare)


def _is_same(value: Any, was: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(was, Tensor):
        return torch.equal(value, was)
    return value is was or (isinstance(value, (Real, str, tuple)) and bool(value == was))


def known_loss(optimizer: Optimizer, loss: Any) -> Callable[[], Any]:
    """Return a closure that gives an optimizer the loss of its step, which is already computed.

    It raises when it is called again: a second evaluation would need a second gradient.
    """
    given = [loss]

    def closure() -> Any:
        if not given:
            raise FederatedError(
                f"{type(optimizer).__name__} evaluates the loss twice in a step, so that no correction of one gradient"
                " can be injected. Use an optimizer that evaluates it once, such as SGD or Adam."
            )
        return given.pop()

    return closure


def is_plain_sgd(optimizer: Optimizer) -> bool:
    """Return whether every step is exactly ``y <- y - lr * g``, apart from coupled weight decay."""
    return type(optimizer) is torch.optim.SGD and not any(map(itemgetter("momentum"), optimizer.param_groups))


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether hooks are registered before or after the steps of this optimizer, or of all optimizers."""
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return any((*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))


def take_plain_step(optimizer: Optimizer, has_decay: bool) -> bool:
    """Take a step of plain SGD in one call, with the bits of ``optimizer.step()``.

    Args:
        optimizer: The optimizer.
        has_decay: Whether gradients already contain the weight decay.

    Returns:
        False, without a step, if ``optimizer.step()`` does more or differs: options, hooks, a replaced ``step``.
    """
    method, own = type(optimizer).step, optimizer.__dict__.get("step")
    if type(optimizer) is not torch.optim.SGD or getattr(method, "__wrapped__", None) is not _SGD_STEP:
        return False
    if own is not None and (not hasattr(own, "_wrapped_by_lr_sched") or own.__wrapped__ is not method):
        return False
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return False
    groups = optimizer.param_groups
    for group in groups:
        decays = group["weight_decay"] and not has_decay
        if decays or any(_SGD_OPTIONS(group)) or type(group["lr"]) is not float:
            return False
    optimizer.__dict__["_opt_called"] = True  # a scheduler's wrapper of ``step`` sets it too
    with torch.no_grad():
        for group in groups:
            moving, grads = list[Tensor](), list[Tensor]()
            for p in group["params"]:
                if (grad := p.grad) is not None:
                    moving.append(p)
                    grads.append(grad)
            if moving:
                torch._foreach_add_(moving, grads, alpha=-group["lr"])
    return True


@contextmanager
def without_coupled_decay(optimizer: Optimizer) -> Iterator[None]:
    """Disable coupled weight decay, which the gradients already include."""
    kept = [(group, group["weight_decay"]) for group in optimizer.param_groups if coupled_decay(optimizer, group)]
    for group, _ in kept:
        group["weight_decay"] = 0.0
    try:
        yield
    finally:
        for group, decay in kept:
            group["weight_decay"] = decay


def coupled_decay(optimizer: Optimizer, group: dict[str, Any]) -> float:
    """Return the decay that the optimizer adds to a group's gradient (rather than to the step)."""
    if isinstance(optimizer, JointOptimizer):
        optimizer = next(part for part in optimizer.parts if any(own is group for own in part.param_groups))
    kind: Any = type(optimizer)
    if not _couples(kind) or group.get("decoupled_weight_decay", False):
        return 0.0
    return float(group.get("weight_decay", 0.0))


@cache
def _couples(cls: Any) -> bool:
    """Return whether a class has the ``step`` of one that adds decay to the gradient; a subclass may override it."""
    return any(issubclass(cls, known) and unwrap(cls.step) is unwrap(known.step) for known in _COUPLED)


def device_of(name: str, param: Tensor, group: Mapping[str, Any]) -> torch.device:
    """Return the device of an optimizer's statistic of a parameter, as in ``torch.optim``.

    It is the parameter's device. Step counts stay on the CPU, where reads need no synchronization, unless the group's
    step runs entirely on the device (``capturable``, ``fused``).
    """
    if name in STEP_COUNTS and not group.get("capturable") and not group.get("fused"):
        return _CPU
    return param.device
