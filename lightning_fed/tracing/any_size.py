"""Graphs of steps on batches of several clients, or of several examples, made to take any number of them."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

__all__ = ["generalize"]


class _DiffersError(Exception):
    """Two graphs differ in more than the number of clients or examples."""


@dataclass(frozen=True, slots=True)
class _Times:
    """So many times the number of clients or examples."""

    factor: int


def generalize(graphs: Sequence[Sequence[fx.Graph]], owners: Sequence[nn.Module]) -> bool:
    """Let graphs take any number of clients, or of examples.

    The number is part of a graph, in the sizes of views and the like. Some that were made with different numbers tell
    where it is: every integer that differs between them has to be the same multiple of it in all.

    Args:
        graphs: Graphs, changed in place, each the first of some that were made with different numbers.
        owners: What the first ones' attributes are of, what the second ones' are, and so on.

    Returns:
        Whether they differ in nothing else; if they do, they stay as they are.
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
    """Return an input with as many rows, and the arguments of all nodes, with the number marked in them."""
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
    """Return an input with as many rows as there are clients or examples, and both numbers; none if no input has."""
    found: tuple[fx.Node | None, tuple[int, int]] = (None, (1, 1))
    for a, b in pairs.items():
        if a.op != "placeholder":
            continue
        shapes: list[Any] = [
            node.meta["val"].shape if isinstance(node.meta.get("val"), Tensor) else () for node in (a, b)
        ]
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
    """Let the marked arguments be worked out from an input's rows."""
    multiples: dict[int, fx.Node] = {}

    def real(value: Any) -> Any:
        if isinstance(value, _Times):
            return multiples[value.factor]
        if isinstance(value, (tuple, list)):
            return type(value)([real(part) for part in value])
        if isinstance(value, dict):
            return {key: real(part) for key, part in value.items()}
        if isinstance(value, slice):
            return slice(real(value.start), real(value.stop), real(value.step))
        return value

    factors = sorted({factor for arguments in merged.values() for factor in _factors(arguments)})
    if not factors:
        return
    assert stacked is not None
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_before(last.next):
        count = graph.call_function(operator.getitem, (graph.call_function(getattr, (stacked, "shape")), 0))
        for factor in factors:
            multiples[factor] = count if factor == 1 else graph.call_function(operator.mul, (count, factor))
    for node, arguments in merged.items():
        if next(_factors(arguments), None) is not None:
            node.args, node.kwargs = real(arguments)


def _factors(value: Any) -> Iterator[int]:
    """Yield the factors of marked arguments."""
    if isinstance(value, _Times):
        yield value.factor
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _factors(part)
    elif isinstance(value, dict):
        yield from _factors(list(value.values()))
    elif isinstance(value, slice):
        yield from _factors([value.start, value.stop, value.step])
