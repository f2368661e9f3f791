"""The number of PyTorch's threads in a run: one for a small model, on a CPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parameter import is_lazy

SMALL = 500_000
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# Lightning sets the first of them when it starts processes: a value at import is the user's
_SET_BY_USER = any(name in os.environ for name in _VARIABLES)
_AT_IMPORT = torch.get_num_threads()


def is_small(module: nn.Module) -> bool:
    """Return whether a model is too small to gain by more than one thread.

    It is so with fewer than 500,000 parameters and no convolution: a convolution uses each of its weights many times.
    """
    parameters = list(module.parameters())
    return all(not is_lazy(p) and p.dim() < 3 for p in parameters) and sum(p.numel() for p in parameters) < SMALL


@contextmanager
def threads_for(module: nn.Module, device: torch.device) -> Iterator[int | None]:
    """Work with one thread where the model is small, and with as many as before afterwards, also after an error.

    The number that a user has set is left alone: by ``torch.set_num_threads``, ``OMP_NUM_THREADS`` or
    ``MKL_NUM_THREADS``. So is that of a process which Lightning has started with a share of the cores. On a CPU, and if
    the number was changed, this yields the number before, and otherwise None.
    """
    before = torch.get_num_threads()
    if before == 1 or device.type != "cpu" or _is_users(before) or not is_small(module):
        yield None
        return
    torch.set_num_threads(1)
    try:
        yield before
    finally:
        if torch.get_num_threads() == 1:  # else somebody has set it in between
            torch.set_num_threads(before)


def _is_users(threads: int) -> bool:
    """Return whether a number of threads is not PyTorch's default, the number of cores or of hardware threads."""
    cores = {os.cpu_count() or 1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1}
    return _SET_BY_USER or threads != _AT_IMPORT or threads not in cores | {count // 2 for count in cores}
