"""Rewrites of traces that leave every result as it is: what is computed for nothing, or twice, is computed once."""

import operator
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["erase_unused", "is_view", "root", "shape_of", "simplify", "writes"]

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten.expand.default)
_PRODUCTS = (_aten.mul.Tensor, _aten.mul.Scalar)


def simplify(module: fx.GraphModule) -> None:
    """Simplify a trace, whose nodes know what they returned.

    Transposes of transposes, views of the same shape, copies that nobody writes to, detaching and factors of one are
    left out; what depends on nothing becomes a constant; what is computed twice is computed once.
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
    """Return the node whose result is the same, if there is one."""
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
    if _is_transpose(node) and _is_transpose(source) and _undoes(node, source):
        return source.args[0]  # type: ignore[return-value]
    return None


def _is_transpose(node: Any) -> bool:
    return node.target in (_aten.t.default, _aten.transpose.int)


def _undoes(node: Any, other: Any) -> bool:
    return node.target is other.target and set(node.args[1:]) == set(other.args[1:])


def _is_constant(node: Any) -> bool:
    """Whether a node is the same number whatever goes in, and however many examples."""
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
    """Let what is computed twice from the same be computed once."""
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op not in ("call_function", "get_attr") or _is_random(node):
            continue
        try:
            key = (node.op, node.target, _frozen(node.args), _frozen(node.kwargs))
            first = known.setdefault(key, node)
        except TypeError:  # an argument that cannot be compared
            continue
        if first is not node:
            node.replace_all_uses_with(first)


def _frozen(value: Any) -> Any:
    """Return arguments as something that can be compared; 1 and 1.0 and True are not the same argument."""
    if isinstance(value, dict):
        return tuple((key, _frozen(part)) for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    return type(value), value


def _is_random(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def shape_of(node: Any) -> torch.Size | None:
    """Return the shape of what a node returned, None if it is no tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.shape if isinstance(value, Tensor) else None


def _dtype(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None


def writes(node: fx.Node) -> bool:
    """Whether a node changes what it is given."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def root(node: Any) -> Any:
    """Return what a node is a view of."""
    while node.op == "call_function" and (node.target is operator.getitem or is_view(node.target)):
        node = node.args[0]
    return node


def is_view(target: Any) -> bool:
    """Whether an operator returns views of what it is given."""
    return isinstance(target, torch._ops.OpOverload) and any(r.alias_info is not None for r in target._schema.returns)


def erase_unused(graph: fx.Graph) -> None:
    """Erase what nobody asks for and changes nothing."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not writes(node):
            graph.erase_node(node)
