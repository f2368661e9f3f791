"""Batches as trees of tensors: taken apart, put together, and stacked for several clients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_fed.core.errors import FederatedError

__all__ = ["batch_shape", "first_batch", "flatten", "stack_batches", "unflatten"]


def flatten(batch: Any) -> tuple[Sequence[Tensor], Any]:
    """Return the tensors of a batch, and what :func:`unflatten` needs to put them together again."""
    if type(batch) is list and all(type(part) is Tensor for part in batch):
        return batch, list  # the usual case, at a fraction of the cost
    return pytree.tree_flatten(batch)


def unflatten(leaves: Sequence[Tensor], spec: Any) -> Any:
    """Return the batch that has these tensors."""
    return list(leaves) if spec is list else pytree.tree_unflatten(leaves, spec)


def stack_batches(batches: Sequence[Any]) -> Any:
    """Stack the clients' batches, tensor by tensor, to [S, B, ...].

    Raises:
        FederatedError: If a batch holds anything but tensors.
    """
    flat = [pytree.tree_flatten(batch) for batch in batches]
    for leaf in flat[0][0]:
        if not isinstance(leaf, Tensor):
            raise FederatedError(
                f"engine='vectorized' needs batches of tensors only, found a {type(leaf).__name__} in one. Leave it out"
                " of the batch, or use engine='sequential'."
            )
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([torch.stack(column) for column in columns], flat[0][1])


def first_batch(batch: Any) -> Any:
    """Return the batch of the first client."""
    if type(batch) is list and all(type(part) is Tensor for part in batch):
        return [part[0] for part in batch]
    return pytree.tree_map(lambda leaf: leaf[0], batch)


def batch_shape(batch: Any) -> tuple[Any, ...]:
    """Return what batches must share to be stacked."""
    leaves, spec = pytree.tree_flatten(batch)
    return spec, *((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in leaves)
