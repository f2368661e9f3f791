"""Properties of the optimizers of ``torch.optim``."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.torch_optimizers import (
    JointOptimizer,
    coupled_decay,
    device_of,
    is_plain_sgd,
    refuse_unsupported,
    take_plain_step,
    without_coupled_decay,
)


def made(cls: Any, **options: Any) -> Optimizer:
    optimizer: Optimizer = cls([nn.Parameter(torch.ones(2))], **options)
    return optimizer


def test_optimizers_that_cannot_take_an_injected_gradient_are_rejected() -> None:
    class Mine(torch.optim.Rprop):
        pass

    for cls in (torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.ASGD, torch.optim.Rprop, Mine):
        name = "Rprop" if cls is Mine else cls.__name__
        with pytest.raises(FederatedError, match=f"The local optimizer {name} is not supported: it .*Use SGD, Adam"):
            refuse_unsupported(made(cls), "The local optimizer")
    with pytest.raises(FederatedError, match=r"SGD\(maximize=True\) is not supported: negate the loss"):
        refuse_unsupported(made(torch.optim.SGD, lr=0.1, maximize=True), "The local optimizer")

    class LBFGS(torch.optim.SGD):
        """A user's optimizer with an unlucky name."""

    class Twice(torch.optim.SGD):
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            return closure()

    with pytest.raises(FederatedError, match=r"optimizer Twice is not supported: its step requires a closure"):
        refuse_unsupported(made(Twice, lr=0.1), "The local optimizer")

    class Sharpness(torch.optim.SGD):
        def first_step(self) -> None: ...

        def second_step(self) -> None: ...

        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return closure()

    with pytest.raises(FederatedError, match=r"Sharpness is not supported: its step requires a closure.*FedSAM"):
        refuse_unsupported(made(Sharpness, lr=0.1), "The local optimizer")
    for cls in (torch.optim.SGD, torch.optim.AdamW, LBFGS):
        refuse_unsupported(made(cls, lr=0.1), "The local optimizer")


def test_joint_optimizer_has_one_state_and_ordered_groups() -> None:
    def joint(lr: float) -> JointOptimizer:
        sgd = made(torch.optim.SGD, lr=lr, momentum=0.9, weight_decay=0.1)
        return JointOptimizer([sgd, made(torch.optim.AdamW, lr=2 * lr, weight_decay=0.3)])

    both, other = joint(0.1), joint(0.5)
    for part in both.parts:
        for p in part.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        part.step()
    assert [group["lr"] for group in both.param_groups] == [0.1, 0.2]
    assert [coupled_decay(both, group) for group in both.param_groups] == [0.1, 0.0]
    assert len(both.state) == 2
    other.load_state_dict(both.state_dict())
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.2]
    for mine, its in zip(other.param_groups, both.param_groups, strict=True):
        (p,), (q,) = mine["params"], its["params"]
        assert other.state[p].keys() == both.state[q].keys()
        assert all(
            torch.equal(torch.as_tensor(v), torch.as_tensor(both.state[q][k])) for k, v in other.state[p].items()
        )
    assert all(part.state is other.state for part in other.parts)
    other.state.clear()
    other.parts[0].step()


def test_only_sgd_without_momentum_is_plain() -> None:
    class Mine(torch.optim.SGD):
        pass

    assert is_plain_sgd(made(torch.optim.SGD, lr=0.1, weight_decay=0.1))
    for other in (made(torch.optim.SGD, lr=0.1, momentum=0.9), made(Mine, lr=0.1), made(torch.optim.Adam)):
        assert not is_plain_sgd(other)


def with_gradients(**options: Any) -> torch.optim.SGD:
    """Return SGD on three parameters in two groups. The last parameter has no gradient."""
    stream = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=stream)) for shape in ((300, 40), (7,), (3, 5))]
    for p in params[:2]:
        p.grad = torch.randn(p.shape, generator=stream)
    return torch.optim.SGD([{"params": params[:1]}, {"params": params[1:], "lr": 0.3}], lr=0.1, **options)


def values(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]


def test_single_call_plain_step_has_identical_bits() -> None:
    for options, has_decay in (({}, False), ({"foreach": True}, False), ({"weight_decay": 0.5}, True)):
        one, other = with_gradients(**options), with_gradients(**{**options, "weight_decay": 0.0})
        assert take_plain_step(one, has_decay=has_decay)
        other.step()
        for mine, its in zip(values(one), values(other), strict=True):
            assert torch.equal(mine, its)
    loss = one.param_groups[0]["params"][0].square().sum()
    assert take_plain_step(one, has_decay=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # autograd detects the step
        loss.backward()


@pytest.mark.parametrize(
    "options",
    [{"weight_decay": 0.1}, {"momentum": 0.9}, {"maximize": True}, {"fused": True}, {"lr": torch.tensor(0.1)}],
    ids=lambda options: next(iter(options)),
)
def test_steps_with_other_options_are_left_to_the_optimizer(options: dict[str, Any]) -> None:
    optimizer = with_gradients()
    optimizer.param_groups[1].update(options)
    before = values(optimizer)
    assert not take_plain_step(optimizer, has_decay=False)
    assert all(map(torch.equal, before, values(optimizer)))


def test_steps_with_hooks_or_overrides_are_left_to_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(torch.optim.SGD):
        pass

    assert not take_plain_step(made(Mine, lr=0.1), has_decay=False)
    for register in (Optimizer.register_step_pre_hook, Optimizer.register_step_post_hook):
        optimizer = with_gradients()
        handle = register(optimizer, lambda *_: None)
        assert not take_plain_step(optimizer, has_decay=False)
        handle.remove()
        assert take_plain_step(optimizer, has_decay=False)
    for register_for_all in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        handle = register_for_all(lambda *_: None)
        assert not take_plain_step(optimizer, has_decay=False)
        handle.remove()
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert take_plain_step(optimizer, has_decay=False)  # the scheduler only counts steps
    step = optimizer.step
    optimizer.step = functools.wraps(step)(lambda *args: step(*args))  # type: ignore[method-assign]
    assert not take_plain_step(optimizer, has_decay=False)
    monkeypatch.setattr(torch.optim.SGD, "step", lambda *_: None)
    assert not take_plain_step(with_gradients(), has_decay=False)


def test_plain_steps_are_visible_to_schedulers(recwarn: pytest.WarningsRecorder) -> None:
    optimizer = with_gradients()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert take_plain_step(optimizer, has_decay=False)
    scheduler.step()
    assert not recwarn.list


def test_decay_is_coupled_if_it_is_added_to_the_gradient() -> None:
    coupled = [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta]
    coupled += [torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam]
    for cls in [*coupled, torch.optim.AdamW]:
        optimizer = made(cls, lr=0.1, weight_decay=0.5)
        (group,) = optimizer.param_groups
        is_coupled = cls is not torch.optim.AdamW
        (parameter,) = group["params"]
        parameter.grad = torch.zeros(2)
        optimizer.step()
        seen = optimizer.state[parameter]
        moments = [value for value in seen.values() if isinstance(value, torch.Tensor) and value.shape == (2,)]
        assert any(bool(value.any()) for value in moments) == is_coupled or cls is torch.optim.SGD, cls
        assert coupled_decay(optimizer, group) == (0.5 if is_coupled else 0.0), cls

    class Lars(torch.optim.SGD):
        """Scales the gradient together with its decay, so the gradient must not contain the decay yet."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            pass

    class Plain(torch.optim.SGD):
        pass

    for cls, decay in ((Lars, 0.0), (Plain, 0.5)):
        optimizer = made(cls, lr=0.1, weight_decay=0.5)
        assert coupled_decay(optimizer, optimizer.param_groups[0]) == decay, cls
    decoupled = made(torch.optim.NAdam, lr=0.1, weight_decay=0.5, decoupled_weight_decay=True)
    assert coupled_decay(decoupled, decoupled.param_groups[0]) == 0.0


def test_step_counts_are_on_the_cpu_unless_fused_or_capturable() -> None:
    on_device = torch.empty(2, device="meta")
    assert device_of("exp_avg", on_device, {}).type == "meta"
    assert device_of("step", on_device, {"fused": None, "capturable": False}).type == "cpu"
    for name in ("fused", "capturable"):
        assert device_of("step", on_device, {name: True}).type == "meta"


def test_coupled_decay_is_off_inside_and_restored_after_an_error() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(1))], "weight_decay": decay} for decay in (0.5, 0.0, 0.25)]
    optimizer = torch.optim.SGD(groups, lr=0.1)

    def fail_inside() -> None:
        with without_coupled_decay(optimizer):
            assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.0, 0.0]
            raise RuntimeError("now")

    with pytest.raises(RuntimeError, match="now"):
        fail_inside()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0, 0.25]
    adamw = made(torch.optim.AdamW, weight_decay=0.5)
    with without_coupled_decay(adamw):
        assert adamw.param_groups[0]["weight_decay"] == 0.5
