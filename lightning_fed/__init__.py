"""Federated optimization of ordinary LightningModules.

Importing lightning_fed does not import Lightning, so a program may still import either Lightning package. The first use
of a class of lightning_fed selects the one imported by then. It does not import PyTorch either, which keeps light
programs light, such as the app of a Flower client.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lightning_fed.compat.after_torch import after_torch
from lightning_fed._version import __version__

if TYPE_CHECKING:
    from lightning_fed.callbacks import FederatedCallback, RoundProgressBar, RunSummary
    from lightning_fed.core import ClientError, ClientReport, FederatedError, RoundReport
    from lightning_fed.data import FederatedDataModule, FederatedDataset
    from lightning_fed.trainer.loop import FederatedLoop
    from lightning_fed.engines.optimizer import FederatedOptimizer
    from lightning_fed.trainer.trainer import FederatedTrainer

__all__ = [
    "ClientError",
    "ClientReport",
    "FederatedCallback",
    "FederatedDataModule",
    "FederatedDataset",
    "FederatedError",
    "FederatedLoop",
    "FederatedOptimizer",
    "FederatedTrainer",
    "RoundProgressBar",
    "RoundReport",
    "RunSummary",
    "__version__",
]

_MODULES = {
    "callbacks": ("FederatedCallback", "RoundProgressBar", "RunSummary"),
    "core": ("ClientError", "ClientReport", "FederatedError", "RoundReport"),
    "data": ("FederatedDataModule", "FederatedDataset"),
    "trainer.loop": ("FederatedLoop",),
    "engines.optimizer": ("FederatedOptimizer",),
    "trainer.trainer": ("FederatedTrainer",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def _prepare() -> None:
    """Record PyTorch's number of threads before a user sets it, and make torchvision importable."""
    import lightning_fed.trainer.threads  # noqa: F401
    from lightning_fed.compat.torchvision import declare_missing_operators

    declare_missing_operators()


after_torch(_prepare)


def __getattr__(name: str) -> Any:
    """Lazily import a class or a module of the package."""
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(f"lightning_fed.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value
    module = f"lightning_fed.{name}"
    if not name.startswith("_"):
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
    raise AttributeError(f"module 'lightning_fed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
