"""Lightning's DDP without its wrapper: processes that share the clients of a round, or the batches of each client."""

import atexit
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous
from torch.optim import Optimizer

from lightning_fed.compat.package import pl
from lightning_fed.compat.private import _sync_module_states
from lightning_fed.core.errors import FederatedError
from lightning_fed.strategies.peers import NO_PEERS, Peers, check_addresses, monitored_connections
from lightning_fed.strategies.shared_memory import SharedMemory
from lightning_fed.strategies.split import NO_EXAMPLES, BatchSplit


class UnwrappedDDPStrategy(pl.strategies.DDPStrategy):
    """Processes that start and connect like Lightning's DDP, each with the unwrapped module.

    The wrapper ``DistributedDataParallel`` expects one backward per forward in every process. Here, ``training_step``
    is also called at other points.
    """

    peers = NO_PEERS
    alone = ""  # the current work of each process on its own, if any

    @contextmanager
    def working_alone(self, what: str) -> Iterator[None]:
        """Refuse exchanges by user code inside, because each process does ``what`` at its own pace."""
        before, self.alone = self.alone, what
        try:
            yield
        finally:
            self.alone = before

    def _check_together(self, call: str) -> None:
        """Raise if each process works alone: an exchange would wait forever, or mix different values."""
        if self.alone:
            raise FederatedError(
                f"{call} waits for all processes, and here each of them {self.alone}: it would wait forever, or mix the"
                " values of different ones. Call it in a hook that all processes reach together, such as"
                " on_train_epoch_end, or use one process."
            )

    def setup_distributed(self) -> None:
        """Connect to the other processes, and disconnect before Python exits."""
        was_there = dist.is_initialized()
        with monitored_connections(), self._checked_addresses(is_due=not was_there):
            super().setup_distributed()
        if not was_there:
            atexit.register(_leave_group)
        self.peers = Peers.meet(self.global_rank, self.world_size)

    @contextmanager
    def _checked_addresses(self, is_due: bool) -> Iterator[None]:
        """Raise if machines cannot reach each other at gloo's addresses, before gloo waits for them."""
        environment = self.cluster_environment
        if not is_due or self.num_nodes == 1 or environment is None or "gloo" not in self._get_process_group_backend():
            yield
            return
        self.set_world_ranks()
        os.environ |= {"MASTER_ADDR": environment.main_address, "MASTER_PORT": str(environment.main_port)}
        timeout = default_pg_timeout if self._timeout is None else self._timeout
        store, rank, size = next(rendezvous("env://", self.global_rank, self.world_size, timeout=timeout))
        check_addresses(store, rank, size)
        yield  # keeps the store until the process group has its own

    def __getstate__(self) -> dict[str, Any]:
        """Omit the connections to other processes, because a copy opens its own."""
        connections = ("peers", "shared_memory")
        return {name: value for name, value in super().__getstate__().items() if name not in connections}

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all processes; raise a FederatedError if some are gone."""
        self._check_together("trainer.strategy.barrier()")
        with self.peers.naming():
            super().barrier(*args, **kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        """Return one process's value; raise a FederatedError if some processes are gone."""
        self._check_together("trainer.strategy.broadcast(), which trainer.log_dir calls too,")
        with self.peers.naming():
            return super().broadcast(*args, **kwargs)

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        """Return the sum or mean of a number; raise a FederatedError if some processes are gone."""
        self._check_together("trainer.strategy.reduce()")
        with self.peers.naming():
            return super().reduce(*args, **kwargs)

    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        """Return every process's tensor; raise a FederatedError if some processes are gone."""
        self._check_together("self.all_gather()")
        with self.peers.naming():
            return super().all_gather(*args, **kwargs)

    def configure_ddp(self) -> None:
        """Give every process the same initial model, without a wrapper."""
        assert self.model is not None
        _sync_module_states(self.model)


def _leave_group() -> None:
    # A gloo thread may release a tensor after its exchange. If Python is already exiting, it aborts the process, after
    # all results are written. After an error, keep the group: other processes should notice this one's end at once.
    if dist.is_initialized() and getattr(sys, "last_type", None) is None:
        dist.destroy_process_group()


class ClientsStrategy(UnwrappedDDPStrategy):
    """Divide the clients of every round among processes: ``FederatedTrainer(devices=4, strategy="clients")``.

    Each process trains its clients on its device, without exchanges between local steps; the messages are summed once a
    round. Processes start and connect like Lightning's DDP, on CPUs with gloo and on GPUs with nccl, on one machine or
    several. "clients_spawn" and "clients_fork" start them from Python, like "ddp_spawn" and "ddp_fork".

    Args:
        *args: As for :class:`pytorch_lightning.strategies.DDPStrategy`.
        share_memory: Whether processes on the CPUs of one Linux machine communicate through shared memory, which is
            faster. False uses the process group, as on several machines, with the same bits.
        **kwargs: As for :class:`pytorch_lightning.strategies.DDPStrategy`.
    """

    strategy_name = "clients"

    def __init__(self, *args: Any, share_memory: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.share_memory = share_memory

    @cached_property
    def shared_memory(self) -> SharedMemory | None:
        """The memory shared by processes on one machine's CPUs; all processes must make the first access."""
        if not self.share_memory or self.root_device.type != "cpu" or self.world_size == 1:
            return None
        timeout = default_pg_timeout if self._timeout is None else self._timeout
        return SharedMemory.open(self.global_rank, self.world_size, timeout.total_seconds())

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the strategy by name."""
        for suffix, start_method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork")):
            strategy_registry.register(
                f"{cls.strategy_name}{suffix}",
                cls,
                description=f"Clients shared among processes ({start_method})",
                override=True,
                start_method=start_method,
            )


ClientsStrategy.register_strategies(pl.strategies.StrategyRegistry)


class WithinClientStrategy(UnwrappedDDPStrategy):
    """Split every batch of a client among processes: ``FederatedTrainer(devices=4, strategy="ddp")``.

    All processes train the same client at the same time. Each takes a part of every batch, and one reduction sums the
    gradients, weighted by examples: right after backward, before clipping and the method's correction. Everything after
    that is identical in all processes. Lightning's :class:`DDPStrategy` becomes this strategy in a
    :class:`lightning_fed.FederatedTrainer`.
    """

    split = BatchSplit()
    _accumulates = False

    def share(self, params: Sequence[Tensor]) -> None:
        """Start splitting batches, given the trained parameters."""
        self.split = BatchSplit(params, self.global_rank, self.world_size, self.peers)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``training_step`` on this process's part of a batch, if it has one."""
        if args[0] is NO_EXAMPLES:
            return torch.zeros((), device=self.root_device, requires_grad=True)
        output = super().training_step(*args, **kwargs)
        if output is None and self.split.size > 1:
            raise FederatedError(
                "training_step returned None for a part of a batch: whether a step is taken would depend on how batches"
                " are split. Return a loss that is zero, such as 0.0 * self(x).sum(), or set strategy='clients', which"
                " leaves batches whole."
            )
        return output

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the gradient of this process's part of the loss, and sum the gradients of all parts.

        The order is Lightning's, with the sum before ``on_after_backward``. Batches of one optimizer step are summed
        once, after the last.
        """
        module, precision = self.lightning_module, self.precision_plugin
        assert module is not None
        self.pre_backward(closure_loss)
        closure_loss = precision.pre_backward(closure_loss, module)
        precision.backward(closure_loss * self.split.fraction, module, optimizer, *args, **kwargs)
        if self.split.size > 1 and not self._accumulates:
            self.split.reduce_gradients()
        closure_loss = precision.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Defer the sum to a later batch of the same optimizer step."""
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False


def adopt(trainer: pl.Trainer) -> None:
    """Make Lightning's DDP in a trainer split the batches of clients."""
    strategy = trainer.strategy
    if type(strategy) is not pl.strategies.DDPStrategy:
        return
    hooks = {"ddp_comm_hook": strategy._ddp_comm_hook, "ddp_comm_state": strategy._ddp_comm_state}
    for name, value in {**hooks, "model_averaging_period": strategy._model_averaging_period}.items():
        if value is not None:
            raise FederatedError(
                f"DDPStrategy({name}={value!r}) is not supported: gradients of a client are summed exactly, in one"
                f" reduction. Leave {name} out."
            )
    strategy.__class__ = WithinClientStrategy


def split_of(trainer: pl.Trainer) -> BatchSplit:
    """Return the batch split of the trainer's strategy."""
    strategy = trainer.strategy
    return strategy.split if isinstance(strategy, WithinClientStrategy) else BatchSplit()
