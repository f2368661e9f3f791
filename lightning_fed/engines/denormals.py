"""Numbers too small for the format's full precision, with which a processor works several times as slowly."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["denormals_as_zero"]


@contextmanager
def denormals_as_zero() -> Iterator[None]:
    """Let this thread take denormal numbers for zero, and as before afterwards, also after an error.

    In float32 these are below 1.2e-38. The momentum of a weight whose gradient stays zero, such as that of a pixel at
    the border, decays to them within a thousand rounds; a network that has died has such gradients. MimeLite with Adam
    in ``reproduce mime_fig3 --scale part`` spends a third less time in its thousandth round. A processor that cannot do
    so works on as it does.

    Example:
        >>> with denormals_as_zero():
        ...     within = torch.tensor(1e-38) / 10
        >>> within.item(), (torch.tensor(1e-38) / 10).item() > 0
        (0.0, True)
    """
    smallest = sys.float_info.min
    if smallest / 2 == 0 or not torch.set_flush_denormal(True):  # as the user wishes, or not to be had
        yield
        return
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
