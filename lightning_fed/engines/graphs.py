"""Rewrites of traced local steps: what cancels is left out, and products go straight into the parameters."""

from typing import Any

import torch
from torch import fx

__all__ = ["simplify", "update_in_place"]

_aten = torch.ops.aten


def simplify(graph: fx.Graph) -> None:
    """Leave out transposes of transposes, and detaching, which there is nothing to detach from."""
    node: Any
    for node in list(graph.nodes):
        if node.target is _aten.detach.default:
            node.replace_all_uses_with(node.args[0])
        elif _is_transpose(node) and _is_transpose(node.args[0]) and _undoes(node, node.args[0]):
            node.replace_all_uses_with(node.args[0].args[0])
    graph.eliminate_dead_code()


def _is_transpose(node: Any) -> bool:
    return node.target in (_aten.t.default, _aten.transpose.int)


def _undoes(node: Any, other: Any) -> bool:
    return node.target is other.target and set(node.args[1:]) == set(other.args[1:])


def update_in_place(graph: fx.Graph, count: int) -> None:
    """Let a graph step its first inputs along its first outputs, instead of returning these.

    A gradient that is a product of matrices is never formed: the product is added to the parameter. The graph takes
    one more input, the factor of the step, after all others.

    Args:
        graph: A graph whose first ``count`` inputs are parameters and whose first outputs are their gradients.
        count: The number of parameters.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    parameters = inputs[:count]
    with graph.inserting_after(inputs[-1]):
        factor = graph.placeholder("factor")
    (output,) = (node for node in graph.nodes if node.op == "output")
    gradients: list[fx.Node] = list(output.args[0][:count])
    with graph.inserting_before(output):
        # all that looks at a parameter comes before the first one changes
        gradients = [graph.call_function(_aten.clone.default, (g,)) if _root(g) in parameters else g for g in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            product = _PRODUCTS.get(gradient.target)
            if product is None or len(gradient.users) > 1 or any(_root(a) in parameters for a in gradient.args):
                graph.call_function(_aten.add_.Tensor, (parameter, gradient), {"alpha": factor})
            else:
                graph.call_function(product, (parameter, *gradient.args), {"beta": 1, "alpha": factor})
    output.args = (list(output.args[0][count:]),)
    for gradient in gradients:
        if not gradient.users:
            graph.erase_node(gradient)


_PRODUCTS: dict[Any, Any] = {_aten.mm.default: _aten.addmm_.default, _aten.bmm.default: _aten.baddbmm_.default}


def _root(node: Any) -> Any:
    """Return what a node is a view of."""
    while node.op == "call_function" and any(r.alias_info is not None for r in node.target._schema.returns):
        node = node.args[0]
    return node
