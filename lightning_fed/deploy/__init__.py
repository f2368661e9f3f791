"""A run whose clients are elsewhere: the server's half, a site's half, and the messages between them; no transport."""

from lightning_fed.deploy.message import Message
from lightning_fed.deploy.server import FederatedServer
from lightning_fed.deploy.site import FederatedSite

__all__ = ["FederatedServer", "FederatedSite", "Message"]
