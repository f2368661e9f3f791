"""A traced local step, split into work done once, in-place updates of the parameters, and delayed updates."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_fed.tracing.in_place import SplitGraph, split_graph
from lightning_fed.tracing.passes import simplify

W, B = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
X = torch.randn(5, 4, dtype=torch.float64)
C = [torch.randn(3, 4, dtype=torch.float64), torch.randn(3, dtype=torch.float64)]
RATE = -0.1


def split(function: Callable[..., list[Tensor]], constants: Sequence[Tensor] = ()) -> tuple[SplitGraph, fx.GraphModule]:
    module = make_fx(function)(W, B, X, *constants)
    simplify(module)
    graphs = split_graph(module, 2, len(constants))
    assert graphs is not None
    return graphs, module


def moved(function: Callable[..., list[Tensor]], constants: Sequence[Tensor] = ()) -> list[Tensor]:
    """Take one step through the graphs."""
    graphs, module = split(function, constants)
    out = fx.GraphModule(module, graphs.once)(*constants)
    w, b = W.clone(), B.clone()
    fx.GraphModule(module, graphs.call)(w, b, X, *out[2:], RATE)
    for parameter, total in zip((w, b), out[:2], strict=True):
        if total is not None:
            parameter.add_(total, alpha=RATE)
    return [w, b]


def forward(w: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of half the squared output of a linear layer."""
    z = torch.addmm(b, x, w.t())
    return z.t() @ x, z.sum(0)


def plain(w: Tensor, b: Tensor, x: Tensor) -> list[Tensor]:
    return [*forward(w, b, x), b.sum()]


def svrg(w: Tensor, b: Tensor, x: Tensor, c: Tensor, d: Tensor) -> list[Tensor]:
    at_c = forward(c, d, x)
    return [g - a + 0.5 * e for g, a, e in zip(forward(w, b, x), at_c, (c, d), strict=True)]


def proximal(w: Tensor, b: Tensor, x: Tensor, c: Tensor, d: Tensor) -> list[Tensor]:
    return [g + 0.3 * (y - e) for g, y, e in zip(forward(w, b, x), (w, b), (c, d), strict=True)]


def scaled(w: Tensor, b: Tensor, x: Tensor, c: Tensor, d: Tensor) -> list[Tensor]:
    return [-(g / 4.0 - c.sum() * g) for g in forward(w, b, x)]


def decayed_twice(w: Tensor, b: Tensor, x: Tensor) -> list[Tensor]:
    return [(g + 0.1 * y) * 2.0 + y for g, y in zip(forward(w, b, x), (w, b), strict=True)]


def entangled(w: Tensor, b: Tensor, x: Tensor) -> list[Tensor]:
    g, h = forward(w, b, x)
    return [g + b[:, None].expand(3, 4), h + w[:, 0]]


def broadcast(w: Tensor, b: Tensor, x: Tensor, c: Tensor, d: Tensor) -> list[Tensor]:
    g, h = forward(w, b, x)
    return [g + d[:, None], h + h.mean()]


@pytest.mark.parametrize(
    ("function", "constants"),
    [(plain, []), (svrg, C), (proximal, C), (scaled, C), (decayed_twice, []), (entangled, []), (broadcast, C)],
)
def test_parameters_move_along_the_base_directions(
    function: Callable[..., list[Tensor]], constants: list[Tensor]
) -> None:
    directions = function(W, B, X, *constants)
    expected = [W + RATE * directions[0], B + RATE * directions[1]]
    for found, wanted in zip(moved(function, constants), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)


def targets(graph: fx.Graph) -> list[str]:
    return [str(node.target).removeprefix("aten.") for node in graph.nodes if node.op == "call_function"]


def test_products_are_fused_and_constants_are_computed_once() -> None:
    graphs, _ = split(svrg, C)
    step = targets(graphs.call)
    assert step.count("addmm_.default") == 1
    assert "mm.default" not in step
    assert "sub.Tensor" not in step
    assert "mul.Tensor" in targets(graphs.once)


def test_parameter_scaling_is_fused_into_the_product() -> None:
    graphs, _ = split(decayed_twice)
    step = targets(graphs.call)
    assert step.count("mul_.Tensor") == 1  # for the bias, since its gradient is not a product
    assert "mul.Tensor" not in step


def test_graph_that_writes_to_constants_is_not_split() -> None:
    def writes(w: Tensor, b: Tensor, x: Tensor, c: Tensor, d: Tensor) -> list[Tensor]:
        return [*forward(w, b, x), (c + 1.0).add_(d[:, None])]

    module = make_fx(writes)(W, B, X, *C)
    assert split_graph(module, 2, 2) is None


def test_gradients_that_share_an_input_use_one_product() -> None:
    graphs, _ = split(svrg, C)
    assert sum(node.target is torch.ops.aten.addmm_.default for node in graphs.call.nodes) == 1

    def other_side(w: Tensor, b: Tensor, x: Tensor) -> list[Tensor]:
        z = torch.addmm(b, x, w.t())
        return [2.0 * (z.t() @ x) - 0.5 * (z.t() @ x.square()) + 3.0 * (z.relu().t() @ x), z.sum(0)]

    graphs, _ = split(other_side)  # the first two share their left side, but not with the third
    assert sum(node.target is torch.ops.aten.addmm_.default for node in graphs.call.nodes) == 2
    for found, start, direction in zip(moved(other_side), (W, B), other_side(W, B, X), strict=True):
        torch.testing.assert_close(found, start + RATE * direction, rtol=1e-12, atol=1e-12)


def test_logged_parameter_is_read_before_its_update() -> None:
    def logs(w: Tensor, b: Tensor, x: Tensor) -> list[Tensor]:
        return [*forward(w, b, x), b.sum(), b, w[0].detach(), w.view(-1)]

    graphs, module = split(logs)
    w, b = W.clone(), B.clone()
    found = fx.GraphModule(module, graphs.call)(w, b, X, RATE)
    assert not torch.equal(w, W)
    for value, expected in zip(found, (B.sum(), B, W[0], W.view(-1)), strict=True):
        assert torch.equal(value, expected)


def test_repeated_computations_are_merged() -> None:
    def twice(x: Tensor, y: Tensor) -> list[Tensor]:
        ones = torch.ones_like(x.sum()) * 1
        same = [(x * y).exp() + 1, (x * y).exp() + 1.0, (x * y).exp() + ones]
        return [*same, x.clone() + x.view(3, 4).detach(), torch.where(x > 0, x, torch.tensor(0.0, dtype=x.dtype))]

    x, y = torch.randn(2, 3, 4, dtype=torch.float64)
    module = make_fx(twice)(x, y)
    expected = twice(x, y)
    simplify(module)
    module.recompile()
    targets = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert targets.count(torch.ops.aten.exp.default) == targets.count(torch.ops.aten.mul.Tensor) == 1
    assert torch.ops.aten.ones_like.default not in targets
    assert all(torch.equal(a, b) for a, b in zip(module(x, y), expected, strict=True))


def test_trace_with_in_place_writes_keeps_its_copies() -> None:
    def writes(x: Tensor) -> list[Tensor]:
        before, kept = x.exp().clone(), x.exp()
        return [kept.add_(1.0), x.exp(), before]

    x = torch.randn(4)
    module = make_fx(writes)(x)
    simplify(module)
    module.recompile()
    assert all(torch.equal(a, b) for a, b in zip(module(x), writes(x), strict=True))
