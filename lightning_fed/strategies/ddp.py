"""Several processes, all training the same client at once."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.compat.package import pl
from lightning_fed.core.errors import FederatedError
from lightning_fed.strategies.split import NO_EXAMPLES, BatchSplit
from lightning_fed.strategies.unwrapped import UnwrappedDDPStrategy

__all__ = ["WithinClientStrategy", "adopt", "split_of"]


class WithinClientStrategy(UnwrappedDDPStrategy):
    """Split every batch of a client among processes: ``FederatedTrainer(devices=4, strategy="ddp")``.

    All processes train the same client at the same time. Each takes its part of every batch, and the gradients are
    summed, weighted by examples, in one reduction per gradient: right after backward, before clipping and before the
    method's correction. Everything after that is the same in all processes. Lightning's :class:`DDPStrategy` becomes
    this strategy in a :class:`lightning_fed.FederatedTrainer`.
    """

    split = BatchSplit()
    _accumulates = False

    def share(self, params: Sequence[Tensor]) -> None:
        """Start to split batches, given the trained parameters."""
        self.split = BatchSplit(params, self.global_rank, self.world_size, self.peers)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``training_step`` on this process's part of a batch, if it has one.

        Raises:
            FederatedError: If there is no loss, while other processes may have one.
        """
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
        """Take the gradient of this process's part of the loss, and sum the gradients of all parts.

        The order is Lightning's, with the sum before ``on_after_backward``. Batches of one optimizer step are summed
        together, after the last of them.
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
        """Leave the sum to a later batch of the same optimizer step."""
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False


def adopt(trainer: pl.Trainer) -> None:
    """Let Lightning's DDP split the batches of clients, in a trainer that has it.

    Raises:
        FederatedError: If it is to do what would change the result.
    """
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
    """Return how the batches of a trainer are split."""
    strategy = trainer.strategy
    return strategy.split if isinstance(strategy, WithinClientStrategy) else BatchSplit()
