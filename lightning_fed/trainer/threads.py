"""The number of PyTorch's threads in a run: one for a small model, on a CPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parameter import is_lazy

SMALL = 500_000
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# Lightning sets the first one when it starts processes, so a value at import is the user's
_SET_BY_USER = any(name in os.environ for name in _VARIABLES)
_AT_IMPORT = torch.get_num_threads()


def is_small(module: nn.Module) -> bool:
    """Return whether a model is too small to benefit from more than one thread.

    Such a model has fewer than 500,000 parameters and no convolution, which would use each of its weights many times.
    """
    parameters = list(module.parameters())
    return all(not is_lazy(p) and p.dim() < 3 for p in parameters) and sum(p.numel() for p in parameters) < SMALL


@contextmanager
def threads_for(module: nn.Module, device: torch.device) -> Iterator[int | None]:
    """Use one thread for a small model on a CPU, and restore the previous number on exit, also after an error.

    This keeps a number that the user has set with ``torch.set_num_threads``, ``OMP_NUM_THREADS`` or
    ``MKL_NUM_THREADS``. It also keeps the number of a process that Lightning has started with a share of the cores. It
    yields the previous number if it changes the number, and otherwise None.
    """
    before = torch.get_num_threads()
    if before == 1 or device.type != "cpu" or _is_users(before) or not is_small(module):
        yield None
        return
    torch.set_num_threads(1)
    try:
        yield before
    finally:
        if torch.get_num_threads() == 1:  # else other code has set it in between
            torch.set_num_threads(before)


def _is_users(threads: int) -> bool:
    """Return whether a number of threads differs from PyTorch's default, the number of cores or hardware threads."""
    cores = {os.cpu_count() or 1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1}
    return _SET_BY_USER or threads != _AT_IMPORT or threads not in cores | {count // 2 for count in cores}
