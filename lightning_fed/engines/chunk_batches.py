"""The batches of several clients, step by step, stacked where they have the same shape."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeAlias

import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_fed._compat import is_overridden
from lightning_fed.data.batches import TensorBatches
from lightning_fed.engines.functional import batch_shape, first_batch, stack_batches
from lightning_fed.engines.gradients import prepare_batch
from lightning_fed.engines.hooks import TRANSFER_HOOKS
from lightning_fed.engines.plan import WorkPlan
from lightning_fed.engines.resident import ResidentData

__all__ = [
    "Alike",
    "BatchGroup",
    "ChunkBatches",
    "OneClient",
    "SharedTensors",
    "Stream",
    "chunk_batches",
    "fits_one_lookup",
    "has_transfer_hooks",
    "on_device",
]

Stream: TypeAlias = Callable[..., torch.Generator]
"""Makes the generator of a client's batch orders; seeds another one if given ``reuse``."""

_GATHERED = 2**26  # bytes of a local epoch that are looked up at once


@dataclass(frozen=True, slots=True)
class BatchGroup:
    """Clients whose batches have one shape.

    Attributes:
        clients: Their rows in the chunk.
        rows: The same as an index [n]; a slice where they are the first n.
        batch: Their batches, every tensor stacked to [n, B, ...].
        examples: The examples in each batch.
        batch_idx: The index of the batch in the local epoch.
        is_rows: Whether the tensors are rows of the same ones in every group, so that the examples tell their shapes.
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


class _Alone(BatchGroup):
    """The batch of a single client, which nobody has to stack: its tensors are [B, ...]."""

    @property
    def first(self) -> Any:
        return self.batch


@dataclass(frozen=True, slots=True)
class Alike:
    """Batches of a single client with as many examples each, one after the other in a local epoch.

    Attributes:
        batches: The tensors of each, [B, ...].
        examples: The examples in each.
        start: The index of the first in the local epoch.
    """

    batches: Sequence[list[Tensor]]
    examples: int
    start: int

    def group(self, i: int) -> BatchGroup:
        """Return one of them."""
        return _Alone((0,), slice(0, 1), self.batches[i], self.examples, self.start + i, is_rows=True)


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
    first = plans[0].batches
    shares = not has_hooks and all(
        isinstance(plan.batches, TensorBatches) and plan.batches.is_plain and plan.batches.tensors is first.tensors
        for plan in plans
        if isinstance(first, TensorBatches)
    )
    if shares and isinstance(first, TensorBatches):
        if len(plans) == 1 and fits_one_lookup(first):
            return OneClient(trainer, first, plans[0], streams[0], shuffle, resident)
        return SharedTensors(trainer, first.tensors, plans, streams, shuffle, by_index, resident)
    return _AnyBatches(trainer, plans, streams, shuffle, by_index)


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
    ) -> None:
        self.trainer, self.by_index = trainer, by_index
        self._batches = [_batches(plan, stream, shuffle) for plan, stream in zip(plans, streams, strict=True)]

    def step(self, active: int) -> list[BatchGroup]:
        groups: dict[Any, list[tuple[int, Any, int, int]]] = {}
        for row, client in enumerate(self._batches[:active]):
            batch_idx, batch, examples = next(client)
            batch = prepare_batch(self.trainer, batch)
            key = (batch_shape(batch), examples, batch_idx if self.by_index else 0)
            groups.setdefault(key, []).append((row, batch, examples, batch_idx))
        out = []
        for members in groups.values():
            rows, batches, examples_of, indices = zip(*members, strict=True)
            out.append(BatchGroup(rows, _chosen(rows, active), stack_batches(batches), examples_of[0], indices[0]))
        return out


class OneClient:
    """Batches of a single client that are rows of tensors: one lookup for a whole local epoch."""

    def __init__(
        self,
        trainer: pl.Trainer,
        batches: TensorBatches,
        plan: WorkPlan,
        stream: Stream,
        shuffle: bool,
        resident: ResidentData,
    ) -> None:
        self._trainer, self._batches, self._epochs = trainer, batches, plan.epochs
        self._stream, self._shuffle, self._resident = stream, shuffle, resident
        self._groups = (runs.group(i) for runs in self.runs() for i in range(len(runs.batches)))

    def runs(self) -> Iterator[Alike]:
        """Yield all batches of the local work, those of one size together; or :meth:`step` yields them one by one."""
        size, stream = self._batches.settings.batch_size, self._stream()
        for length in self._epochs:
            rows = self._batches.epoch_rows(stream, self._shuffle)[: length * size]
            epoch = look_up(self._trainer, self._resident, self._batches, rows)
            batches = [list(batch) for batch in zip(*(t.split(size) for t in epoch), strict=True)]
            full, last = divmod(len(rows), size)
            if full:
                yield Alike(batches[:full], size, 0)
            if last:
                yield Alike(batches[full:], last, full)

    def step(self, active: int) -> list[BatchGroup]:
        """Return the next batch."""
        return [next(self._groups)]


class SharedTensors:
    """Batches that are rows of the same tensors: one lookup for all clients.

    Attributes:
        rows: For every client its batches: the index in its local epoch, and the rows [B].
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        tensors: tuple[Tensor, ...],
        plans: Sequence[WorkPlan],
        streams: Sequence[Stream],
        shuffle: bool,
        by_index: bool,
        resident: ResidentData,
    ) -> None:
        self.trainer, self.tensors, self.by_index = trainer, resident.of(tensors), by_index
        self._step = 0
        one = torch.Generator()  # whose orders are drawn right away, client by client
        on_host = [_epoch_rows(plan, s(reuse=one), shuffle) for plan, s in zip(plans, streams, strict=True)]
        moved = iter(resident.index([rows for client in on_host for _, rows in client]))
        self.rows = [[(batch_idx, next(moved)) for batch_idx, _ in client] for client in on_host]

    def step(self, active: int) -> list[BatchGroup]:
        """Return the next batches of the first clients, those of one size together."""
        k, self._step = self._step, self._step + 1
        groups: dict[tuple[int, int], list[int]] = {}
        for client, batches in enumerate(self.rows[:active]):
            batch_idx, rows = batches[k]
            groups.setdefault((len(rows), batch_idx if self.by_index else 0), []).append(client)
        return [self._group(clients, size, k, active) for (size, _), clients in groups.items()]

    def _group(self, clients: Sequence[int], size: int, k: int, active: int) -> BatchGroup:
        batch = self._picked([self.rows[client][k][1] for client in clients], size)
        return BatchGroup(clients, _chosen(clients, active), batch, size, self.rows[clients[0]][k][0], is_rows=True)

    def alone(self, client: int, k: int) -> BatchGroup:
        """Return one client's batch k."""
        batch_idx, rows = self.rows[client][k]
        batch = on_device(self.trainer, [t.index_select(0, rows.to(t.device)) for t in self.tensors])
        return _Alone((client,), slice(0, 1), batch, len(rows), batch_idx, is_rows=True)

    def together(self, clients: slice, at: Sequence[int]) -> BatchGroup:
        """Return the next batches of adjacent clients, all of one size; ``at`` says which is each client's next."""
        members = range(clients.start, clients.stop)
        if len(members) == 1:
            return self.alone(members[0], at[members[0]])
        found = [self.rows[client][at[client]] for client in members]
        size = len(found[0][1])
        batch = self._picked([rows for _, rows in found], size)
        return BatchGroup(members, slice(0, len(members)), batch, size, found[0][0], is_rows=True)

    def _picked(self, rows: Sequence[Tensor], size: int) -> list[Tensor]:
        """Look up the rows of several batches of one size, stacked."""
        index = torch.cat(list(rows))
        picked = [t.index_select(0, index.to(t.device)) for t in self.tensors]
        return on_device(self.trainer, [t.view(len(rows), size, *t.shape[1:]) for t in picked])


def look_up(trainer: pl.Trainer, resident: ResidentData, batches: TensorBatches, rows: Tensor) -> list[Tensor]:
    """Return rows of the tensors that a client is cut out of, on the device."""
    return on_device(trainer, [t.index_select(0, rows.to(t.device)) for t in resident.of(batches.tensors)])


def on_device(trainer: pl.Trainer, tensors: list[Tensor]) -> list[Tensor]:
    """Convert and move tensors as Lightning does where nobody has transfer hooks."""
    converted: list[Tensor] = trainer.precision_plugin.convert_input(tensors)
    device = trainer.strategy.root_device
    return converted if device.type == "cpu" else trainer.strategy.batch_to_device(converted, device)


def fits_one_lookup(batches: TensorBatches) -> bool:
    """Whether a local epoch is small enough to be looked up at once."""
    return batches.size * sum(t.element_size() * (t.numel() // max(1, len(t))) for t in batches.tensors) <= _GATHERED


def _batches(plan: WorkPlan, make_stream: Stream, shuffle: bool) -> Iterator[tuple[int, Any, int]]:
    """Yield (index in its local epoch, batch, examples in it) for all of a client's local epochs."""
    stream = make_stream()
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
        out += enumerate(rows.split(size)[:length] if rows.numel() > size else (rows,)[:length])
    return out


def _chosen(rows: Sequence[int], active: int) -> slice | Tensor:
    return slice(0, active) if len(rows) == active else torch.tensor(rows)
