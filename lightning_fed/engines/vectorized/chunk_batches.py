"""The batches of several clients, step by step, stacked where they have the same shape."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import pytorch_lightning as pl
from torch import Tensor

from lightning_fed._compat import is_overridden
from lightning_fed.engines.base import WorkPlan
from lightning_fed.engines.batch_hooks import TRANSFER_HOOKS
from lightning_fed.engines.gradients import prepare_batch
from lightning_fed.engines.vectorized.batch_groups import BatchGroup, chosen, on_device
from lightning_fed.engines.vectorized.batch_trees import batch_shape, stack_batches
from lightning_fed.engines.vectorized.device_data import ResidentData
from lightning_fed.engines.vectorized.row_batches import OneClient, RowBatches, Stream, are_of_one_kind, fits_one_lookup

__all__ = ["ChunkBatches", "chunk_batches", "has_transfer_hooks"]


class ChunkBatches(Protocol):
    """The local epochs of several clients, cut into steps that they take together."""

    def step(self, active: int) -> list[BatchGroup]:
        """Return the next batches of the first ``active`` clients."""
        ...


def chunk_batches(
    trainer: pl.Trainer,
    plans: Sequence[WorkPlan],
    streams: Sequence[Stream],
    shuffle: bool,
    by_index: bool,
    resident: ResidentData,
    has_hooks: bool,
) -> ChunkBatches:
    """Return the batches of a chunk; straight out of the tensors where all clients are cut out of the same ones.

    Args:
        trainer: The trainer, whose transfer hooks every batch goes through.
        plans: The clients' work, those with the most steps first.
        streams: What makes the generators of their batch orders.
        shuffle: Whether local epochs visit batches in random order.
        by_index: Whether clients at different places of their local epochs must be kept apart.
        resident: The data on the device.
        has_hooks: What :func:`has_transfer_hooks` says.
    """
    if not has_hooks and are_of_one_kind([plan.batches for plan in plans]):
        if len(plans) == 1 and fits_one_lookup(plans[0].batches):
            return OneClient(trainer, plans[0], streams[0], shuffle, resident)
        return RowBatches(trainer, plans, streams, shuffle, by_index, resident)
    return _AnyBatches(trainer, plans, streams, shuffle, by_index, has_hooks)


def has_transfer_hooks(trainer: pl.Trainer) -> bool:
    """Whether module or data module do something of their own to a batch on its way to the device."""
    return any(
        is_overridden(hook, owner, base)
        for hook in TRANSFER_HOOKS
        for owner, base in (
            (trainer.lightning_module, pl.LightningModule),
            (trainer.datamodule, pl.LightningDataModule),
        )
    )


class _AnyBatches:
    """Batches of any kind: each is made by itself, then those of one shape are stacked."""

    def __init__(
        self,
        trainer: pl.Trainer,
        plans: Sequence[WorkPlan],
        streams: Sequence[Stream],
        shuffle: bool,
        by_index: bool,
        has_hooks: bool,
    ) -> None:
        self.trainer, self.by_index, self.has_hooks = trainer, by_index, has_hooks
        self._batches = [_batches(plan, stream, shuffle) for plan, stream in zip(plans, streams, strict=True)]

    def step(self, active: int) -> list[BatchGroup]:
        groups: dict[Any, list[tuple[int, Any, int, int]]] = {}
        for row, client in enumerate(self._batches[:active]):
            batch_idx, batch, examples = next(client)
            is_plain = type(batch) is list and all(type(part) is Tensor for part in batch) and not self.has_hooks
            batch = on_device(self.trainer, batch) if is_plain else prepare_batch(self.trainer, batch)
            key = (batch_shape(batch), examples, batch_idx if self.by_index else 0)
            groups.setdefault(key, []).append((row, batch, examples, batch_idx))
        out = []
        for members in groups.values():
            rows, batches, examples_of, indices = zip(*members, strict=True)
            out.append(BatchGroup(rows, chosen(rows, active), stack_batches(batches), examples_of[0], indices[0]))
        return out


def _batches(plan: WorkPlan, make_stream: Stream, shuffle: bool) -> Iterator[tuple[int, Any, int]]:
    """Yield (index in its local epoch, batch, examples in it) for all of a client's local epochs."""
    stream = make_stream()
    for length in plan.epochs:
        for i, (batch, examples) in enumerate(islice(plan.batches.epoch(stream, shuffle), length)):
            yield i, batch, examples
