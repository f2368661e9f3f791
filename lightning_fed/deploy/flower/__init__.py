"""Carry a run's messages through Flower: a ServerApp on the server, a ClientApp and a resident process on each site.

Importing it does not import PyTorch, because Flower starts an interpreter for every message at a site.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_fed.deploy.flower.client import client_app
    from lightning_fed.deploy.flower.server import server_app

__all__ = ["client_app", "server_app"]

importlib.import_module("lightning_fed.deploy.site_process")  # at once: it notes which process has started this one

_MODULE_OF = {"client_app": "client", "server_app": "server"}


def __getattr__(name: str) -> Any:
    """Import a function when it is first used."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "flwr":
            raise
        raise ModuleNotFoundError('Flower is missing: pip install "lightning_fed[flower]".', name="flwr") from error


def __dir__() -> list[str]:
    return sorted(__all__)
