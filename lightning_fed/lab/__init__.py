"""What is built with the library: experiments and sweeps, diagnosis, comparisons, and the other commands of our own.

Importing it imports nothing of them, so that the list of experiments is quick to show.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_fed.lab.comparing import compare
    from lightning_fed.lab.reproducing import reproduce
    from lightning_fed.lab.sweeping import sweep

__all__ = ["compare", "reproduce", "sweep"]

_HOMES = {"compare": "comparing", "reproduce": "reproducing", "sweep": "sweeping"}


def __getattr__(name: str) -> Any:
    """Import a command when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lightning_fed.lab' has no attribute {name!r}")
    command = getattr(importlib.import_module(f"lightning_fed.lab.{_HOMES[name]}"), name)
    globals()[name] = command
    return command
