"""Freed memory, which the C library keeps for the program or returns to the system."""

import torch

__all__ = ["keep_freed_memory"]

_LARGEST = 2**25 - 2**13  # bytes; freeing a larger block changes nothing


def keep_freed_memory(size: int) -> None:
    """Let the C library keep up to so many bytes of freed memory, 64 MB at most, until they are needed again.

    glibc returns what is free at the end of its heap to the system where that is more than twice the largest block that
    was ever freed. A round frees several vectors of the model's size when it ends, and the next round then gets their
    memory back page by page: 1,300 page faults with 272,000 parameters, which is 3 % of its time. Freeing a large
    block raises the limit; nothing is written to it, so it takes no memory. Other C libraries ignore it.

    Args:
        size: The bytes.
    """
    torch.empty(min(size // 2, _LARGEST), dtype=torch.uint8)
