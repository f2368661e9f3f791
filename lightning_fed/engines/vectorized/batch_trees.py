"""Batches as trees of tensors: taken apart, put together, and stacked for several clients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_fed.core.errors import FederatedError

__all__ = ["batch_shape", "check_tensors", "flatten", "stack_batches", "unflatten"]


def flatten(batch: Any) -> tuple[Sequence[Tensor], Any]:
    """Return the tensors of a batch, and what :func:`unflatten` needs to put them together again."""
    if type(batch) is list and all(type(part) is Tensor for part in batch):
        return batch, list  # the usual case, at a fraction of the cost
    return pytree.tree_flatten(batch)


def unflatten(leaves: Sequence[Tensor], spec: Any) -> Any:
    """Return the batch that has these tensors."""
    return list(leaves) if spec is list else pytree.tree_unflatten(leaves, spec)


def stack_batches(batches: Sequence[Any]) -> tuple[Sequence[Tensor], Any]:
    """Return the clients' batches taken apart, tensor by tensor: [S, B, ...], [B, ...] of a single client.

    Raises:
        FederatedError: If a batch holds anything but tensors.
    """
    flat = [flatten(batch) for batch in batches]
    leaves, spec = flat[0]
    check_tensors(leaves)
    if len(batches) == 1:
        return leaves, spec
    return [torch.stack(column) for column in zip(*(leaves for leaves, _ in flat), strict=True)], spec


def check_tensors(leaves: Sequence[Any]) -> None:
    """Refuse a batch that holds anything but tensors.

    Raises:
        FederatedError: Naming what it holds.
    """
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise FederatedError(
                f"engine='vectorized' needs batches of tensors only, found a {type(leaf).__name__} in one. Leave it out"
                " of the batch, or use engine='sequential'."
            )


def batch_shape(batch: Any) -> tuple[Any, ...]:
    """Return what batches must share to be stacked."""
    leaves, spec = pytree.tree_flatten(batch)
    return spec, *((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in leaves)
