"""The precision in which a trial compares gradients: rounding to half precision would decide otherwise."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from lightning_fed.compat.package import pl
from lightning_fed.engines.vectorized.module_step import ModuleStep

__all__ = ["at_full_precision", "is_lowered", "raised"]

_LOW = (torch.bfloat16, torch.float16)


def is_lowered(trainer: pl.Trainer) -> bool:
    """Whether the trainer's precision rounds to half precision: ``bf16-mixed``, ``16-mixed`` and ``-true``."""
    plugins = pl.plugins.precision
    return isinstance(trainer.precision_plugin, (plugins.MixedPrecision, plugins.HalfPrecision))


def raised(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors, those of half precision in float32."""
    return [t.float() if t.dtype in _LOW else t for t in tensors]


@contextmanager
def at_full_precision(step: ModuleStep) -> Iterator[None]:
    """Run a module's step in float32 inside, with parameters and buffers of the same values; they are put back.

    Two gradients of the same step, of several clients and of one, differ by rounding. In half precision this is a
    hundredth, and much more of what cancels out, such as the gradient of a model that fits its data.

    Args:
        step: The module's step.
    """
    held = [(t, t.data) for t in (*step.module.parameters(), *step.module.buffers()) if t.dtype in _LOW]
    context = step.context
    try:
        for t, values in held:
            t.data = values.float()
        step.context = nullcontext
        yield
    finally:
        step.context = context
        for t, values in held:
            t.data = values
        step.flat.restore()
