"""What a trace of gradients leaves to be done later: products of a layer's two factors, and sums over these."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lightning_fed.tracing.mean_proof import mean_over_examples
from lightning_fed.tracing.passes import erase_unused, generalize, is_view, root, shape_of, writes

__all__ = ["Parts", "keep_parts"]

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.bmm.default)
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a trace of gradients returns after the loss: the parts to be kept, then counts.

    Attributes:
        assembly: From the tensors of a batch and its parts to its gradients.
        count: The number of parts.
        shares: Of each count that a mean was divided by, the share of each example.
        products: Gradients that are products of two matrices with a row for every example, or as many for each, by
            their positions: where the left one, transposed, and the right one stand among the tensors of the batch and
            the parts. They are left to one product for all batches.
        others: The positions of the gradients that the trace adds to sums.
    """

    assembly: fx.GraphModule
    count: int
    shares: list[int]
    products: dict[int, tuple[int, int]]
    others: list[int]

    def generalize(self, others: "Sequence[Parts]") -> bool:
        """Let :attr:`assembly` take any number of examples, given those of other numbers; return whether it does."""
        mine, *theirs = ((p.count, p.shares, p.products, p.others) for p in (self, *others))
        owners = [each.assembly for each in (self, *others)]
        if any(each != mine for each in theirs) or not generalize([[each.graph for each in owners]], owners):
            return False
        self.assembly.recompile()
        return True


def keep_parts(module: fx.GraphModule, count: int, num_leaves: int, full: int) -> Parts | None:
    """Let a trace of gradients return their parts as well, and the counts that its mean is divided by.

    Args:
        module: From ``count`` sums, the tensors of a batch and a point to as many gradients and the loss.
        count: The number of parameters.
        num_leaves: The number of tensors in the batch; a factor of the gradients comes after them.
        full: The examples in a full batch: what is kept of a product is what is smaller there.

    Returns:
        None if the loss is not provably a mean over examples.
    """
    graph = module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    sums, leaves = inputs[:count], inputs[count : count + num_leaves]
    output: Any = graph.output_node()
    *grads, loss = output.args[0]
    shape = shape_of(leaves[0])
    if not shape or any(writes(node) for node in graph.nodes):
        return None
    counts = mean_over_examples(loss, leaves, shape[0])
    if counts is None:
        return None
    assembly, parts = _assembly(graph, grads, leaves, full / shape[0])
    products = _products(grads, [*leaves, *parts], num_leaves)
    others = [i for i in range(count) if i not in products]
    output.args = ([*(grads[i] for i in others), loss, *parts, *(node for node, _ in counts)],)
    erase_unused(graph)
    for i in products:
        graph.erase_node(sums[i])
    return Parts(fx.GraphModule(module, assembly), len(parts), [share for _, share in counts], products, others)


def _products(grads: Sequence[fx.Node], at_hand: Sequence[fx.Node], num_leaves: int) -> dict[int, tuple[int, int]]:
    """Return the gradients that are products of what is at hand, by their positions."""
    places: dict[Any, int] = {node: i for i, node in enumerate(at_hand)}
    found = {}
    for i, grad in enumerate(grads):
        if grad.target is not _aten.mm.default or len(grad.users) != 1:
            continue
        turned: Any = grad.args[0]
        left, right = turned.args[0] if turned.target is _aten.t.default else None, grad.args[1]
        if left in places and right in places and max(places[left], places[right]) >= num_leaves:
            found[i] = places[left], places[right]
    return found


def _assembly(
    graph: fx.Graph, grads: Sequence[Any], leaves: Sequence[fx.Node], scale: float
) -> tuple[fx.Graph, list[fx.Node]]:
    """Return the graph from batch and parts to gradients, and the parts.

    Args:
        graph: The trace.
        grads: The gradients in it.
        leaves: The tensors of the batch in it.
        scale: How many times as large factors are in a full batch.
    """
    parts: dict[fx.Node, None] = {}
    later: set[fx.Node] = set()  # done when gradients are assembled
    waiting = sorted(grads, key=_is_sum, reverse=True)  # these come last, when it is known what is kept for products
    while waiting:
        node = waiting.pop()
        if node in leaves or node in later or node in parts:
            continue
        factors = [a for a in node.all_input_nodes if root(a) not in leaves]
        is_large = node.target in _PRODUCTS and scale * sum(map(_numel, factors)) < _numel(node)
        is_over_kept = node.target is _aten.sum.dim_IntList and node.args[0] in parts
        is_strided = node.target is _aten.as_strided.default  # reads memory as a single client's parts lie in it
        if is_large or is_over_kept or (is_view(node.target) and node.op == "call_function" and not is_strided):
            later.add(node)
            waiting += node.all_input_nodes
        else:
            parts[node] = None
    out = fx.Graph()
    copies = {node: out.placeholder(node.name) for node in (*leaves, *parts)}
    for node, copy in copies.items():
        copy.meta = dict(node.meta)
    for node in graph.nodes:
        if node in later:
            copies[node] = copy = out.node_copy(node, copies.__getitem__)
            if copy.target in _VIEWS:  # of several clients at once, what comes before may lie otherwise in memory
                copy.target = _aten.reshape.default
    out.output([copies[grad] for grad in grads])
    return out, list(parts)


def _is_sum(node: Any) -> bool:
    """Whether a node is a sum, seen in another shape or not."""
    return bool(root(node).target is _aten.sum.dim_IntList)


def _numel(node: fx.Node) -> int:
    shape = shape_of(node)
    return 0 if shape is None else shape.numel()
