"""Which parameters and buffers of a module stay with each client."""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.errors import FederatedError
from lightning_fed.settings.settings import Settings

__all__ = ["personal_names"]


def personal_names(
    settings: Settings, module: nn.Module, trained: Mapping[str, Any], buffers: Collection[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the parameters, and of the buffers, that stay with each client.

    Args:
        settings: How rounds are run: patterns of the trainer, and of the method.
        module: The module.
        trained: Its trained parameters by name.
        buffers: The names of its buffers.

    Raises:
        FederatedError: If a pattern fits nothing, nothing is left to be shared, or the method cannot go without a whole
            model on the server.
    """
    algorithm = settings.algorithm
    patterns = (*settings.personal, *algorithm.personal_names(module))
    names = (*trained, *buffers)
    found = {pattern: [name for name in names if fnmatchcase(name, pattern)] for pattern in patterns}
    for pattern, fitting in found.items():
        if not fitting:
            close = get_close_matches(pattern, names, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(map(repr, names))}."
            raise FederatedError(
                f"personal={pattern!r} fits no trained parameter and no buffer of {type(module).__name__}. {hint}"
            )
    personal = {name for fitting in found.values() for name in fitting}
    if personal and personal >= trained.keys():
        raise FederatedError(
            f"personal={list(patterns)} leaves no trained parameter of {type(module).__name__} to be shared, so there"
            " is nothing to federate. Leave some parameters out of it."
        )
    if personal:
        _check_method(algorithm)
    return frozenset(trained.keys() & personal), frozenset(personal.intersection(buffers))


def _check_method(algorithm: Algorithm) -> None:
    """Refuse a method that asks for more than the shared part of a model."""
    reasons = {
        "gives clients no local steps to train them in": not algorithm.local_work,
        "takes clients' gradients at the server's model": bool(algorithm.full_grad_at or algorithm.anchor_at),
        "gives every client a whole model of its own": algorithm.init_client_at_start,
        "watches the loss of the server's model": algorithm.population_loss,
    }
    for reason, holds in reasons.items():
        if holds:
            raise FederatedError(
                f"personal parameters do not go with {algorithm!r}, which {reason}: the server has a part of the model"
                " only. Use another method, such as FedAvg or Scaffold('ii')."
            )
