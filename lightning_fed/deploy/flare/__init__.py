"""Carry a run's messages through NVFlare: a controller in the server's job, and a loop of the Client API on each site.

Importing it imports neither PyTorch nor NVFlare.
"""

from typing import TYPE_CHECKING

from lightning_fed.deploy import importer

if TYPE_CHECKING:
    from lightning_fed.deploy.flare.controller import RoundsController
    from lightning_fed.deploy.flare.site import serve_site
    from lightning_fed.deploy.flare.transport import FlareTransport

__all__ = ["FlareTransport", "RoundsController", "serve_site"]

_MODULE_OF = {"FlareTransport": "transport", "RoundsController": "controller", "serve_site": "site"}
_MISSING = 'NVFlare 2.9 is missing: pip install "lightning_fed[nvflare]".'
__getattr__ = importer(__name__, _MODULE_OF, "nvflare", _MISSING)
