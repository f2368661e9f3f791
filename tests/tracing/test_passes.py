"""Graphs made with several numbers of clients take any number of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_fed.tracing.passes import generalize, simplify

Function = Callable[[Tensor, Tensor, Tensor], Any]


def given(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights, inputs and targets of so many clients."""
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
def test_a_graph_takes_any_number(name: str) -> None:
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
def test_a_graph_that_differs_in_anything_else_stays_as_it_is(name: str) -> None:
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
def test_a_third_number_has_to_agree(function: Function, expected: bool) -> None:
    modules = [traced(function, count) for count in (5, 7, 3)]
    before = str(modules[0].graph)
    assert generalize([[module.graph for module in modules]], modules) is expected
    assert (str(modules[0].graph) != before) is expected


def test_of_two_graphs_both_or_none_are_changed() -> None:
    one, other = traced(STACKED["a view"], 5), traced(STACKED["a view"], 7)
    first, second = traced(NOT["one more"], 5), traced(NOT["one more"], 7)
    before = str(one.graph)
    assert not generalize([(one.graph, other.graph), (first.graph, second.graph)], (one, other))
    assert str(one.graph) == before


def test_equal_operations_are_done_once_but_numbers_are_drawn_twice() -> None:
    module = make_fx(lambda x: [torch.rand_like(x) + torch.rand_like(x), x.sin() + x.sin()])(torch.ones(3))
    simplify(module)
    sums = [node.args for node in module.graph.nodes if node.target is torch.ops.aten.add.Tensor]
    assert [first is second for first, second in sums] == [False, True]
