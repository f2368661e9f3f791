"""Cross-entropies in traces of several clients are kernels, with the same bits as PyTorch's decomposition."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.func import grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_fed.tracing.cross_entropy import restore_cross_entropy
from lightning_fed.tracing.passes import generalize, simplify
from tests.helpers.selection import covering

Loss = Callable[[Tensor, Tensor], Tensor]

CLASSES = 5
WEIGHT = torch.arange(1.0, CLASSES + 1)
FORWARD = (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default)
BACKWARD = (torch.ops.aten.nll_loss_backward.default, torch.ops.aten.nll_loss2d_backward.default)


def given(shape: tuple[int, ...], count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return scores and classes of so many clients; one class is -100, and another one 2."""
    stream = torch.Generator().manual_seed(count)
    scores = torch.randn(count, *shape, generator=stream, dtype=torch.float64).to(dtype)
    classes = torch.randint(CLASSES, (count, shape[0], *shape[2:]), generator=stream)
    flat = classes.view(-1)
    flat[0], flat[1] = -100, 2
    return scores, classes


def traced(loss: Loss, scores: Tensor, classes: Tensor) -> fx.GraphModule:
    """Return the trace of all clients' gradients and losses."""
    module = make_fx(lambda *tensors: list(vmap(grad_and_value(loss))(*tensors)))(scores, classes)
    simplify(module)
    return module


def restored(loss: Loss, scores: Tensor, classes: Tensor) -> tuple[fx.GraphModule, int, int]:
    """Return the trace with its numbers of forward and backward kernels."""
    module = traced(loss, scores, classes)
    restore_cross_entropy(module)
    module.graph.lint()
    module.recompile()
    targets = [node.target for node in module.graph.nodes]
    return module, sum(t in FORWARD for t in targets), sum(t in BACKWARD for t in targets)


LOSSES: dict[str, Loss] = {
    "mean": F.cross_entropy,
    "sum": lambda s, c: F.cross_entropy(s, c, reduction="sum"),
    "of each example": lambda s, c: (F.cross_entropy(s, c, reduction="none") ** 2).mean(),
    "another ignored class": lambda s, c: F.cross_entropy(s, c.clamp(0), ignore_index=2),
    "of log probabilities": lambda s, c: F.nll_loss(F.log_softmax(s, 1), c),
    "two losses": lambda s, c: F.cross_entropy(s, c) + F.cross_entropy(2 * s, c),
}
SHAPES = {"examples": (6, CLASSES), "sequences": (3, CLASSES, 4), "pictures": (2, CLASSES, 3, 4)}


@pytest.mark.parametrize(("name", "shape"), covering([*LOSSES], [*SHAPES]))
def test_a_cross_entropy_is_one_kernel_per_pass_with_the_same_bits(name: str, shape: str) -> None:
    tensors, expected = given(SHAPES[shape], 3), 2 if name == "two losses" else 1
    module, forward, backward = restored(LOSSES[name], *tensors)
    assert (forward, backward) == (expected, expected)
    before = traced(LOSSES[name], *tensors)
    for found, same in zip(module(*tensors), before(*tensors), strict=True):
        assert torch.equal(found, same)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_precisions_have_the_same_bits(dtype: torch.dtype) -> None:
    tensors = given((6, CLASSES), 3, dtype)
    module, forward, backward = restored(F.cross_entropy, *tensors)
    assert (forward, backward) == (1, 1)
    for found, same in zip(module(*tensors), traced(F.cross_entropy, *tensors)(*tensors), strict=True):
        assert found.dtype == same.dtype
        assert torch.equal(found, same)


def test_a_client_whose_classes_are_all_ignored_has_the_module_s_own_gradient() -> None:
    scores, classes = given((6, CLASSES), 3)
    classes[1] = -100
    module, _, _ = restored(F.cross_entropy, scores, classes)
    gradients, losses = module(scores, classes)
    assert losses[1].isnan()
    assert (gradients[1] == 0).all()
    assert losses[[0, 2]].isfinite().all()


@pytest.mark.thorough
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernels_take_any_number_of_clients(shape: str) -> None:
    modules = [restored(F.cross_entropy, *given(SHAPES[shape], count))[0] for count in (5, 7)]
    assert generalize([[module.graph for module in modules]], modules)
    modules[0].recompile()
    for count in (1, 2, 5, 12):
        tensors = given(SHAPES[shape], count)
        for found, same in zip(modules[0](*tensors), traced(F.cross_entropy, *tensors)(*tensors), strict=True):
            assert torch.equal(found, same)


OTHERS: dict[str, tuple[Any, int]] = {
    "weights of classes": (lambda s, c: F.cross_entropy(s, c, weight=WEIGHT, reduction="sum"), 1),
    "smoothed labels": (lambda s, c: F.cross_entropy(s, c, label_smoothing=0.1), 0),
    "probabilities": (lambda s, c: F.cross_entropy(s, (c[:, None] == torch.arange(CLASSES)) * 1.0), 0),
    "an own gather": (lambda s, c: -s.log_softmax(1).gather(1, c.clamp(0)[:, None]).mean(), 0),
    "an own mask of another class": (
        lambda s, c: torch.where(
            c != 1, -s.log_softmax(1).gather(1, torch.where(c != -100, c, 0)[:, None])[:, 0], 0
        ).mean(),
        0,
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_losses_keep_their_numbers(name: str) -> None:
    loss, forward = OTHERS[name]
    tensors = given((6, CLASSES), 3)
    module, found, _ = restored(loss, *tensors)
    assert found == forward
    for one, same in zip(module(*tensors), traced(loss, *tensors)(*tensors), strict=True):
        assert torch.equal(one, same)
