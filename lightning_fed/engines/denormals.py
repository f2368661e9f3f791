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
    in ``reproduce mime_fig3 --scale part`` spends a third less time in its thousandth round.

    With several threads, and on a processor that cannot do so, nothing changes: what the other threads do would depend
    on when PyTorch has started them, and a resumed run could differ in such numbers.
    """
    smallest = sys.float_info.min
    is_so = smallest / 2 == 0  # as the user wishes
    if is_so or torch.get_num_threads() > 1 or not torch.set_flush_denormal(True):
        yield
        return
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
