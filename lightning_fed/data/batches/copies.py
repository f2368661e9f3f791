"""Copies of batches, for methods that use a batch more than once: a step may write into its batch."""

import copy
from collections.abc import MutableMapping, MutableSequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

_DEPTH = 4  # nesting of objects that are not plain collections


def own_copy(batch: Any, depth: int = _DEPTH) -> Any:
    """Return a copy of a batch with its own collections, tensors and arrays.

    Other objects are copied with their attributes, by their ``clone`` if they have it, as graphs of PyG and DGL do.
    What cannot be copied, such as an open file, is shared.
    """
    if type(batch) is list and {*map(type, batch)} == {Tensor}:  # much faster
        return [tensor.clone() for tensor in batch]
    return pytree.tree_map(lambda value: _copied(value, depth), batch)


def _copied(value: Any, depth: int) -> Any:
    if depth == 0:
        return value
    if callable(clone := getattr(value, "clone", None)) and not isinstance(value, type):
        return clone()
    try:
        found = copy.copy(value)
    except TypeError:
        return value
    if found is value:  # a number or a text
        return value
    if isinstance(found, MutableMapping):
        for key in found:
            found[key] = own_copy(found[key], depth - 1)
    elif isinstance(found, MutableSequence):
        found[:] = [own_copy(part, depth - 1) for part in found]
    attributes = getattr(found, "__dict__", {})
    for name, part in attributes.items():
        attributes[name] = own_copy(part, depth - 1)
    return found
