"""The batches of the clients of a chunk, step by step, those of one shape together."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_fed.compat.package import pl
from lightning_fed.compat.private import is_overridden
from lightning_fed.core.arguments import kind_of
from lightning_fed.data.batches.batches import TensorBatches
from lightning_fed.engines.base import OnlySequentialError, WorkPlan
from lightning_fed.engines.batch_hooks import TRANSFER_HOOKS
from lightning_fed.engines.gradients import prepare_batch
from lightning_fed.engines.vectorized.row_lookup import RowLookup, on_device
from lightning_fed.tracing.traces import kinds

__all__ = [
    "AnyBatches",
    "BatchGroup",
    "RowBatches",
    "Turn",
    "check_tensors",
    "flatten",
    "has_transfer_hooks",
    "unflatten",
]

Stream: TypeAlias = Callable[..., torch.Generator]
"""Makes the generator of the batch orders of a client of an index; seeds another one if given ``reuse``."""


class Turn(NamedTuple):
    """A step of adjacent clients of a chunk.

    Attributes:
        clients: Their rows in the chunk.
        at: Which of its batches comes now, for each of them.
    """

    clients: range
    at: Sequence[int]


class BatchGroup(NamedTuple):
    """Clients whose batches have one shape.

    Attributes:
        clients: Their rows in the chunk.
        leaves: The tensors of their batches, stacked to [n, B, ...]; [B, ...] of a single client.
        spec: What puts a batch together.
        examples: The examples in each batch.
        batch_idx: The index of the batch in the local epoch.
        kind: What tells its shapes from those of other groups of the chunk.
    """

    clients: Sequence[int]
    leaves: Sequence[Tensor]
    spec: Any
    examples: int
    batch_idx: int
    kind: Any

    @property
    def first(self) -> Sequence[Tensor]:
        """The tensors of the batch of the first of the clients."""
        return self.leaves if len(self.clients) == 1 else [leaf[0] for leaf in self.leaves]


class RowBatches:
    """Batches that are rows of tensors of one kind: looked up where the tensors lie, without a loader.

    Args:
        lookup: Where they are looked up.
        plans: The clients' work.
        stream: Makes the generators of their batch orders.
        shuffle: Whether local epochs visit batches in random order.
        by_index: Whether clients at different places of their local epochs must be kept apart.
    """

    def __init__(
        self, lookup: RowLookup, plans: Sequence[WorkPlan], stream: Stream, shuffle: bool, by_index: bool
    ) -> None:
        self._lookup, self._by_index = lookup, by_index
        one = torch.Generator()  # seeded anew for every client, whose orders are all drawn here
        self._rows = [_epoch_rows(plan, stream(plan.participant.index, reuse=one), shuffle) for plan in plans]

    def in_order(self, turns: Sequence[Turn]) -> Iterator[list[BatchGroup]]:
        """Yield the batches of one step after the other, those of one size together."""
        groups_of = [self._groups(turn) for turn in turns]
        found = self._lookup.in_order([members for groups in groups_of for members in groups.values()])
        for groups in groups_of:
            out = []
            for (size, batch_idx), members in groups.items():
                leaves: Sequence[Tensor] = next(found)
                if len(members) > 1:
                    leaves = [t.view(len(members), size, *t.shape[1:]) for t in leaves]
                out.append(BatchGroup([client for client, _ in members], leaves, list, size, batch_idx, kind=size))
            yield out

    def _groups(self, turn: Turn) -> dict[tuple[int, int], list[tuple[int, Tensor]]]:
        """Return the clients of a step with the rows of their batches, by the number of examples and the index."""
        groups: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
        for client, k in zip(turn.clients, turn.at, strict=True):
            batch_idx, rows = self._rows[client][k]
            groups.setdefault((rows.shape[0], batch_idx if self._by_index else 0), []).append((client, rows))
        return groups


class AnyBatches:
    """Batches of any kind: each is made by itself, then those of one shape are stacked.

    Args:
        trainer: The trainer, whose transfer hooks every batch goes through.
        plans, stream, shuffle, by_index: As of :class:`RowBatches`.
        has_hooks: What :func:`has_transfer_hooks` says.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        plans: Sequence[WorkPlan],
        stream: Stream,
        shuffle: bool,
        by_index: bool,
        has_hooks: bool,
    ) -> None:
        self._trainer, self._by_index, self._has_hooks = trainer, by_index, has_hooks
        self._batches = [_batches(plan, stream(plan.participant.index), shuffle) for plan in plans]

    def in_order(self, turns: Sequence[Turn]) -> Iterator[list[BatchGroup]]:
        """Yield the batches of one step after the other, those of one shape together."""
        for turn in turns:
            groups: dict[Any, list[tuple[int, Sequence[Tensor]]]] = {}
            for client in turn.clients:
                batch_idx, batch, examples = next(self._batches[client])
                leaves, spec = flatten(self._prepared(batch))
                check_tensors(leaves)
                key = (examples, batch_idx if self._by_index else 0, spec, kinds(leaves))
                groups.setdefault(key, []).append((client, leaves))
            yield [self._group(key, members) for key, members in groups.items()]

    def _prepared(self, batch: Any) -> Any:
        is_plain = type(batch) is list and all(type(part) is Tensor for part in batch) and not self._has_hooks
        return on_device(self._trainer, batch) if is_plain else prepare_batch(self._trainer, batch)

    def _group(self, key: tuple[int, int, Any, Any], members: Sequence[tuple[int, Sequence[Tensor]]]) -> BatchGroup:
        clients, batches = zip(*members, strict=True)
        examples, batch_idx, spec, _ = key
        leaves = batches[0] if len(batches) == 1 else [torch.stack(column) for column in zip(*batches, strict=True)]
        return BatchGroup(clients, leaves, spec, examples, batch_idx, kind=key)


def _batches(plan: WorkPlan, stream: torch.Generator, shuffle: bool) -> Iterator[tuple[int, Any, int]]:
    """Yield (index in its local epoch, batch, examples in it) for all of a client's local epochs."""
    for length in plan.epochs:
        for i, (batch, examples) in enumerate(islice(plan.batches.epoch(stream, shuffle), length)):
            yield i, batch, examples


def _epoch_rows(plan: WorkPlan, stream: torch.Generator, shuffle: bool) -> list[tuple[int, Tensor]]:
    """Return (index in its local epoch, rows [B]) of every batch of a client."""
    batches = plan.batches
    assert isinstance(batches, TensorBatches)
    out: list[tuple[int, Tensor]] = []
    size = batches.settings.batch_size
    for length in plan.epochs:
        rows = batches.epoch_rows(stream, shuffle)
        out += enumerate(rows.split(size)[:length] if rows.shape[0] > size else (rows,)[:length])
    return out


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


def flatten(batch: Any) -> tuple[Sequence[Tensor], Any]:
    """Return the tensors of a batch, and what :func:`unflatten` needs to put them together again."""
    if type(batch) is list and all(type(part) is Tensor for part in batch):
        return batch, list  # the usual case, at a fraction of the cost
    return pytree.tree_flatten(batch)


def unflatten(leaves: Sequence[Tensor], spec: Any) -> Any:
    """Return the batch that has these tensors."""
    return list(leaves) if spec is list else pytree.tree_unflatten(leaves, spec)


def check_tensors(leaves: Sequence[Any]) -> None:
    """Refuse a batch that holds anything but tensors.

    Raises:
        OnlySequentialError: Naming what it holds.
    """
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise OnlySequentialError(
                f"engine='vectorized' needs batches of tensors only, found {kind_of(leaf)} in one. Leave it out"
                " of the batch, or use engine='sequential'."
            )
