"""Graph rewrites: remove redundant computations, restore cross-entropy kernels, and accept any number of clients."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten.expand.default)
_PRODUCTS = (_aten.mul.Tensor, _aten.mul.Scalar)


def simplify(module: fx.GraphModule) -> None:
    """Simplify a trace whose nodes have recorded results.

    This removes transposes of transposes, views of the same shape, unmodified copies, detaching and factors of one.
    Values without inputs become constants, and repeated computations are shared.
    """
    graph = module.graph
    is_pure = not any(writes(node) for node in graph.nodes)
    node: Any
    for node in list(graph.nodes):
        if is_pure and _is_constant(node):
            _fold(module, node)
        elif (source := _stands_for(node, is_pure)) is not None:
            node.replace_all_uses_with(source)
    if is_pure:
        _share(graph)
    graph.eliminate_dead_code()


def _stands_for(node: Any, is_pure: bool) -> fx.Node | None:
    """Return another node with the same result, or None."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    is_copy = node.target is _aten.clone.default and not node.kwargs and is_pure
    if node.target is _aten.detach.default or (is_copy and root(source).op == "call_function"):
        return source
    if node.target in _VIEWS and shape_of(node) == shape_of(source):
        return source
    if node.target in _PRODUCTS and node.args[1] == 1 and _dtype(node) == _dtype(source):
        return source
    is_same = node.target is source.target and set(node.args[1:]) == set(source.args[1:])
    if node.target in (_aten.t.default, _aten.transpose.int) and is_same:  # a transpose of a transpose
        return source.args[0]  # type: ignore[return-value]
    return None


def _is_constant(node: Any) -> bool:
    """Return whether a node is the same number for any inputs and any number of examples."""
    fills = (_aten.ones_like.default, _aten.zeros_like.default)
    return node.target is _aten.scalar_tensor.default or (node.target in fills and shape_of(node) == ())


def _fold(module: fx.GraphModule, node: fx.Node) -> None:
    fills: dict[Any, int] = {_aten.ones_like.default: 1, _aten.zeros_like.default: 0}
    found, name = node.meta["val"], f"_constant_{node.name}"
    number = fills[node.target] if node.target in fills else node.args[0]
    module.register_buffer(name, torch.tensor(number, dtype=found.dtype, device=found.device), persistent=False)
    with module.graph.inserting_before(node):
        node.replace_all_uses_with(module.graph.get_attr(name), propagate_meta=True)


def _share(graph: fx.Graph) -> None:
    """Compute repeated computations only once."""
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op not in ("call_function", "get_attr") or _is_random(node):
            continue
        try:
            key = (node.op, node.target, _frozen(node.args), _frozen(node.kwargs))
            first = known.setdefault(key, node)
        except TypeError:  # an argument that cannot be hashed
            continue
        if first is not node:
            node.replace_all_uses_with(first)


def _frozen(value: Any) -> Any:
    """Return arguments in a comparable form; 1, 1.0 and True are different."""
    if isinstance(value, dict):
        return tuple((key, _frozen(part)) for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    return type(value), value


def _is_random(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def shape_of(node: Any) -> torch.Size | None:
    """Return the shape of a node's result, None if it is not a tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.shape if isinstance(value, Tensor) else None


def _dtype(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None


def writes(node: fx.Node) -> bool:
    """Return whether a node changes its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def root(node: Any) -> Any:
    """Return the base of a node that is a view, else the node itself."""
    while node.op == "call_function" and (node.target is operator.getitem or is_view(node.target)):
        node = node.args[0]
    return node


def is_view(target: Any) -> bool:
    """Return whether an operator returns views of its arguments."""
    return isinstance(target, torch._ops.OpOverload) and any(r.alias_info is not None for r in target._schema.returns)


def erase_unused(graph: fx.Graph) -> None:
    """Erase unused nodes that do not write to their arguments."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not writes(node):
            graph.erase_node(node)


# Any number of clients or examples


class _DiffersError(Exception):
    """Two graphs differ in more than the number of clients or examples."""


@dataclass(frozen=True, slots=True)
class _Times:
    """A multiple of the number of clients or examples."""

    factor: int


def generalize(graphs: Sequence[Sequence[fx.Graph]], owners: Sequence[nn.Module]) -> bool:
    """Change graphs to accept any number of clients or examples.

    The number is part of a graph, for example in sizes of views. Comparing graphs recorded with different numbers shows
    its positions: every integer that differs must be the same multiple of the number in all graphs.

    ``graphs`` are groups of graphs recorded with different numbers. ``owners`` have the attributes of a group's graphs.
    Change the first graph of each group in place, or return False, with no change, if graphs differ otherwise.
    """
    found = []
    try:
        for one, *others in graphs:
            merged = [
                _compared(one, other, (owners[0], owner)) for other, owner in zip(others, owners[1:], strict=True)
            ]
            if any(each != merged[0] for each in merged):
                return False
            found.append((one, *merged[0]))
    except _DiffersError:
        return False
    for graph, stacked, arguments in found:
        _put_in(graph, stacked, arguments)
    return True


def _compared(
    one: fx.Graph, other: fx.Graph, owners: tuple[nn.Module, nn.Module]
) -> tuple[fx.Node | None, dict[fx.Node, Any]]:
    """Return an input with that number of rows, and the arguments of all nodes with the number marked."""
    if len(one.nodes) != len(other.nodes):
        raise _DiffersError
    pairs = dict(zip(one.nodes, other.nodes, strict=True))
    stacked, counts = _stacked(pairs)
    merged: dict[fx.Node, Any] = {}
    for a, b in pairs.items():
        if a.op != b.op or (a.op == "call_function" and a.target is not b.target):
            raise _DiffersError
        if a.op == "get_attr":
            _check_equal(getattr(owners[0], str(a.target)), getattr(owners[1], str(b.target)))
        elif a.op != "placeholder":
            merged[a] = _merged((a.args, a.kwargs), (b.args, b.kwargs), pairs, counts)
    return stacked, merged


def _stacked(pairs: Mapping[fx.Node, fx.Node]) -> tuple[fx.Node | None, tuple[int, int]]:
    """Return an input with one row per client or example, and both numbers; None if no input has."""
    found: tuple[fx.Node | None, tuple[int, int]] = (None, (1, 1))
    for a, b in pairs.items():
        if a.op != "placeholder":
            continue
        shapes: list[Any] = [shape_of(a) or (), shape_of(b) or ()]
        if shapes[0] == shapes[1]:
            continue
        if len(shapes[0]) != len(shapes[1]):
            raise _DiffersError
        counts = (shapes[0][0], shapes[1][0])
        if shapes[0][1:] != shapes[1][1:] or (found[0] is not None and found[1] != counts):
            raise _DiffersError
        found = found if found[0] is not None else (a, counts)
    return found


def _merged(a: Any, b: Any, pairs: Mapping[fx.Node, fx.Node], counts: tuple[int, int]) -> Any:
    """Return arguments of the first graph, with multiples of the number marked."""
    if isinstance(a, fx.Node):
        if pairs.get(a) is not b:
            raise _DiffersError
        return a
    if type(a) is not type(b):
        raise _DiffersError
    if isinstance(a, (tuple, list)):
        if len(a) != len(b):
            raise _DiffersError
        return type(a)([_merged(x, y, pairs, counts) for x, y in zip(a, b, strict=True)])
    if isinstance(a, dict):
        if a.keys() != b.keys():
            raise _DiffersError
        return {key: _merged(value, b[key], pairs, counts) for key, value in a.items()}
    if isinstance(a, slice):
        parts = zip((a.start, a.stop, a.step), (b.start, b.stop, b.step), strict=True)
        return slice(*(_merged(x, y, pairs, counts) for x, y in parts))
    if a == b:
        return a
    if type(a) is int and a % counts[0] == 0 and a // counts[0] * counts[1] == b:
        return _Times(a // counts[0])
    raise _DiffersError


def _check_equal(a: Any, b: Any) -> None:
    same = torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape else a is b
    if not same:
        raise _DiffersError


def _put_in(graph: fx.Graph, stacked: fx.Node | None, merged: Mapping[fx.Node, Any]) -> None:
    """Compute the marked arguments from an input's number of rows."""
    multiples: dict[int, Any] = {}

    def noted(value: Any) -> Any:
        return multiples.setdefault(value.factor) if isinstance(value, _Times) else value

    def real(value: Any) -> Any:
        return multiples[value.factor] if isinstance(value, _Times) else value

    map_aggregate(tuple(merged.values()), noted)
    if not multiples:
        return
    assert stacked is not None
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_before(last.next):
        count = graph.call_function(operator.getitem, (graph.call_function(getattr, (stacked, "shape")), 0))
        for factor in sorted(multiples):
            multiples[factor] = count if factor == 1 else graph.call_function(operator.mul, (count, factor))
    for node, arguments in merged.items():
        node.args, node.kwargs = map_aggregate(arguments, real)


# Cross-entropies: vmap decomposes nll_loss, their last part, into small operators. A kernel without reduction takes the
# examples of all clients as one batch. This saves 8 of 40 kernels of a small network's local step on a device
# (benchmarks/device_counts.py).

_KERNELS: dict[int, Any] = {
    0: (_aten.nll_loss_forward.default, _aten.nll_loss_backward.default),
    2: (_aten.nll_loss2d_forward.default, _aten.nll_loss2d_backward.default),
}
"""Forward and backward by the number of dimensions after the classes."""

_NO_REDUCTION = 0


class _Zero:
    """Matches a tensor with the number 0."""


# The form of nll_loss in torch._decomp. A tuple matches a call of an operator, and a name the same value everywhere.
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
        return  # with class weights, the gradient has a value for every class
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
