"""Carry a run's messages through NVFlare: a controller in the server's job, and a loop of the Client API on each site.

Importing it imports no PyTorch and no NVFlare.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_fed.deploy.flare.controller import RoundsController
    from lightning_fed.deploy.flare.site import serve_site
    from lightning_fed.deploy.flare.transport import FlareTransport

__all__ = ["FlareTransport", "RoundsController", "serve_site"]

_MODULE_OF = {"FlareTransport": "transport", "RoundsController": "controller", "serve_site": "site"}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "nvflare":
            raise
        what = 'NVFlare 2.9 is missing: pip install "lightning_fed[nvflare]".'
        raise ModuleNotFoundError(what, name="nvflare") from error
