"""Cross-entropy of several clients goes through PyTorch's kernels, and gives the same bits as vmap's own operations."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.func import vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_fed.engines.simplify import simplify
from lightning_fed.engines.stacked_losses import use_nll_kernels

aten = torch.ops.aten
CLIENTS, EXAMPLES, CLASSES = 3, 5, 4
Loss = Callable[[Tensor, Tensor], Tensor]


def stacked(loss: Loss) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """Return losses and gradients by the scores, of several clients."""

    def of_one(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        found, pull_back = vjp(lambda s: loss(s, targets), scores)
        return found, pull_back(torch.ones_like(found))[0]

    return lambda scores, targets: list(vmap(of_one)(scores, targets))


def traced(function: Callable[..., Any], *tensors: Tensor) -> fx.GraphModule:
    module = make_fx(function)(*tensors)
    simplify(module)
    module.recompile()
    return module


def rewritten(module: fx.GraphModule) -> set[Any]:
    """Rewrite a trace, and return the operators it is made of then."""
    use_nll_kernels(module.graph)
    module.graph.lint()
    module.recompile()
    return {node.target for node in module.graph.nodes}


def batch(ignored: Sequence[tuple[int, int]] = (), value: int = -100) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(0)
    targets = torch.randint(CLASSES, (CLIENTS, EXAMPLES), generator=stream)
    for at in ignored:
        targets[at] = value
    return torch.randn(CLIENTS, EXAMPLES, CLASSES, generator=stream), targets


SOME = [(0, 1), (2, 0), (2, 3)]
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0])
ONE_CLIENT = [(1, i) for i in range(EXAMPLES)]  # whose mean is 0 / 0


@pytest.mark.parametrize(
    ("loss", "ignored", "value"),
    [
        (F.cross_entropy, [], -100),
        (F.cross_entropy, SOME, -100),
        (F.cross_entropy, ONE_CLIENT, -100),
        (lambda s, t: F.cross_entropy(s, t, ignore_index=2), [], -100),
        (lambda s, t: F.cross_entropy(s, t, ignore_index=-1), SOME, -1),
        (lambda s, t: F.cross_entropy(s, t, reduction="sum"), SOME, -100),
        (lambda s, t: F.cross_entropy(s, t, reduction="none").square().mean(), SOME, -100),
        (lambda s, t: F.nll_loss(F.log_softmax(3.0 * s, -1), t) + s.square().mean(), SOME, -100),
        (lambda s, t: F.cross_entropy(s, t) + 0.5 * F.cross_entropy(2.0 * s, t), SOME, -100),
        (lambda s, t: F.cross_entropy(s, t) + F.cross_entropy(s, t.flip(0)), SOME, -100),
    ],
)
def test_kernels_give_the_same_bits(loss: Loss, ignored: Any, value: int) -> None:
    given = batch(ignored, value)
    module = traced(stacked(loss), *given)
    expected = module(*given)
    found = rewritten(module)
    assert {aten.nll_loss_forward.default, aten.nll_loss_backward.default} <= found
    assert not {aten.gather.default, aten.scatter.value} & found
    for ours, theirs in zip(module(*given), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "loss",
    [
        lambda s, t: F.cross_entropy(s, t, weight=WEIGHTS),
        lambda s, t: F.cross_entropy(s, t) + F.cross_entropy(s, t, weight=WEIGHTS),
        lambda s, t: F.cross_entropy(s, t, label_smoothing=0.1),
        lambda s, t: F.cross_entropy(s, t, weight=WEIGHTS, label_smoothing=0.1),
    ],
)
def test_class_weights_and_smoothing_give_the_same_bits(loss: Loss) -> None:
    given = batch(SOME)
    module = traced(stacked(loss), *given)
    expected = module(*given)
    rewritten(module)
    for ours, theirs in zip(module(*given), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(
    "loss",
    [
        lambda s, t: F.cross_entropy(s.t()[None], t[None]),  # classes in another dimension
        lambda s, t: F.cross_entropy(s, t.to(torch.float32)[:, None].expand(-1, CLASSES).softmax(1)),
        lambda s, t: s.gather(1, t.abs()[:, None] % CLASSES).mean(),
        lambda s, t: -torch.where(t != -100, s.gather(1, t.clamp(min=0)[:, None])[:, 0], 0.0).mean(),
    ],
)
def test_what_is_no_plain_negative_log_likelihood_is_left_as_it_is(loss: Loss) -> None:
    given = batch(SOME)
    module = traced(stacked(loss), *given)
    expected, before = module(*given), len(module.graph.nodes)
    assert aten.nll_loss_forward.default not in rewritten(module)
    assert len(module.graph.nodes) == before
    for ours, theirs in zip(module(*given), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "change",
    [
        lambda node: node.target is aten.scatter.value and node.update_arg(3, -2.0),
        lambda node: node.target is aten.scatter.value and node.update_arg(1, 1),
        lambda node: node.target is aten.gather.default and node.update_arg(1, 1),
        lambda node: node.target is aten.squeeze.dims and node.update_arg(1, [1]),
        lambda node: node.target is aten.ne.Scalar and node.update_arg(1, -99),
        lambda node: node.target is aten.neg.default and setattr(node, "target", aten.abs.default),
        lambda node: node.target is aten.zeros_like.default and setattr(node, "target", aten.ones_like.default),
    ],
)
def test_every_part_of_the_pattern_is_looked_at(change: Callable[[Any], Any]) -> None:
    """A graph that differs in one operator is another function, and must not become the kernel's."""
    module = traced(stacked(F.cross_entropy), *batch())
    changed = next(node for node in module.graph.nodes if change(node) is not False)
    rewritten(module)
    assert changed in module.graph.nodes
