"""What the strategies of several processes share: Lightning's DDP without its wrapper around the module."""

import atexit
import sys
from typing import Any

import torch.distributed as dist

from lightning_fed.compat.package import pl
from lightning_fed.compat.private import _sync_module_states
from lightning_fed.strategies.peers import Peers, kept_under_test

__all__ = ["UnwrappedDDPStrategy"]


class UnwrappedDDPStrategy(pl.strategies.DDPStrategy):
    """Processes that start and find each other as Lightning's DDP does it, each with the module itself.

    The wrapper ``DistributedDataParallel`` expects one backward for every forward, in every process; here
    ``training_step`` is also called at other points than the current one.
    """

    peers = Peers()

    def setup_distributed(self) -> None:
        """Find the other processes, and leave them before Python ends."""
        was_there = dist.is_initialized()
        with kept_under_test():
            super().setup_distributed()
        if not was_there:
            atexit.register(_leave_group)
        self.peers = Peers.meet(self.global_rank, self.world_size)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the connections to other processes, which a copy makes for itself."""
        connections = ("peers", "shared_memory")
        return {name: value for name, value in super().__getstate__().items() if name not in connections}

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all processes; raise a FederatedError if there are some that are gone."""
        with self.peers.naming():
            super().barrier(*args, **kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        """Return what one process has; raise a FederatedError if there are some that are gone."""
        with self.peers.naming():
            return super().broadcast(*args, **kwargs)

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        """Return the sum or mean of a number; raise a FederatedError if there are processes that are gone."""
        with self.peers.naming():
            return super().reduce(*args, **kwargs)

    def configure_ddp(self) -> None:
        """Give every process the same initial model, and no wrapper."""
        assert self.model is not None
        _sync_module_states(self.model)


def _leave_group() -> None:
    # A thread of gloo's may let go of a tensor only after the exchange it was for, and aborts the process if Python is
    # ending by then, with all results written. After an error, others are to miss this process at once.
    if dist.is_initialized() and getattr(sys, "last_type", None) is None:
        dist.destroy_process_group()
