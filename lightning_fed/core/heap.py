"""Freed memory, which the C library keeps or returns to the system."""

import torch

__all__ = ["keep_freed_memory"]

_LARGEST = 2**25 - 2**13  # bytes; larger blocks do not raise the limit


def keep_freed_memory(size: int) -> None:
    """Make the C library keep up to ``size`` bytes of freed memory, at most 64 MB, for reuse.

    glibc returns free memory at the end of its heap to the system if it exceeds twice the largest block ever freed. A
    round frees several vectors of the model's size at its end, and the next round gets their memory back page by page:
    1,300 page faults for 272,000 parameters, or 3 % of its time. Freeing a large block raises the limit, and uses no
    memory since nothing is written to it. Other C libraries ignore it.

    Args:
        size: The number of bytes.
    """
    torch.empty(min(size // 2, _LARGEST), dtype=torch.uint8)
