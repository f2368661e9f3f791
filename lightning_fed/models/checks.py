"""Checks of models' arguments, and of batches that do not fit a model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_fed.compat.package import pl
from lightning_fed.core.arguments import check_count
from lightning_fed.core.errors import FederatedError


def check_widths(owner: str, name: str, values: Any) -> list[int]:
    """Return an argument that must be a sequence of positive integers, as a list."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise FederatedError(f"{owner}({name}={values!r}): {name} must be a list of positive integers.")
    return [check_count(owner, f"{name}[{i}]", value) for i, value in enumerate(values)]


@contextmanager
def sized(owner: str, **sizes: Any) -> Iterator[None]:
    """Build layers inside; if memory runs out, raise an error with the arguments that set their size."""
    try:
        yield
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in sizes.items())
        raise FederatedError(f"{owner}({shown}): layers of this size do not fit into memory. Lower them.") from error


def check_floating(module: pl.LightningModule, x: Tensor) -> None:
    """Raise if the inputs' type does not match that of the module's parameters."""
    name = type(module).__name__
    if not x.is_floating_point():
        raise FederatedError(f"{name} got inputs of type {x.dtype}: give floating point numbers, such as x / 255.")
    if torch.float64 in (x.dtype, module.dtype) and x.dtype != module.dtype:
        raise FederatedError(
            f"{name} got inputs of type {x.dtype} for parameters of type {module.dtype}: convert the data, or train"
            " with precision='64-true', which converts both."
        )


def as_images(module: pl.LightningModule, x: Tensor, channels: int, size: int | None = None) -> Tensor:
    """Return images as [B, channels, height, width]; one channel also allows [B, height, width]."""
    if channels == 1 and x.ndim == 3:
        x = x.unsqueeze(1)
    if x.ndim != 4 or x.shape[1] != channels or (size is not None and tuple(x.shape[2:]) != (size, size)):
        sides = "height, width" if size is None else f"{size}, {size}"
        raise FederatedError(
            f"{type(module).__name__} got images of shape {list(x.shape)} and expects [B, {channels}, {sides}]: reshape"
            " the data, or make the model for them."
        )
    check_floating(module, x)
    return x
