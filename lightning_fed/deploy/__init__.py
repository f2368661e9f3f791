"""A run with remote clients: the server's data module, the sites, and the messages between them.

:mod:`lightning_fed.deploy.flower` and :mod:`lightning_fed.deploy.flare` carry the messages through Flower and NVFlare.
Importing any of these packages does not import PyTorch.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_fed.deploy.message import Message
    from lightning_fed.deploy.remote import RemoteClients
    from lightning_fed.deploy.site import FederatedSite
    from lightning_fed.deploy.transport import Absent, InProcess, Refusal, Transport, reply_from

__all__ = ["Absent", "FederatedSite", "InProcess", "Message", "Refusal", "RemoteClients", "Transport", "reply_from"]


def importer(package: str, module_of: Mapping[str, str], needs: str = "", missing: str = "") -> Callable[[str], Any]:
    """Return a ``__getattr__`` that lazily imports the names of a package.

    ``module_of`` maps names to modules. If the package ``needs`` is not installed, the error message is ``missing``.
    """

    def imported(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)
        except ModuleNotFoundError as error:
            if not needs or (error.name or "").partition(".")[0] != needs:
                raise
            raise ModuleNotFoundError(missing, name=needs) from error

    return imported


_PLACES = {"FederatedSite": "site", "Message": "message", "RemoteClients": "remote"}
__getattr__ = importer(__name__, {name: _PLACES.get(name, "transport") for name in __all__})
