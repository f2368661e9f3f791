"""Rewrites of traced local steps: what is the same for every step is done once, products go into the parameters."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from lightning_fed.tracing.passes import erase_unused, root, shape_of, writes

__all__ = ["StepGraphs", "same", "split_step", "use_bindings"]

_aten = torch.ops.aten


_BOUND: dict[Any, Any] = {
    _aten.t.default: torch.t,
    _aten.transpose.int: torch.transpose,
    _aten.unsqueeze.default: torch.unsqueeze,
    _aten.squeeze.dims: torch.squeeze,
    _aten.gather.default: torch.gather,
    _aten.scatter.value: torch.scatter,
    _aten.where.self: torch.where,
    _aten.ne.Scalar: torch.ne,
    _aten.neg.default: torch.neg,
    _aten.mm.default: torch.mm,
    _aten.bmm.default: torch.bmm,
    _aten.addmm.default: torch.addmm,
    _aten.relu.default: torch.relu,
    _aten._log_softmax.default: torch._log_softmax,
    _aten._log_softmax_backward_data.default: torch._log_softmax_backward_data,
    _aten.sum.dim_IntList: torch.sum,
    _aten.view.default: Tensor.view,
    _aten.full.default: torch.full,
    _aten.add.Tensor: torch.add,
    _aten.sub.Tensor: torch.sub,
    _aten.mul.Tensor: torch.mul,
    _aten.div.Tensor: torch.div,
    _aten.add_.Tensor: Tensor.add_,
    _aten.mul_.Tensor: Tensor.mul_,
    _aten.addmm_.default: Tensor.addmm_,
    _aten.baddbmm_.default: Tensor.baddbmm_,
}


def use_bindings(graph: fx.Graph) -> None:
    """Call operators through PyTorch's Python bindings where they have one: half a microsecond less a call."""
    for node in graph.nodes:
        node.target = _BOUND.get(node.target, node.target) if node.op == "call_function" else node.target


def same(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    """Whether two traces do the same, so that the sizes they were made with are not part of them."""
    nodes = [list(module.graph.nodes) for module in (one, other)]
    places = [{node: i for i, node in enumerate(part)} for part in nodes]

    def is_same(a: fx.Node, b: fx.Node) -> bool:
        if a.op == b.op == "placeholder":
            return True
        if a.op == b.op == "get_attr":  # frozen parameters, and numbers that Python made
            found = [getattr(module, str(n.target)) for module, n in ((one, a), (other, b))]
            return found[0] is found[1] or torch.equal(*found)
        spelled = [
            (n.op, n.target, fx.map_arg((n.args, n.kwargs), lambda m: f"%{place[m]}"))  # noqa: B023
            for n, place in zip((a, b), places, strict=True)
        ]
        return spelled[0] == spelled[1]

    return len(nodes[0]) == len(nodes[1]) and all(is_same(a, b) for a, b in zip(*nodes, strict=True))


@dataclass
class StepGraphs:
    """A local step as two graphs.

    Attributes:
        once: From the constants to what depends on nothing else: for every parameter the constant part of its
            direction (None if there is none), then what ``step`` needs beside.
        step: From parameters, batch, that, and the factor of the step to what is not a direction; the parameters have
            moved along their directions, but for the constant parts.
        has_sum: Whether there are constant parts.
    """

    once: fx.Graph
    step: fx.Graph
    has_sum: bool


def split_step(graph: fx.Graph, count: int, constants: int) -> StepGraphs | None:
    """Let a graph move its first inputs along its first outputs, instead of returning these.

    A direction is taken apart into its terms, as far as it is a sum. What depends on constants alone is left to a graph
    that is run once for all steps. A term that is a product of matrices is never formed: the product is added to the
    parameter. A multiple of the parameter itself scales it.

    Args:
        graph: A graph whose first ``count`` inputs are parameters and whose first outputs are their directions.
        count: The number of parameters.
        constants: The number of its last inputs that stay as they are from step to step.

    Returns:
        None if the graph writes to something that depends on constants alone.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    fixed = _constant(graph, inputs[len(inputs) - constants :])
    if any(writes(node) and any(a in fixed for a in node.all_input_nodes) for node in graph.nodes):
        return None
    once, copies = _copied(fixed)  # before anything is erased
    (output,) = (node for node in graph.nodes if node.op == "output")
    with graph.inserting_before(output):  # a parameter that is logged is as it is before the step
        for node in {n for n in output.args[0][count:] if root(n) in inputs[:count]}:
            node.replace_all_uses_with(graph.call_function(_aten.clone.default, (node,)), lambda user: user is output)
    directions, rest = output.args[0][:count], output.args[0][count:]
    sums = [_Sum(p, d, fixed) for p, d in zip(inputs[:count], directions, strict=True)]
    with graph.inserting_after(inputs[-1]):
        factor = graph.placeholder("factor")
    with graph.inserting_before(output):
        for each in sums:  # all that looks at a parameter comes before the first one changes
            each.terms = [
                (c, graph.call_function(_aten.clone.default, (n,)) if root(n) in inputs[:count] else n)
                for c, n in each.terms
            ]
        for each in sums:
            _Update(graph, factor, inputs[:count]).emit(each)
    output.args = (list(rest),)
    erase_unused(graph)
    needed = [node for node in fixed if any(user not in fixed for user in node.users)]
    with graph.inserting_before(factor):
        for node in needed:
            stand_in = graph.placeholder(f"once_{node.name}")
            stand_in.meta = dict(node.meta)
            node.replace_all_uses_with(stand_in, delete_user_cb=lambda user: user not in fixed)
    once.output([*(_added(once, each.fixed, copies) for each in sums), *(copies[node] for node in needed)])
    once.eliminate_dead_code()
    erase_unused(graph)
    for node in inputs[len(inputs) - constants :]:
        graph.erase_node(node)
    return StepGraphs(once, graph, any(each.fixed for each in sums))


def _constant(graph: fx.Graph, inputs: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """Return what depends on some of the inputs alone, in order."""
    found = dict.fromkeys(inputs)
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node.op == "call_function" and sources and all(source in found for source in sources):
            found[node] = None
    return found


@dataclass
class _Sum:
    """A direction as a sum.

    Attributes:
        parameter: What moves along it.
        own: How many times the parameter itself is in it.
        fixed: Its constant terms, each with a factor.
        terms: The others.
    """

    parameter: fx.Node
    own: float
    fixed: list[tuple[float, fx.Node]] = field(default_factory=list)
    terms: list[tuple[float, fx.Node]] = field(default_factory=list)

    def __init__(self, parameter: fx.Node, direction: fx.Node, constant: dict[fx.Node, None]) -> None:
        self.parameter, self.own, self.fixed, self.terms = parameter, 0.0, [], []
        for factor, node in _terms(direction):
            if node is parameter:
                self.own += factor
            elif node in constant:
                self.fixed.append((factor, node))
            else:
                self.terms.append((factor, node))


def _terms(node: fx.Node, factor: float = 1.0) -> list[tuple[float, fx.Node]]:
    """Take a tensor apart into terms with factors."""
    args, target = node.args, node.target
    if len(node.users) > 1 or node.op != "call_function":
        return [(factor, node)]
    if target in (_aten.add.Tensor, _aten.sub.Tensor) and all(isinstance(a, fx.Node) for a in args):
        scale = node.kwargs.get("alpha", 1)
        if isinstance(scale, (int, float)):
            second = factor * scale * (1.0 if target is _aten.add.Tensor else -1.0)
            return [*_terms(args[0], factor), *_terms(args[1], second)]  # type: ignore[arg-type]
    if target in (_aten.mul.Tensor, _aten.div.Tensor) and isinstance(args[1], (int, float)):
        scale = args[1] if target is _aten.mul.Tensor else 1.0 / args[1]
        return _terms(args[0], factor * scale)  # type: ignore[arg-type]
    if target is _aten.neg.default:
        return _terms(args[0], -factor)  # type: ignore[arg-type]
    return [(factor, node)]


class _Update:
    """Writes a parameter's update into a graph."""

    _PRODUCTS: dict[Any, Any] = {_aten.mm.default: _aten.addmm_.default, _aten.bmm.default: _aten.baddbmm_.default}

    def __init__(self, graph: fx.Graph, factor: fx.Node, parameters: Sequence[fx.Node]) -> None:
        self.graph, self.factor, self.parameters = graph, factor, parameters

    def emit(self, move: _Sum) -> None:
        """Move a parameter along a sum, times the factor of the step."""
        parameter, graph = move.parameter, self.graph
        factors = [term for term in move.terms if self._is_product(term[1], parameter)]
        others = [term for term in move.terms if term not in factors]
        products = self._factored(factors)
        beta: Any = 1
        if move.own:
            beta = graph.call_function(operator.add, (graph.call_function(operator.mul, (self.factor, move.own)), 1.0))
            if not products:
                graph.call_function(_aten.mul_.Tensor, (parameter, beta))
        for factor, target, left, right in products:
            kwargs = {"beta": beta, "alpha": self._scaled(factor)}
            graph.call_function(self._PRODUCTS[target], (parameter, left, right), kwargs)
            beta = 1
        for factor, node in others:
            graph.call_function(_aten.add_.Tensor, (parameter, node), {"alpha": self._scaled(factor)})

    def _factored(self, products: Sequence[tuple[float, fx.Node]]) -> list[tuple[float, Any, Any, Any]]:
        """Take out what products share: the gradients of a first layer at two points are products with one input.

        Returns:
            Factor, operator, left and right matrix of each product.
        """
        found: list[tuple[float, Any, Any, Any]] = []
        for factor, node in products:
            left, right = node.args
            for i, (known, target, first, second) in enumerate(found):
                if target is not node.target or known == 0 or not (right is second or left is first):
                    continue
                first = self._plus(first, left, factor / known) if right is second else first
                second = second if right is second else self._plus(second, right, factor / known)
                found[i] = (known, target, first, second)
                break
            else:
                found.append((factor, node.target, left, right))
        return found

    def _plus(self, one: Any, other: Any, factor: float) -> fx.Node:
        return self.graph.call_function(_aten.add.Tensor, (one, other), {"alpha": factor})

    def _scaled(self, factor: float) -> fx.Node:
        return self.factor if factor == 1.0 else self.graph.call_function(operator.mul, (self.factor, factor))

    def _is_product(self, node: fx.Node, parameter: fx.Node) -> bool:
        return (
            node.target in self._PRODUCTS
            and len(node.users) == 1
            and shape_of(node) == shape_of(parameter)
            and not any(root(a) in self.parameters for a in node.args)
        )


def _copied(nodes: Iterable[fx.Node]) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Return a graph of these nodes, and the copy of each."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return graph, copies


def _added(graph: fx.Graph, terms: Sequence[tuple[float, fx.Node]], copies: dict[fx.Node, fx.Node]) -> fx.Node | None:
    """Add up terms with factors; None if there are none."""
    total: fx.Node | None = None
    for factor, node in sorted(terms, key=lambda term: term[0] != 1.0):  # which one begins without a product
        if total is None:
            total = graph.call_function(_aten.mul.Tensor, (copies[node], factor)) if factor != 1.0 else copies[node]
        else:
            total = graph.call_function(_aten.add.Tensor, (total, copies[node]), {"alpha": factor})
    return total
