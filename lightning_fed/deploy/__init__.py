"""A run whose clients are elsewhere: the server's data module, the sites, and the messages between them.

:mod:`lightning_fed.deploy.flower` carries the messages through Flower. Importing either imports no PyTorch yet.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_fed.deploy.message import Message
    from lightning_fed.deploy.remote import RemoteClients
    from lightning_fed.deploy.site import FederatedSite
    from lightning_fed.deploy.transport import Absent, InProcess, Refusal, Transport, reply_from

__all__ = ["Absent", "FederatedSite", "InProcess", "Message", "Refusal", "RemoteClients", "Transport", "reply_from"]

_MODULE_OF = {"FederatedSite": "site", "Message": "message", "RemoteClients": "remote"}
"""The modules of names; the others are in ``transport``."""


def __getattr__(name: str) -> Any:
    """Import a name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF.get(name, 'transport')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
