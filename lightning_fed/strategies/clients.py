"""Several processes, each training clients of its own."""

from typing import Any

import torch
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from lightning_fed._compat import _sync_module_states

__all__ = ["ClientsStrategy"]


class ClientsStrategy(DDPStrategy):
    """Share the clients of every round among processes: ``FederatedTrainer(devices=4, strategy="clients")``.

    Each process trains its own clients on its own device, without any exchange between local steps; their messages are
    summed once a round. Processes start and find each other as Lightning's DDP does it, on CPUs with gloo and on GPUs
    with nccl, on one machine or several. "clients_spawn" and "clients_fork" start them from within Python, as
    "ddp_spawn" and "ddp_fork" do. Arguments are those of :class:`pytorch_lightning.strategies.DDPStrategy`.
    """

    strategy_name = "clients"

    def configure_ddp(self) -> None:
        """Give every process the same initial model, and no gradient reduction."""
        assert self.model is not None
        _sync_module_states(self.model)

    def setup_environment(self) -> None:
        """Join the processes, and take this one's share of the threads of a CPU."""
        super().setup_environment()
        if self.root_device.type == "cpu":
            torch.set_num_threads(max(1, torch.get_num_threads() // self.num_processes))

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
