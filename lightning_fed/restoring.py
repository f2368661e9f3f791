"""What goes wrong while a checkpoint is restored, in terms of the checkpoint."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from lightning_fed.core.errors import FederatedError

__all__ = ["check_optimizer_states", "restored_from"]

_TELLS = (LookupError, TypeError, AttributeError, ValueError, RuntimeError, OverflowError)


@contextmanager
def restored_from(path: Any, what: str) -> Iterator[None]:
    """Let whatever goes wrong inside be told of the checkpoint that is restored.

    Args:
        path: The checkpoint.
        what: What is restored, in words.

    Raises:
        FederatedError: From the error, naming checkpoint and part; its own kind passes as it is.
    """
    try:
        yield
    except FederatedError:
        raise
    except _TELLS as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = f"{type(error).__name__}: {' '.join(lines[:3])}"
        raise FederatedError(
            f"The checkpoint {path} does not fit this run: restoring {what} ended in {told}. Resume with the model and"
            " the settings it was written with, or start anew, without ckpt_path."
        ) from error


def check_optimizer_states(optimizer: torch.optim.Optimizer, what: str) -> None:
    """Refuse an optimizer's state that is none, when it has been loaded; what its entries are is the optimizer's own.

    Args:
        optimizer: The optimizer.
        what: What it is, in words.

    Raises:
        FederatedError: Naming what cannot be.
    """
    for entries in optimizer.state.values():
        if not isinstance(entries, Mapping):
            raise FederatedError(f"The checkpoint's state of {what} holds a {type(entries).__name__} for a parameter.")
    for group in optimizer.param_groups:
        rate = group.get("lr", 0.0)
        if not isinstance(rate, (int, float, torch.Tensor)) or isinstance(rate, bool):
            raise FederatedError(f"The checkpoint's state of {what} has the learning rate {rate!r}.")
