"""A step that runs out of memory with too many clients at once, on any device."""

import torch
from torch import Tensor

__all__ = ["FITS", "NEVER", "take_memory"]

FITS: dict[str, int] = {}
"""How many "clients" fit; any number of them where the key is missing."""

NEVER = -1
"""Not one client fits, in whatever engine."""


def take_memory(x: Tensor) -> None:
    """Raise an error if more clients take a step at once than fit in memory.

    Args:
        x: A tensor of the batch.
    """
    count, functorch = 1, torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        inner = functorch.get_unwrapped(x)
        count = max(count, len(inner) if functorch.is_batchedtensor(x) else 1)
        x = inner
    fits = FITS.get("clients", count)
    if count > max(1, fits) or fits == NEVER:
        raise torch.OutOfMemoryError(f"no memory for {count} clients")
