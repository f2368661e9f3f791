"""What the strategies of several processes share: Lightning's DDP without its wrapper around the module."""

from pytorch_lightning.strategies import DDPStrategy

from lightning_fed._compat import _sync_module_states

__all__ = ["UnwrappedDDPStrategy"]


class UnwrappedDDPStrategy(DDPStrategy):
    """Processes that start and find each other as Lightning's DDP does it, each with the module itself.

    The wrapper ``DistributedDataParallel`` expects one backward for every forward, in every process; here
    ``training_step`` is also called at other points than the current one.
    """

    def configure_ddp(self) -> None:
        """Give every process the same initial model, and no wrapper."""
        assert self.model is not None
        _sync_module_states(self.model)
