"""A pass that computes cross-entropies with PyTorch's kernels.

``vmap`` decomposes ``nll_loss``, the last part of a cross-entropy, into small operators. A kernel without reduction
takes the examples of all clients as one batch. It saves 8 of 40 kernels of a small network's local step on a device
(``benchmarks/device_counts.py``).
"""

import operator
from typing import Any

import torch
from torch import Tensor, fx

from lightning_fed.tracing.passes import shape_of

_aten = torch.ops.aten
_KERNELS: dict[int, Any] = {
    0: (_aten.nll_loss_forward.default, _aten.nll_loss_backward.default),
    2: (_aten.nll_loss2d_forward.default, _aten.nll_loss2d_backward.default),
}
"""Forward and backward by the number of dimensions after the classes."""

_NO_REDUCTION = 0


class _Zero:
    """Matches a tensor of the number 0."""


# What torch._decomp makes of nll_loss. A tuple matches a call of an operator, and a name the same value everywhere.
_COLUMN = (_aten.unsqueeze.default, "target", "dim")
_IS_COUNTED = (_aten.ne.Scalar, "target", "ignored")
_IS_COUNTED_COLUMN = (_aten.ne.Scalar, _COLUMN, "ignored")
_CLASS = (_aten.where.self, _IS_COUNTED, "target", _Zero)
_CLASS_COLUMN = (_aten.where.self, _IS_COUNTED_COLUMN, _COLUMN, _Zero)
_CHOSEN = (_aten.gather.default, "log_probs", "dim", (_aten.unsqueeze.default, _CLASS, "dim"))
_LOSSES = (_aten.where.self, _IS_COUNTED, (_aten.neg.default, (_aten.squeeze.dims, _CHOSEN, ["dim"])), _Zero)
_ONE_HOT = (_aten.scatter.value, (_aten.zeros_like.default, "log_probs"), "dim", _CLASS_COLUMN, -1.0)
_GRADIENT = (_aten.mul.Tensor, _ONE_HOT, (_aten.where.self, _IS_COUNTED_COLUMN, "grad", _Zero))


def restore_cross_entropy(module: fx.GraphModule) -> None:
    """Replace decomposed ``nll_loss`` and its backward in a simplified trace by kernels, with the same bits."""
    flat: dict[Any, fx.Node] = {}
    for node in list(module.graph.nodes):
        for pattern in (_LOSSES, _GRADIENT):
            found: dict[str, Any] = {}
            if _matches(module, pattern, node, found):
                _replace(module.graph, node, flat, **found)
    module.graph.eliminate_dead_code()


def _matches(module: fx.GraphModule, pattern: Any, value: Any, found: dict[str, Any]) -> bool:
    """Return whether a node or an argument matches a pattern; collect the named values."""
    if isinstance(pattern, str):
        return bool(found.setdefault(pattern, value) == value)
    if pattern is _Zero:
        found["zero"] = value
        constant = getattr(module, str(value.target)) if isinstance(value, fx.Node) and value.op == "get_attr" else None
        return isinstance(constant, Tensor) and constant.ndim == 0 and bool(constant == 0)
    if isinstance(pattern, tuple):
        if not isinstance(value, fx.Node) or value.target is not pattern[0]:
            return False
        pattern, value = pattern[1:], value.args
    if not isinstance(value, (tuple, list)):
        return bool(value == pattern)
    return len(value) == len(pattern) and all(
        _matches(module, part, of, found) for part, of in zip(pattern, value, strict=True)
    )


def _replace(
    graph: fx.Graph,
    node: fx.Node,
    flat: dict[Any, fx.Node],
    log_probs: fx.Node,
    target: fx.Node,
    dim: int,
    ignored: int,
    zero: fx.Node,
    grad: fx.Node | None = None,
) -> None:
    """Replace a node by the kernel of the losses, or of the gradient with respect to ``log_probs``."""
    shape, targets, each = shape_of(log_probs), shape_of(target), shape_of(grad)
    if shape is None or targets is None or targets != shape[:dim] + shape[dim + 1 :]:
        return
    rest, column = shape[dim + 1 :], torch.Size([*shape[:dim], 1, *shape[dim + 1 :]])
    if len(rest) not in _KERNELS or (each is not None and torch.broadcast_shapes(each, column) != column):
        return  # weights of classes make the gradient one of every class
    forward, backward = _KERNELS[len(rest)]

    def flattened(tensor: fx.Node, *sizes: int) -> fx.Node:
        if tensor not in flat:
            flat[tensor] = graph.call_function(_aten.reshape.default, (tensor, [-1, *sizes, *rest]))
        return flat[tensor]

    with graph.inserting_before(node):
        options = (flattened(log_probs, shape[dim]), flattened(target), None, _NO_REDUCTION, ignored)
        if grad is None:
            losses_and_weight = graph.call_function(forward, options)
            result, sizes = graph.call_function(operator.getitem, (losses_and_weight, 0)), targets
        else:
            expanded = graph.call_function(_aten.expand.default, (grad, list(column)))
            result, sizes = graph.call_function(backward, (flattened(expanded), *options, zero)), shape
        result = graph.call_function(_aten.view.default, (result, list(sizes)))
    node.replace_all_uses_with(result, propagate_meta=True)
