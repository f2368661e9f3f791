"""How several processes share the work: each trains clients of its own, or all train each client together."""

from lightning_fed.strategies.ddp import ClientsStrategy, WithinClientStrategy

__all__ = ["ClientsStrategy", "WithinClientStrategy"]
