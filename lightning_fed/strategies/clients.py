"""Several processes, each training clients of its own."""

from typing import Any

from pytorch_lightning.strategies import StrategyRegistry

from lightning_fed.strategies.unwrapped import UnwrappedDDPStrategy

__all__ = ["ClientsStrategy"]


class ClientsStrategy(UnwrappedDDPStrategy):
    """Share the clients of every round among processes: ``FederatedTrainer(devices=4, strategy="clients")``.

    Each process trains its own clients on its own device, without any exchange between local steps; their messages are
    summed once a round. Processes start and find each other as Lightning's DDP does it, on CPUs with gloo and on GPUs
    with nccl, on one machine or several. "clients_spawn" and "clients_fork" start them from within Python, as
    "ddp_spawn" and "ddp_fork" do. Arguments are those of :class:`pytorch_lightning.strategies.DDPStrategy`.
    """

    strategy_name = "clients"

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make the strategy known by name."""
        for suffix, start_method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork")):
            strategy_registry.register(
                f"{cls.strategy_name}{suffix}",
                cls,
                description=f"Clients shared among processes ({start_method})",
                override=True,
                start_method=start_method,
            )


ClientsStrategy.register_strategies(StrategyRegistry)
