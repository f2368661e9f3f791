"""Strategies for several processes: each trains different clients, or all train each client together."""

from lightning_fed.strategies.ddp import ClientsStrategy, WithinClientStrategy

__all__ = ["ClientsStrategy", "WithinClientStrategy"]
