"""Carry a run's messages through Flower: a ServerApp on the server, a ClientApp and a resident process on each site.

Importing it does not import PyTorch, since Flower starts an interpreter for every message at a site.
"""

from typing import TYPE_CHECKING

import lightning_fed.deploy.site_process  # noqa: F401  # eagerly: it records the parent process
from lightning_fed.deploy import importer

if TYPE_CHECKING:
    from lightning_fed.deploy.flower.client import client_app
    from lightning_fed.deploy.flower.server import server_app

__all__ = ["client_app", "server_app"]

_MODULE_OF = {"client_app": "client", "server_app": "server"}
__getattr__ = importer(__name__, _MODULE_OF, "flwr", 'Flower is missing: pip install "lightning_fed[flower]".')
