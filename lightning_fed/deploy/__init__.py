"""A run whose clients are elsewhere: the server's half, a site's half, and the messages between them; no transport.

:mod:`lightning_fed.deploy.flower` carries the messages through Flower. Importing either imports no PyTorch yet.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_fed.deploy.message import Message
    from lightning_fed.deploy.server import FederatedServer
    from lightning_fed.deploy.site import FederatedSite

__all__ = ["FederatedServer", "FederatedSite", "Message"]

_HOME_OF = {"FederatedServer": "server", "FederatedSite": "site", "Message": "message"}


def __getattr__(name: str) -> Any:
    """Import a class when it is first used."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
