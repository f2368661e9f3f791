"""Graphs recorded with several numbers of clients accept any number of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.func import grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_fed.tracing.passes import generalize, restore_cross_entropy, simplify
from tests.helpers.selection import covering

Function = Callable[[Tensor, Tensor, Tensor], Any]


def given(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights, inputs and targets of ``count`` clients."""
    stream = torch.Generator().manual_seed(count)
    weights, inputs = (torch.randn(count, *shape, generator=stream) for shape in ((3, 4), (6, 4)))
    return weights, inputs, torch.randint(3, (count, 6), generator=stream)


def traced(function: Function, count: int) -> fx.GraphModule:
    module = make_fx(lambda *tensors: [function(*tensors)])(*given(count))
    simplify(module)
    return module


def takes_any(function: Function) -> tuple[bool, fx.GraphModule]:
    one, other = traced(function, 5), traced(function, 7)
    found = generalize([(one.graph, other.graph)], (one, other))
    one.graph.lint()
    one.recompile()
    return found, one


def losses(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return vmap(lambda w, x, y: F.cross_entropy(x @ w.t(), y))(w, x, y)


STACKED: dict[str, Function] = {
    "a loss of each": losses,
    "a view": lambda w, x, y: x.view(len(x) * 6, 4) * 2.0,
    "twice as many rows": lambda w, x, y: torch.cat((x, x)).view(2 * len(x), 24),
    "an expanded row": lambda w, x, y: w[:1].expand(len(w), 3, 4) + 1.0,
    "a number of rows": lambda w, x, y: torch.zeros(len(w), 5) + torch.arange(len(w))[:, None],
    "as a keyword": lambda w, x, y: x.sum(0, keepdim=True).repeat(len(x), 1, 1),
    "a mean over clients": lambda w, x, y: w.sum(0) / len(w),
    "no number at all": lambda w, x, y: torch.relu(w),
    "a constant of its size": lambda w, x, y: w * 5.0 + 7.0,
}


@pytest.mark.parametrize("name", STACKED)
def test_graph_generalizes_to_any_number_of_clients(name: str) -> None:
    found, module = takes_any(STACKED[name])
    assert found
    for count in (2, 3, 5, 6, 7, 12):
        assert torch.equal(module(*given(count))[0], STACKED[name](*given(count)))


HELD = {n: torch.randn(abs(n) if n < 0 else 1, 3, 4) for n in (5, 7, -5, -7)}


def difference(one: Tensor, other: Tensor, in_order: bool) -> Tensor:
    return one - other if in_order else other - one


NOT: dict[str, Function] = {
    "the number squared": lambda w, x, y: torch.zeros(len(w) ** 2) + w.sum(),
    "one more": lambda w, x, y: torch.zeros(len(w) + 1) + w.sum(),
    "no multiple": lambda w, x, y: torch.zeros(min(len(w) + 1, 7)) + w.sum(),
    "another operator": lambda w, x, y: w.exp() if len(w) == 5 else w.sin(),
    "more operators": lambda w, x, y: w.exp() if len(w) == 5 else w.exp() + 1.0,
    "another number": lambda w, x, y: w * (2.0 if len(w) == 5 else 3.0),
    "another input": lambda w, x, y: torch.relu(w[:, 0] if len(w) == 5 else w[:, 1]),
    "other operands": lambda w, x, y: difference(w.exp(), w.sin(), len(w) == 5),
    "another constant": lambda w, x, y: w + HELD[len(w)],
    "a constant of another size": lambda w, x, y: w + HELD[-len(w)],
}


@pytest.mark.parametrize("name", NOT)
def test_graphs_with_other_differences_are_not_generalized(name: str) -> None:
    before = traced(NOT[name], 5)
    found, module = takes_any(NOT[name])
    assert not found
    assert [(n.target, str(n.args)) for n in module.graph.nodes] == [
        (n.target, str(n.args)) for n in before.graph.nodes
    ]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda w, x, y: torch.zeros(2 * len(w)) + w.sum(), True),
        (lambda w, x, y: torch.zeros({5: 10, 7: 14, 3: 9}[len(w)]) + w.sum(), False),
        (lambda w, x, y: w.exp() if len(w) > 3 else w.sin(), False),
    ],
    ids=["a multiple", "another multiple", "another operator"],
)
def test_third_client_count_must_agree(function: Function, expected: bool) -> None:
    modules = [traced(function, count) for count in (5, 7, 3)]
    before = str(modules[0].graph)
    assert generalize([[module.graph for module in modules]], modules) is expected
    assert (str(modules[0].graph) != before) is expected


def test_graphs_are_generalized_all_or_none() -> None:
    one, other = traced(STACKED["a view"], 5), traced(STACKED["a view"], 7)
    first, second = traced(NOT["one more"], 5), traced(NOT["one more"], 7)
    before = str(one.graph)
    assert not generalize([(one.graph, other.graph), (first.graph, second.graph)], (one, other))
    assert str(one.graph) == before


def test_equal_operations_are_merged_but_random_draws_are_not() -> None:
    module = make_fx(lambda x: [torch.rand_like(x) + torch.rand_like(x), x.sin() + x.sin()])(torch.ones(3))
    simplify(module)
    sums = [node.args for node in module.graph.nodes if node.target is torch.ops.aten.add.Tensor]
    assert [first is second for first, second in sums] == [False, True]


# ------------------------------------------------------------------ cross-entropies

Loss = Callable[[Tensor, Tensor], Tensor]

CLASSES = 5
WEIGHT = torch.arange(1.0, CLASSES + 1)
FORWARD = (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default)
BACKWARD = (torch.ops.aten.nll_loss_backward.default, torch.ops.aten.nll_loss2d_backward.default)


def scored(shape: tuple[int, ...], count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return scores and classes of ``count`` clients. One class is -100, and another one 2."""
    stream = torch.Generator().manual_seed(count)
    scores = torch.randn(count, *shape, generator=stream, dtype=torch.float64).to(dtype)
    classes = torch.randint(CLASSES, (count, shape[0], *shape[2:]), generator=stream)
    flat = classes.view(-1)
    flat[0], flat[1] = -100, 2
    return scores, classes


def traced_loss(loss: Loss, scores: Tensor, classes: Tensor) -> fx.GraphModule:
    """Return the trace of all clients' gradients and losses."""
    module = make_fx(lambda *tensors: list(vmap(grad_and_value(loss))(*tensors)))(scores, classes)
    simplify(module)
    return module


def restored(loss: Loss, scores: Tensor, classes: Tensor) -> tuple[fx.GraphModule, int, int]:
    """Return the trace with restored kernels, and its numbers of forward and backward kernels."""
    module = traced_loss(loss, scores, classes)
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
def test_cross_entropy_uses_one_kernel_per_pass_and_identical_bits(name: str, shape: str) -> None:
    tensors, expected = scored(SHAPES[shape], 3), 2 if name == "two losses" else 1
    module, forward, backward = restored(LOSSES[name], *tensors)
    assert (forward, backward) == (expected, expected)
    before = traced_loss(LOSSES[name], *tensors)
    for found, same in zip(module(*tensors), before(*tensors), strict=True):
        assert torch.equal(found, same)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_cross_entropy_in_other_precisions_has_identical_bits(dtype: torch.dtype) -> None:
    tensors = scored((6, CLASSES), 3, dtype)
    module, forward, backward = restored(F.cross_entropy, *tensors)
    assert (forward, backward) == (1, 1)
    for found, same in zip(module(*tensors), traced_loss(F.cross_entropy, *tensors)(*tensors), strict=True):
        assert found.dtype == same.dtype
        assert torch.equal(found, same)


def test_client_with_only_ignored_classes_has_zero_gradient() -> None:
    scores, classes = scored((6, CLASSES), 3)
    classes[1] = -100
    module, _, _ = restored(F.cross_entropy, scores, classes)
    gradients, losses = module(scores, classes)
    assert losses[1].isnan()
    assert (gradients[1] == 0).all()
    assert losses[[0, 2]].isfinite().all()


@pytest.mark.thorough
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_support_any_number_of_clients(shape: str) -> None:
    modules = [restored(F.cross_entropy, *scored(SHAPES[shape], count))[0] for count in (5, 7)]
    assert generalize([[module.graph for module in modules]], modules)
    modules[0].recompile()
    for count in (1, 2, 5, 12):
        tensors = scored(SHAPES[shape], count)
        for found, same in zip(modules[0](*tensors), traced_loss(F.cross_entropy, *tensors)(*tensors), strict=True):
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
def test_other_losses_keep_identical_bits(name: str) -> None:
    loss, forward = OTHERS[name]
    tensors = scored((6, CLASSES), 3)
    module, found, _ = restored(loss, *tensors)
    assert found == forward
    for one, same in zip(module(*tensors), traced_loss(loss, *tensors)(*tensors), strict=True):
        assert torch.equal(one, same)
