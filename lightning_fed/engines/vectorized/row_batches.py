"""Batches of clients that are rows of tensors: looked up where the tensors lie, without a loader."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_fed.data.batches import ClientBatches, TensorBatches
from lightning_fed.engines.base import WorkPlan
from lightning_fed.engines.vectorized.batch_groups import BatchGroup, LoneBatch, Turn, chosen, on_device
from lightning_fed.engines.vectorized.device_data import ResidentData

__all__ = [
    "Alike",
    "OneClient",
    "RowBatches",
    "RowSource",
    "Stream",
    "are_of_one_kind",
    "fits_one_lookup",
    "is_rows",
    "look_up",
]

Stream: TypeAlias = Callable[..., torch.Generator]
"""Makes the generator of a client's batch orders; seeds another one if given ``reuse``."""

_GATHERED = 2**26  # bytes of a local epoch that are looked up at once
_AHEAD = 2**22  # bytes of several steps that are looked up at once
_JOINED = 2**25  # bytes of the tensors of several clients that are put side by side


def is_rows(batches: ClientBatches) -> bool:
    """Whether a batch is nothing but rows of tensors, which takes no randomness but the order's."""
    return isinstance(batches, TensorBatches) and batches.is_plain


def are_of_one_kind(clients: Sequence[ClientBatches]) -> bool:
    """Whether all clients' batches are rows of as many tensors of the same types, shapes and places."""
    rows = [b for b in clients if isinstance(b, TensorBatches)]
    if not clients or len(rows) < len(clients):
        return False
    sorts = {(id(b.tensors), id(b.settings)): b for b in rows}
    if not all(b.is_plain for b in sorts.values()):
        return False
    kinds = {tuple((t.dtype, t.device, t.shape[1:]) for t in b.tensors) for b in sorts.values()}
    return len(kinds) == 1


class RowSource:
    """Where the rows of several clients are looked up.

    Clients that are cut out of the same tensors take one lookup. Tensors of clients that have their own are put side by
    side first if they are small; each client has a lookup of its own if they are not.

    Args:
        trainer: The trainer, which says where batches go.
        clients: The clients, of one kind.
        resident: The data on the device.
    """

    def __init__(self, trainer: pl.Trainer, clients: Sequence[TensorBatches], resident: ResidentData) -> None:
        self._trainer, self._resident = trainer, resident
        self._own = [b.tensors for b in clients]
        sources = list({id(tensors): tensors for tensors in self._own}.values())
        self._whole: Sequence[Tensor] | None = None
        self._starts = [0] * len(clients)
        of_each = sum(t.element_size() * (t.numel() // max(1, len(t))) for t in clients[0].tensors)
        self._ahead = _AHEAD // max(1, of_each)
        if len(sources) == 1:
            self._whole = resident.of(sources[0])
        elif sum(t.numel() * t.element_size() for tensors in sources for t in tensors) <= _JOINED:
            joined = [torch.cat(column) for column in zip(*sources, strict=True)]
            self._whole = joined if resident.is_near(resident.device) else [t.to(resident.device) for t in joined]
            starts, start = dict[int, int](), 0
            for tensors in sources:
                starts[id(tensors)], start = start, start + len(tensors[0])
            self._starts = [starts[id(tensors)] for tensors in self._own]

    def places(self, client: int, rows: Tensor) -> Tensor:
        """Return where rows of a client's tensors are looked up."""
        return rows + self._starts[client] if self._starts[client] else rows

    def moved(self, places: list[Tensor]) -> list[Tensor]:
        """Return what :meth:`places` returned where lookups take it from."""
        return places if self._whole is None else self._resident.index(places)

    def alone(self, client: int, places: Tensor) -> list[Tensor]:
        """Return some rows of one client, [B, ...]."""
        tensors = self._own[client] if self._whole is None else self._whole
        return on_device(self._trainer, [t.index_select(0, places.to(t.device)) for t in tensors])

    def in_order(self, steps: Sequence[Sequence[tuple[int, Tensor]]]) -> Iterator[list[Tensor]]:
        """Yield the rows of one step after the other, [n * B, ...]; those of several are looked up at once.

        Args:
            steps: For every step its clients, and where the rows of each are looked up [B].
        """
        if self._whole is None:
            for step in steps:
                own = [self.alone(client, places) for client, places in step]
                yield own[0] if len(own) == 1 else [torch.cat(column) for column in zip(*own, strict=True)]
            return
        places: list[Tensor] = []
        lengths: list[int] = []
        for i, step in enumerate(steps):
            places += (own for _, own in step)
            lengths.append(sum(own.shape[0] for _, own in step))
            if i + 1 == len(steps) or sum(lengths) >= self._ahead:
                found = self.alone(0, places[0] if len(places) == 1 else torch.cat(places))
                yield from (list(rows) for rows in zip(*(t.split_with_sizes(lengths) for t in found), strict=True))
                places, lengths = [], []

    def together(self, clients: Sequence[int], places: Sequence[Tensor]) -> list[Tensor]:
        """Return as many rows of each of several clients, stacked to [n, B, ...]."""
        if self._whole is None:
            found = [
                [t.index_select(0, part.to(t.device)) for t in self._own[client]]
                for client, part in zip(clients, places, strict=True)
            ]
            return on_device(self._trainer, [torch.stack(column) for column in zip(*found, strict=True)])
        index, count = torch.cat(list(places)), len(places)
        picked = [t.index_select(0, index.to(t.device)) for t in self._whole]
        return on_device(self._trainer, [t.view(count, len(index) // count, *t.shape[1:]) for t in picked])


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
        return LoneBatch((0,), slice(0, 1), self.batches[i], self.examples, self.start + i, is_rows=True)


class OneClient:
    """Batches of a single client that are rows of tensors: one lookup for a whole local epoch."""

    def __init__(
        self,
        trainer: pl.Trainer,
        plan: WorkPlan,
        stream: Stream,
        shuffle: bool,
        resident: ResidentData,
    ) -> None:
        self._trainer, self._batches, self._epochs = trainer, _tensor_batches(plan), plan.epochs
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


class RowBatches:
    """Batches of several clients that are rows of tensors of one kind.

    Attributes:
        kinds: The types and shapes of the tensors' rows.
        rows: For every client its batches: the index in its local epoch, and where its rows are looked up [B].
        sizes: The examples of each of these batches.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        plans: Sequence[WorkPlan],
        streams: Sequence[Stream],
        shuffle: bool,
        by_index: bool,
        resident: ResidentData,
    ) -> None:
        self.by_index = by_index
        self._source = source = RowSource(trainer, [_tensor_batches(plan) for plan in plans], resident)
        self.kinds = tuple((t.dtype, t.shape[1:]) for t in _tensor_batches(plans[0]).tensors)
        self._step = 0
        one = torch.Generator()  # whose orders are drawn right away, client by client
        on_host = [
            [(batch_idx, source.places(client, rows)) for batch_idx, rows in _epoch_rows(plan, s(reuse=one), shuffle)]
            for client, (plan, s) in enumerate(zip(plans, streams, strict=True))
        ]
        moved = iter(source.moved([rows for client in on_host for _, rows in client]))
        self.rows = [[(batch_idx, next(moved)) for batch_idx, _ in client] for client in on_host]
        self.sizes = [[rows.shape[0] for _, rows in client] for client in on_host]

    def step(self, active: int) -> list[BatchGroup]:
        """Return the next batches of the first clients, those of one size together."""
        k, self._step = self._step, self._step + 1
        groups: dict[tuple[int, int], list[int]] = {}
        for client, batches in enumerate(self.rows[:active]):
            batch_idx, _ = batches[k]
            groups.setdefault((self.sizes[client][k], batch_idx if self.by_index else 0), []).append(client)
        return [self._group(clients, size, k, active) for (size, _), clients in groups.items()]

    def _group(self, clients: Sequence[int], size: int, k: int, active: int) -> BatchGroup:
        batch = self._source.together(clients, [self.rows[client][k][1] for client in clients])
        return BatchGroup(clients, chosen(clients, active), batch, size, self.rows[clients[0]][k][0], is_rows=True)

    def in_turns(self, turns: Sequence[Turn]) -> Iterator[BatchGroup]:
        """Yield the batches of steps that adjacent clients take at once."""
        members = [range(turn.clients.start, turn.clients.stop) for turn in turns]
        places = [
            [(client, self.rows[client][k][1]) for client, k in zip(own, turn.at, strict=True)]
            for own, turn in zip(members, turns, strict=True)
        ]
        for own, turn, rows in zip(members, turns, self._source.in_order(places), strict=True):
            first, n = own[0], len(own)
            batch_idx, size = self.rows[first][turn.at[0]][0], self.sizes[first][turn.at[0]]
            if n == 1:
                yield LoneBatch(own, slice(0, 1), rows, size, batch_idx, is_rows=True)
            else:
                batch = [t.view(n, size, *t.shape[1:]) for t in rows]
                yield BatchGroup(own, slice(0, n), batch, size, batch_idx, is_rows=True)


def look_up(trainer: pl.Trainer, resident: ResidentData, batches: TensorBatches, rows: Tensor) -> list[Tensor]:
    """Return rows of the tensors that a client is cut out of, on the device."""
    return on_device(trainer, [t.index_select(0, rows.to(t.device)) for t in resident.of(batches.tensors)])


def fits_one_lookup(batches: ClientBatches) -> bool:
    """Whether a local epoch is small enough to be looked up at once."""
    if not isinstance(batches, TensorBatches):
        return False
    return batches.size * sum(t.element_size() * (t.numel() // max(1, len(t))) for t in batches.tensors) <= _GATHERED


def _tensor_batches(plan: WorkPlan) -> TensorBatches:
    assert isinstance(plan.batches, TensorBatches)
    return plan.batches


def _epoch_rows(plan: WorkPlan, stream: torch.Generator, shuffle: bool) -> list[tuple[int, Tensor]]:
    """Return (index in its local epoch, rows [B]) of every batch of a client."""
    batches = _tensor_batches(plan)
    out: list[tuple[int, Tensor]] = []
    size = batches.settings.batch_size
    for length in plan.epochs:
        rows = batches.epoch_rows(stream, shuffle)
        out += enumerate(rows.split(size)[:length] if rows.numel() > size else (rows,)[:length])
    return out
