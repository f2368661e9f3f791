"""Several processes, each training clients of its own."""

from functools import cached_property
from typing import Any

from torch.distributed.constants import default_pg_timeout

from lightning_fed.compat.package import pl
from lightning_fed.strategies.shared_memory import SharedMemory
from lightning_fed.strategies.unwrapped import UnwrappedDDPStrategy

__all__ = ["ClientsStrategy"]


class ClientsStrategy(UnwrappedDDPStrategy):
    """Share the clients of every round among processes: ``FederatedTrainer(devices=4, strategy="clients")``.

    Each process trains its own clients on its own device, without any exchange between local steps; their messages are
    summed once a round. Processes start and find each other as Lightning's DDP does it, on CPUs with gloo and on GPUs
    with nccl, on one machine or several. "clients_spawn" and "clients_fork" start them from within Python, as
    "ddp_spawn" and "ddp_fork" do.

    Args:
        *args: Those of :class:`pytorch_lightning.strategies.DDPStrategy`.
        share_memory: Whether processes on the CPUs of one Linux machine exchange through memory that they share, which
            is faster; False: through the process group, as if they were on several machines. The bits are the same.
        **kwargs: Those of :class:`pytorch_lightning.strategies.DDPStrategy`.
    """

    strategy_name = "clients"

    def __init__(self, *args: Any, share_memory: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.share_memory = share_memory

    @cached_property
    def shared_memory(self) -> SharedMemory | None:
        """What processes on the CPUs of one machine share; all processes must ask for it together at first."""
        if not self.share_memory or self.root_device.type != "cpu" or self.world_size == 1:
            return None
        timeout = default_pg_timeout if self._timeout is None else self._timeout
        return SharedMemory.open(self.global_rank, self.world_size, timeout.total_seconds())

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


ClientsStrategy.register_strategies(pl.strategies.StrategyRegistry)
