"""Options of optimizers, as they were built and as a checkpoint has them."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_fed.core.origin import CHECKPOINT, Origin

__all__ = ["differing_options", "options_of"]


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of every parameter group, without the parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def differing_options(
    built: Sequence[Mapping[str, Any]],
    loaded: Sequence[Mapping[str, Any]],
    is_scheduled: bool,
    origin: Origin = CHECKPOINT,
) -> list[str]:
    """Return what loading a state has changed of an optimizer's options, in words.

    Args:
        built: The options of every group before it was loaded.
        loaded: Those after.
        is_scheduled: Whether a schedule moves the rates, and momentum perhaps, which then differ anyhow; where it notes
            its first rates, these are compared.
        origin: What the run continues from.
    """
    moving = {"lr", "momentum", "betas"} if is_scheduled else {"initial_lr"}
    found: dict[str, None] = {}
    for mine, saved in zip(built, loaded, strict=False):
        for name in mine.keys() & saved.keys() - moving:
            if mine[name] != saved[name]:
                shown = "lr" if name == "initial_lr" else name
                found[f"{shown}={saved[name]!r} ({origin.this} has {mine[name]!r})"] = None
    return sorted(found)
