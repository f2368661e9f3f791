"""Limits of processors: LSTMs in mixed precision, and slow denormal numbers."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import islice

import torch
from torch import nn

from lightning_fed.compat.package import pl
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.flat import FlatParameters
from lightning_fed.core.seeds import preserved_random_state
from lightning_fed.engines.base import WorkPlan
from lightning_fed.engines.gradients import GradientPass


def check_lstm(trainer: pl.Trainer, flat: FlatParameters, some: Callable[[], Iterator[WorkPlan]]) -> None:
    """Raise before the first round if this processor does not support the module's LSTM.

    PyTorch runs an LSTM under autocast in oneDNN, whose bfloat16 LSTM requires AVX-512. A module may run its LSTM
    outside autocast, so this tries its step on a client's first batch.
    """
    if trainer.strategy.root_device.type != "cpu" or not trainer.lightning_module.automatic_optimization:
        return
    with trainer.precision_plugin.forward_context():
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    if dtype is None or not _lstms(trainer.lightning_module) or _has_lstm(dtype):
        return
    gradients, decay = GradientPass(trainer, flat), [0.0] * len(flat.params)
    for plan in islice(some(), 1):
        batches = islice(plan.batches.full(torch.Generator()), 1)
        try:
            with lstm_errors(trainer), preserved_random_state():
                gradients.full(flat.y, batches, plan.batches.size, decay)
        except FederatedError:
            raise
        except Exception:
            return  # reported with the client's name when the client trains


@contextmanager
def lstm_errors(trainer: pl.Trainer) -> Iterator[None]:
    """Replace oneDNN's error with one that names the LSTMs, the precision and the remedies."""
    try:
        yield
    except RuntimeError as error:
        if "primitive descriptor for the LSTM" not in str(error):
            raise
        module = trainer.lightning_module
        raise FederatedError(
            f"precision={trainer.precision!r} cannot run the LSTM of {type(module).__name__}"
            f" ({', '.join(_lstms(module))}) on this processor: PyTorch has no LSTM of that type for it. Set"
            " precision='32-true', or call the layer outside autocast: `with torch.autocast('cpu', enabled=False)`"
            " around it, on float32 input."
        ) from error


def _lstms(module: nn.Module) -> list[str]:
    return [name for name, layer in module.named_modules() if isinstance(layer, nn.LSTM)]


@cache
def _has_lstm(dtype: torch.dtype) -> bool:
    """Return whether this processor can train an LSTM under autocast to a type."""
    try:
        with preserved_random_state(), torch.enable_grad(), torch.autocast("cpu", dtype):
            nn.LSTM(1, 1)(torch.zeros(1, 1, 1))
    except RuntimeError:
        return False
    return True


@contextmanager
def denormals_as_zero() -> Iterator[None]:
    """Flush denormal numbers to zero in this thread; processors are several times slower with them.

    In float32 these are below 1.2e-38. The momentum of a weight with zero gradient, such as the weight of a pixel
    at the border, decays to them within a thousand rounds. Dead networks have such gradients. MimeLite with Adam in
    ``reproduce mime_fig3 --scale part`` takes a third less time in round 1,000.

    Nothing changes with several threads, or if the processor does not support it. The other threads' mode would depend
    on when PyTorch started them, and a resumed run could differ in such numbers.
    """
    smallest = sys.float_info.min
    is_so = smallest / 2 == 0  # the user's setting
    if is_so or torch.get_num_threads() > 1 or not torch.set_flush_denormal(True):
        yield
        return
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
