"""How several processes share the work: each trains clients of its own."""

from lightning_fed.strategies.clients import ClientsStrategy

__all__ = ["ClientsStrategy"]
