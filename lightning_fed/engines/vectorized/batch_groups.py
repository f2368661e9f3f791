"""Batches of clients that take a step together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_fed.engines.vectorized.batch_trees import first_batch

__all__ = ["BatchGroup", "LoneBatch", "Turn", "chosen", "on_device"]


@dataclass(frozen=True, slots=True)
class BatchGroup:
    """Clients whose batches have one shape.

    Attributes:
        clients: Their rows in the chunk.
        rows: The same as an index [n]; a slice where they are the first n.
        batch: Their batches, every tensor stacked to [n, B, ...].
        examples: The examples in each batch.
        batch_idx: The index of the batch in the local epoch.
        is_rows: Whether the tensors are rows of tensors of one kind in every group, so that the examples tell their
            shapes.
    """

    clients: Sequence[int]
    rows: slice | Tensor
    batch: Any
    examples: int
    batch_idx: int
    is_rows: bool = False

    @property
    def first(self) -> Any:
        """The batch of the first of the clients."""
        return first_batch(self.batch)


class LoneBatch(BatchGroup):
    """The batch of a single client, which nobody has to stack: its tensors are [B, ...]."""

    @property
    def first(self) -> Any:
        """The batch."""
        return self.batch


class Turn(NamedTuple):
    """A step that adjacent clients take at once, on batches of one size.

    Attributes:
        clients: Their rows in the chunk.
        at: Which of its batches comes now, for each of them.
    """

    clients: slice
    at: Sequence[int]


def on_device(trainer: pl.Trainer, tensors: list[Tensor]) -> list[Tensor]:
    """Convert and move tensors as Lightning does where nobody has transfer hooks."""
    converted: list[Tensor] = trainer.precision_plugin.convert_input(tensors)
    device = trainer.strategy.root_device
    if device.type == "cpu" and all(t.device.type == "cpu" for t in converted):
        return converted
    moved: list[Tensor] = trainer.strategy.batch_to_device(converted, device)
    return moved


def chosen(rows: Sequence[int], active: int) -> slice | Tensor:
    """Return rows of a chunk as an index; as a slice where they are all that are at work, the first ones."""
    return slice(0, active) if len(rows) == active else torch.tensor(rows)
