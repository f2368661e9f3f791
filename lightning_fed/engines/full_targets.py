"""Traced steps for batches all of whose targets count, where most of them ask how many do."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lightning_fed.engines.simplify import erase_unused, root, shape_of

__all__ = ["FullTargets", "where_all_count"]

_aten = torch.ops.aten
_SHAPED = (_aten.view.default, _aten.expand.default, _aten.reshape.default)


class FullTargets(NamedTuple):
    """A step that takes it for granted that targets are not ignored.

    Attributes:
        step: The graph.
        place: Which input the targets are, after the parameters.
        ignored: The class that must not be among them.
    """

    step: fx.Graph
    place: int
    ignored: float


def where_all_count(graph: fx.Graph, parameters: int = 0) -> FullTargets | None:
    """Return the graph of a step of several clients for targets of which none is ignored.

    How many examples of each client count is a number then, and so is the share of each in the client's loss: that
    leaves out some eight operations. The results are the same bits.

    Args:
        graph: The step, whose nodes know what they returned.
        parameters: How many of its inputs are no targets, the first ones.

    Returns:
        None if it does not ask how many targets count, or for anything else.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"][parameters:]
    masks = [node for node in graph.nodes if node.target is _aten.ne.Scalar and root(node.args[0]) in inputs]
    if len(masks) != 1 or not isinstance(masks[0].args[1], int):
        return None
    copies = dict[fx.Node, fx.Node]()
    full = fx.Graph()
    for node in graph.nodes:
        copies[node] = full.node_copy(node, copies.__getitem__)
    mask: Any = copies[masks[0]]
    for total in list(mask.users):
        if not _put_count(total, mask):
            return None
    _fold_shares(full)
    erase_unused(full)
    return FullTargets(full, inputs.index(root(masks[0].args[0])), masks[0].args[1])


def _put_count(total: Any, mask: Any) -> bool:
    """Put a number where sums are divided by how many of each client's targets count; False if it is used otherwise."""
    shape = shape_of(mask)
    if shape is None or total.target is not _aten.sum.dim_IntList or total.kwargs or len(total.args) > 2:
        return False
    if sorted(total.args[1]) != list(range(1, len(shape))):
        return False
    count = shape[1:].numel()
    for number in list(total.users):
        if number.target is not _aten._to_copy.default:
            return False
        for ratio in list(number.users):
            whole = ratio.args[0]
            if ratio.target is not _aten.div.Tensor or ratio.args[1] is not number or whole is number:
                return False
            if whole.meta["val"].dtype != ratio.meta["val"].dtype or shape_of(whole) != shape_of(ratio):
                return False
            ratio.args = (whole, count)
    return True


def _fold_shares(graph: fx.Graph) -> None:
    """Let a tensor that is one number all over be made as such."""
    found: dict[Any, tuple[float, Tensor]] = {}  # the number, and a tensor of its type
    for node in list(graph.nodes):
        value, like = found.get(node.args[0], (None, None)) if node.args else (None, None)
        if node.target is _aten.ones_like.default and isinstance(node.meta.get("val"), Tensor):
            found[node] = 1.0, node.meta["val"]
        elif value is None or like is None:
            continue
        elif node.target is _aten.div.Tensor and isinstance(node.args[1], int):
            found[node] = value / node.args[1], like
        elif node.target in _SHAPED and -1 not in node.args[1]:
            found[node] = value, like
            if all(user.target in _SHAPED for user in node.users):
                continue
            with graph.inserting_before(node):
                filled = graph.call_function(
                    _aten.full.default, (list(node.args[1]), value), {"dtype": like.dtype, "device": like.device}
                )
            node.replace_all_uses_with(filled)
