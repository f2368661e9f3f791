"""What is known of the optimizers of ``torch.optim``."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.torch_optimizers import coupled_decay, is_plain_sgd, refuse_unsupported, without_coupled_decay


def made(cls: Any, **options: Any) -> Optimizer:
    optimizer: Optimizer = cls([nn.Parameter(torch.ones(2))], **options)
    return optimizer


def test_optimizers_that_cannot_take_an_injected_gradient_are_refused_by_name() -> None:
    class Mine(torch.optim.Rprop):
        pass

    for cls in (torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.ASGD, torch.optim.Rprop, Mine):
        name = "Rprop" if cls is Mine else cls.__name__
        with pytest.raises(FederatedError, match=f"The local optimizer {name} is not supported: it .*Use SGD, Adam"):
            refuse_unsupported(made(cls), "The local optimizer")
    with pytest.raises(FederatedError, match=r"SGD\(maximize=True\) is not supported: negate the loss"):
        refuse_unsupported(made(torch.optim.SGD, lr=0.1, maximize=True), "The local optimizer")

    class LBFGS(torch.optim.SGD):
        """The user's own, of an unlucky name."""

    for cls in (torch.optim.SGD, torch.optim.AdamW, LBFGS):
        refuse_unsupported(made(cls, lr=0.1), "The local optimizer")


def test_only_sgd_without_momentum_is_plain() -> None:
    class Mine(torch.optim.SGD):
        pass

    assert is_plain_sgd(made(torch.optim.SGD, lr=0.1, weight_decay=0.1))
    for other in (made(torch.optim.SGD, lr=0.1, momentum=0.9), made(Mine, lr=0.1), made(torch.optim.Adam)):
        assert not is_plain_sgd(other)


def test_decay_is_coupled_where_it_is_added_to_the_gradient() -> None:
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
    decoupled = made(torch.optim.NAdam, lr=0.1, weight_decay=0.5, decoupled_weight_decay=True)
    assert coupled_decay(decoupled, decoupled.param_groups[0]) == 0.0


def test_coupled_decay_is_off_inside_and_back_after_an_error() -> None:
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
