"""Rewrites of the traced losses of several clients, which ``vmap`` spells out where PyTorch has a kernel."""

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from lightning_fed.engines.simplify import shape_of

__all__ = ["use_nll_kernels"]

_aten = torch.ops.aten
_NONE = 0  # the reduction of nll_loss that leaves a loss per example


class _Targets(NamedTuple):
    """What a negative log-likelihood is taken of.

    Attributes:
        scores: The logarithms of probabilities [S, B, C].
        targets: The classes [S, B].
        ignored: The class of examples that do not count.
    """

    scores: Any
    targets: Any
    ignored: int


def use_nll_kernels(graph: fx.Graph) -> None:
    """Let negative log-likelihoods of stacked clients be taken by PyTorch's kernels, on the examples of all of them.

    Cross-entropy comes to them. ``vmap`` makes some twenty small operations of one and its gradient; the results are
    the same bits. For classes in the last dimension.

    Args:
        graph: The trace, whose nodes know what they returned.
    """
    options: dict[_Targets, tuple[Any, ...]] = {}
    node: Any
    for node in list(graph.nodes):
        with graph.inserting_before(node):
            if (found := _losses_of(node)) is not None:
                flat = (*_flat(graph, found), None, _NONE, found.ignored)
                both = graph.call_function(_aten.nll_loss_forward.default, flat)
                losses, total_weight = (graph.call_function(operator.getitem, (both, i)) for i in range(2))
                options[found] = (*flat, total_weight)
                _replace(graph, node, losses)
            elif (gradient := _gradient_of(node)) is not None and gradient[0] in options:
                found, factors = gradient
                shape = found.targets.meta["val"].shape
                each = graph.call_function(_aten.expand.default, (factors, [*shape, 1]))
                each = graph.call_function(_aten.reshape.default, (each, [shape.numel()]))
                flat = (each, *options[found])
                _replace(graph, node, graph.call_function(_aten.nll_loss_backward.default, flat))
    graph.eliminate_dead_code()


def _flat(graph: fx.Graph, found: _Targets) -> tuple[fx.Node, fx.Node]:
    """Return scores and targets of the examples of all clients."""
    clients, examples, classes = found.scores.meta["val"].shape
    scores = graph.call_function(_aten.view.default, (found.scores, [clients * examples, classes]))
    return scores, graph.call_function(_aten.view.default, (found.targets, [clients * examples]))


def _replace(graph: fx.Graph, node: fx.Node, flat: fx.Node) -> None:
    """Put what is known of the examples of all clients in the place of a node."""
    whole = graph.call_function(_aten.view.default, (flat, list(node.meta["val"].shape)))
    node.replace_all_uses_with(whole, propagate_meta=True)


def _losses_of(node: Any) -> _Targets | None:
    """Return what the losses are of that a node returns: ``where(targets != ignored, -scores[targets], 0)``."""
    counts, negative = _chosen(node)
    if not _is(negative, _aten.neg.default):
        return None
    squeezed = negative.args[0]
    gathered: Any = squeezed.args[0] if _is(squeezed, _aten.squeeze.dims) and squeezed.args[1] == [2] else None
    if not _is(gathered, _aten.gather.default) or gathered.args[1] != 2:
        return None
    scores, _, index = gathered.args
    safe = index.args[0] if _is(index, _aten.unsqueeze.default) and index.args[1] == 2 else None
    return _targets(scores, counts, safe, lambda targets: targets)


def _gradient_of(node: Any) -> tuple[_Targets, fx.Node] | None:
    """Return what a node returns the scores' gradients of, and the losses' [S, 1, 1] or [S, B, 1]."""
    if not _is(node, _aten.mul.Tensor):
        return None
    scattered, factors = node.args
    if not _is(scattered, _aten.scatter.value) or scattered.args[1] != 2 or scattered.args[3] != -1.0:
        return None
    zeros, index = scattered.args[0], scattered.args[2]
    counts, factor = _chosen(factors)
    if not _is(zeros, _aten.zeros_like.default) or shape_of(zeros) != shape_of(node):
        return None
    shape = shape_of(factor)
    if shape is None or len(shape) != 3 or shape[2] != 1:  # with class weights they differ between classes
        return None
    found = _targets(
        zeros.args[0],
        counts,
        index,
        lambda column: column.args[0] if _is(column, _aten.unsqueeze.default) and column.args[1] == 2 else None,
    )
    return None if found is None else (found, factor)


def _targets(scores: Any, counts: Any, safe: Any, column_of: Any) -> _Targets | None:
    """Return scores and targets if ``counts`` is targets != ignored, and ``safe`` the targets, 0 for those ignored."""
    if not _is(counts, _aten.ne.Scalar) or not isinstance(counts.args[1], int):
        return None
    compared, ignored = counts.args
    also_counts, kept = _chosen(safe)
    targets = column_of(compared)
    if also_counts is not counts or kept is not compared or targets is None:
        return None
    found, shape = _Targets(scores, targets, ignored), shape_of(scores)
    if shape is None or len(shape) != 3 or shape_of(targets) != shape[:2] or targets.meta["val"].dtype != torch.int64:
        return None
    return found if all(part.meta["val"].is_contiguous() for part in (scores, targets)) else None


def _chosen(node: Any) -> tuple[Any, Any]:
    """Return condition and value of ``where(condition, value, 0)``."""
    if not _is(node, _aten.where.self) or not _is_zero(node.args[2]):
        return None, None
    return node.args[0], node.args[1]


def _is_zero(node: Any) -> bool:
    """Whether a node is the constant 0."""
    if not isinstance(node, fx.Node):
        return False
    if node.op == "get_attr":
        number: Any = getattr(node.graph.owning_module, str(node.target))
        return bool(number.ndim == 0 and number == 0)
    return bool(node.target is _aten.scalar_tensor.default and node.args[0] == 0)


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is target
