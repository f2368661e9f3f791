"""The core that all other packages use. It imports torch only for names that need it, and never Lightning."""

import importlib
from typing import TYPE_CHECKING, Any

from lightning_fed.core.errors import ClientError, FederatedError

if TYPE_CHECKING:
    from lightning_fed.core.rounds import ClientReport, Cohort, RoundReport, Run, Step, Update
    from lightning_fed.core.types import ClientId, State, Vector

__all__ = [
    "ClientError",
    "ClientId",
    "ClientReport",
    "Cohort",
    "FederatedError",
    "RoundReport",
    "Run",
    "State",
    "Step",
    "Update",
    "Vector",
]


def __getattr__(name: str) -> Any:
    """Import a name lazily, so that commands that only raise errors do not need PyTorch."""
    if name not in __all__:
        raise AttributeError(f"module 'lightning_fed.core' has no attribute {name!r}")
    module = "types" if name in ("ClientId", "State", "Vector") else "rounds"
    return getattr(importlib.import_module(f"lightning_fed.core.{module}"), name)
