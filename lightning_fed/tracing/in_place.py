"""A pass that makes a graph move its inputs in place, and computes constant parts once."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from lightning_fed.tracing.passes import erase_unused, root, shape_of, writes

_aten = torch.ops.aten
_Term: TypeAlias = tuple[float, fx.Node]  # a factor, and the node that it multiplies


@dataclass(frozen=True, slots=True)
class SplitGraph:
    """A traced function as two graphs.

    ``once`` maps the constants to values that only depend on them: for every moved input, the constant part of its
    direction (or None). The values that ``call`` needs follow. ``call`` maps the other inputs, these values, and the
    factor of the move to the results other than directions. It also moves the inputs along their directions without
    the constant parts.
    """

    owner: fx.GraphModule  # the owner of the graphs' attributes
    once: fx.Graph
    call: fx.Graph
    moves: int  # number of moved inputs
    names: tuple[str, ...]  # names of its last results


def split_graph(module: fx.GraphModule, moves: int, constants: int, names: tuple[str, ...] = ()) -> SplitGraph | None:
    """Change a graph to move its first inputs along its first results instead of returning these.

    A direction that is a sum is split into its terms. Values that only depend on constants, the graph's last inputs,
    move to a graph that runs once for all calls. A product of matrices is added to the input without being formed
    separately. A multiple of the input scales the input.

    Return None if the graph writes to a value that only depends on constants.

    Compared to a trace of the gradients, a round of W2 takes 2.7 times less CPU time, and one of W1 1.1 times less.
    """
    graph = module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    moved, last = inputs[:moves], inputs[len(inputs) - constants :]
    fixed = _constant(graph, last)
    if any(writes(node) and any(a in fixed for a in node.all_input_nodes) for node in graph.nodes):
        return None
    once, copies = _copied(fixed)  # copy before anything is erased
    output: Any = graph.output_node()
    directions, rest = output.args[0][:moves], output.args[0][moves:]
    sums = [_Sum(p, d, fixed) for p, d in zip(moved, directions, strict=True)]
    with graph.inserting_after(inputs[-1]):
        factor = graph.placeholder("factor")
    with graph.inserting_before(output):
        output.args = (_Update(graph, factor, moved).emit(sums, rest),)
    erase_unused(graph)
    needed = _replace_with_inputs(graph, fixed, factor)
    once.output([*(_added(once, each.fixed, copies) for each in sums), *(copies[node] for node in needed)])
    once.eliminate_dead_code()
    erase_unused(graph)
    for node in last:
        graph.erase_node(node)
    return SplitGraph(module, once, graph, moves, names)


def _replace_with_inputs(graph: fx.Graph, fixed: dict[fx.Node, None], factor: fx.Node) -> list[fx.Node]:
    """Replace constant values with inputs before the factor; return the replaced nodes."""
    needed = [node for node in fixed if any(user not in fixed for user in node.users)]
    with graph.inserting_before(factor):
        for node in needed:
            stand_in = graph.placeholder(f"once_{node.name}")
            stand_in.meta = dict(node.meta)
            node.replace_all_uses_with(stand_in, delete_user_cb=lambda user: user not in fixed)
    return needed


def _constant(graph: fx.Graph, inputs: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """Return the nodes that only depend on the given inputs, in order."""
    found = dict.fromkeys(inputs)
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node.op == "call_function" and sources and all(source in found for source in sources):
            found[node] = None
    return found


class _Sum:
    """A direction as a sum: a multiple of the moved parameter, constant terms, and others."""

    def __init__(self, parameter: fx.Node, direction: fx.Node, constant: dict[fx.Node, None]) -> None:
        self.parameter, self.own = parameter, 0.0
        self.fixed, self.terms = list[_Term](), list[_Term]()
        for factor, node in _terms(direction):
            if node is parameter:
                self.own += factor
            elif node in constant:
                self.fixed.append((factor, node))
            else:
                self.terms.append((factor, node))


def _terms(node: fx.Node, factor: float = 1.0) -> list[_Term]:
    """Split a tensor into terms with factors."""
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
    """Writes updates of parameters into a graph."""

    _PRODUCTS: dict[Any, Any] = {_aten.mm.default: _aten.addmm_.default, _aten.bmm.default: _aten.baddbmm_.default}

    def __init__(self, graph: fx.Graph, factor: fx.Node, parameters: Sequence[fx.Node]) -> None:
        self.graph, self.factor, self.parameters = graph, factor, parameters

    def emit(self, sums: Sequence[_Sum], rest: Sequence[fx.Node]) -> list[fx.Node]:
        """Move parameters along sums; return the other results, computed before any parameter moves."""
        waiting = [[(factor, self._before(node)) for factor, node in each.terms] for each in sums]
        others = [self._before(node) for node in rest]
        for each, terms in zip(sums, waiting, strict=True):
            each.terms = terms
            self._move(each)
        return others

    def _before(self, node: fx.Node) -> fx.Node:
        """Return a node's value from before any parameter moves."""
        is_part = root(node) in self.parameters
        return self.graph.call_function(_aten.clone.default, (node,)) if is_part else node

    def _move(self, move: _Sum) -> None:
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

    def _factored(self, products: Sequence[_Term]) -> list[tuple[float, Any, Any, Any]]:
        """Return factor, operator, left and right matrix of each product, combining products that share a matrix.

        The gradients of a first layer at two points are products with the same input.
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


def _added(graph: fx.Graph, terms: Sequence[_Term], copies: dict[fx.Node, fx.Node]) -> fx.Node | None:
    """Return the sum of terms with factors, starting with a term without a factor, if any; None if empty."""
    total: fx.Node | None = None
    for factor, node in sorted(terms, key=lambda term: term[0] != 1.0):
        if total is None:
            total = graph.call_function(_aten.mul.Tensor, (copies[node], factor)) if factor != 1.0 else copies[node]
        else:
            total = graph.call_function(_aten.add.Tensor, (total, copies[node]), {"alpha": factor})
    return total
