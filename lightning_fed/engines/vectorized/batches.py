"""The batches of a chunk's clients, step by step and grouped by shape; rows of tensors are looked up."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from itertools import chain, islice
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_fed.compat.package import pl
from lightning_fed.core.arguments import kind_of
from lightning_fed.data.batches.batches import ClientBatches, TensorBatches
from lightning_fed.engines.base import OnlySequentialError, WorkPlan
from lightning_fed.engines.device_data import DeviceData, is_rows, num_bytes
from lightning_fed.engines.gradients import prepare_batch
from lightning_fed.tracing.traces import kinds

_AHEAD = 2**22  # bytes of several steps that are looked up together
_JOINED = 2**25  # bytes of several clients' tensors that are concatenated in host memory

Stream: TypeAlias = Callable[..., torch.Generator]
"""A factory of generators for a client's batch orders, by client index; ``reuse`` reseeds a given one."""

_Members: TypeAlias = list[tuple[int, Tensor]]  # clients, and the rows of their batches


class StepGroup(NamedTuple):
    """Adjacent clients of a chunk that take a step together."""

    clients: range  # rows in the chunk
    at: Sequence[int]  # the position of each client's batch


class BatchGroup(NamedTuple):
    """Clients whose batches have one shape."""

    clients: Sequence[int]  # rows in the chunk
    leaves: Sequence[Tensor]  # the tensors of their batches, stacked to [n, B, ...]; [B, ...] for a single client
    spec: Any  # the structure of a batch
    examples: int  # in each batch
    batch_idx: int  # the index of the batch in the local epoch
    kind: Any  # a key of the shapes, to distinguish groups of the chunk

    @property
    def first(self) -> Sequence[Tensor]:
        """The tensors of the first client's batch."""
        return self.leaves if len(self.clients) == 1 else list(map(itemgetter(0), self.leaves))


class RowBatches:
    """Batches of rows of tensors of one kind, looked up without a loader.

    ``by_index`` separates clients at different batch indices of their local epochs.
    """

    def __init__(
        self, lookup: "RowLookup", plans: Sequence[WorkPlan], stream: Stream, shuffle: bool, by_index: bool
    ) -> None:
        self._lookup, self._by_index = lookup, by_index
        one = torch.Generator()  # reseeded for every client, since all orders are drawn here
        self._rows = [_epoch_rows(plan, stream(plan.participant.index, reuse=one), shuffle) for plan in plans]

    def in_order(self, steps: Sequence[StepGroup]) -> Iterator[list[BatchGroup]]:
        """Yield the batches step by step, grouped by size."""
        of_steps: list[dict[tuple[int, int], _Members]] = []
        lookups: list[_Members] = []
        for step in steps:
            groups: dict[tuple[int, int], _Members] = {}
            for client, k in zip(step.clients, step.at, strict=True):
                batch_idx, rows = self._rows[client][k]
                groups.setdefault((rows.shape[0], batch_idx if self._by_index else 0), []).append((client, rows))
            of_steps.append(groups)
            lookups += groups.values()
        found = self._lookup.in_order(lookups)
        for groups in of_steps:
            out = []
            for (size, batch_idx), members in groups.items():
                leaves: Sequence[Tensor] = next(found)
                if len(members) > 1:
                    leaves = [t.view(len(members), size, *t.shape[1:]) for t in leaves]
                out.append(BatchGroup([client for client, _ in members], leaves, list, size, batch_idx, kind=size))
            yield out


class AnyBatches:
    """Batches of any kind: each is built separately, then batches of one shape are stacked."""

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

    def in_order(self, steps: Sequence[StepGroup]) -> Iterator[list[BatchGroup]]:
        """Yield the batches step by step, grouped by shape."""
        for step in steps:
            groups: dict[Any, list[tuple[int, Sequence[Tensor]]]] = {}
            for client in step.clients:
                batch_idx, batch, examples = next(self._batches[client])
                is_plain = _is_plain(batch) and not self._has_hooks
                moved = (_on_device if is_plain else prepare_batch)(self._trainer, batch)
                leaves, spec = flatten(moved)
                for leaf in leaves:
                    if not isinstance(leaf, Tensor):
                        where, remedy = " in one", "Leave it out of the batch"
                        if leaf is moved:
                            where, remedy = "", "Return a tuple, list or dict of tensors from collate_fn"
                        if is_dataclass(leaf):
                            remedy = f"Register its class: torch.export.register_dataclass({type(leaf).__name__})"
                        raise OnlySequentialError(
                            f"engine='vectorized' needs batches of tensors only, found {kind_of(leaf)}{where}."
                            f" {remedy}, or use engine='sequential'."
                        )
                key = (examples, batch_idx if self._by_index else 0, spec, kinds(leaves))
                groups.setdefault(key, []).append((client, leaves))
            out = []
            for key, members in groups.items():
                clients, batches = zip(*members, strict=True)
                examples, batch_idx, spec, _ = key
                columns = zip(*batches, strict=True)
                stacked = batches[0] if len(batches) == 1 else [torch.stack(column) for column in columns]
                out.append(BatchGroup(clients, stacked, spec, examples, batch_idx, kind=key))
            yield out


def _batches(plan: WorkPlan, stream: torch.Generator, shuffle: bool) -> Iterator[tuple[int, Any, int]]:
    """Yield (index in its local epoch, batch, examples in it) for all local epochs of a client."""
    for length in plan.epochs:
        for i, (batch, examples) in enumerate(islice(plan.batches.epoch(stream, shuffle), length)):
            yield i, batch, examples


def _epoch_rows(plan: WorkPlan, stream: torch.Generator, shuffle: bool) -> list[tuple[int, Tensor]]:
    """Return (index in its local epoch, rows [B]) for every batch of a client."""
    batches = plan.batches
    assert isinstance(batches, TensorBatches)
    out: list[tuple[int, Tensor]] = []
    size = batches.settings.batch_size
    for length in plan.epochs:
        rows = batches.epoch_rows(stream, shuffle)
        out += enumerate(rows.split(size)[:length] if rows.shape[0] > size else (rows,)[:length])
    return out


def _is_plain(batch: Any) -> bool:
    """Return whether a batch is a list of tensors."""
    return type(batch) is list and all(type(part) is Tensor for part in batch)


def flatten(batch: Any) -> tuple[Sequence[Tensor], Any]:
    """Return the tensors of a batch, and the structure for :func:`unflatten`."""
    return (batch, list) if _is_plain(batch) else pytree.tree_flatten(batch)  # lists are a fast path


def are_rows(leaves: Sequence[Tensor], examples: int) -> bool:
    """Return whether each tensor of a batch has one row per example."""
    return all(leaf.ndim > 0 and len(leaf) == examples for leaf in leaves)


def unflatten(leaves: Sequence[Tensor], spec: Any) -> Any:
    """Return a batch of these tensors."""
    return list(leaves) if spec is list else pytree.tree_unflatten(leaves, spec)


class RowLookup:
    """Looks up rows of several clients' tensors.

    Clients with rows of the same tensors share a lookup. Separate tensors are first concatenated if they are small, or
    on an accelerator with enough free memory; otherwise each client has its own lookup.
    """

    def __init__(self, trainer: pl.Trainer, clients: Sequence[TensorBatches], data: DeviceData) -> None:
        self._trainer = trainer
        self._ahead = _AHEAD // max(1, num_bytes(clients[0].tensors) // max(1, len(clients[0].tensors[0])))
        sources = {id(batches.tensors): batches.tensors for batches in clients}
        placed = dict(zip(sources, data.of_each(*sources.values()), strict=True))
        self._clients = [TensorBatches(placed[id(b.tensors)], b.indices, b.settings) for b in clients]
        self._whole: TensorBatches | None = None
        self._starts = [0] * len(clients)  # the start of each client's rows
        if len(sources) == 1:
            self._whole = self._clients[0]
            return
        total, are_there = num_bytes(chain(*sources.values())), False
        if data.device.type != "cpu":
            are_there = all(t.device == data.device for tensors in placed.values() for t in tensors)
        if total <= _JOINED or (are_there and data.fits(total)):
            columns = zip(*(placed if are_there else sources).values(), strict=True)
            joined = tuple([torch.cat(column).to(data.device) for column in columns])
            self._whole = TensorBatches(joined, None, clients[0].settings)
            starts, start = dict[int, int](), 0
            for key, tensors in sources.items():
                starts[key], start = start, start + len(tensors[0])
            self._starts = [starts[id(b.tensors)] for b in clients]

    def in_order(self, steps: Sequence[Sequence[tuple[int, Tensor]]]) -> Iterator[list[Tensor]]:
        """Yield each step's rows [n * B, ...], given its clients with the rows [B] of their tensors.

        One lookup covers several steps.
        """
        if self._whole is None:
            for step in steps:
                own = [_on_device(self._trainer, self._clients[client].look_up(rows)) for client, rows in step]
                yield own[0] if len(own) == 1 else [torch.cat(column) for column in zip(*own, strict=True)]
            return
        places, lengths = list[Tensor](), list[int]()
        for step in steps:
            lengths.append(0)
            for client, rows in step:
                places.append(rows + self._starts[client] if self._starts[client] else rows)
                lengths[-1] += rows.shape[0]
        rest = torch.cat(places).to(self._whole.tensors[0].device, non_blocking=True)
        waiting, count = list[int](), 0
        for i, length in enumerate(lengths):
            waiting.append(length)
            count += length
            if i + 1 == len(lengths) or count >= self._ahead:
                found, rest = _on_device(self._trainer, self._whole.look_up(rest[:count])), rest[count:]
                yield from map(list, zip(*(t.split_with_sizes(waiting) for t in found), strict=True))
                waiting, count = [], 0


def rows_of_one_kind(clients: Iterable[ClientBatches]) -> list[TensorBatches]:
    """Return the clients' batches if all index tensors of equal number, dtype, shape and device; otherwise []."""
    rows, seen, found = list[TensorBatches](), set[int](), set[Any]()
    for batches in clients:
        if not is_rows(batches):
            return []
        rows.append(batches)
        if id(batches.tensors) not in seen:
            seen.add(id(batches.tensors))
            found.add(tuple([(t.dtype, t.device, t.shape[1:]) for t in batches.tensors]))
    return rows if len(found) == 1 else []


def _on_device(trainer: pl.Trainer, tensors: list[Tensor]) -> list[Tensor]:
    """Convert and transfer tensors like Lightning if there are no transfer hooks."""
    converted: list[Tensor] = trainer.precision_plugin.convert_input(tensors)
    device = trainer.strategy.root_device
    if device.type == "cpu" and all(t.device.type == "cpu" for t in converted):
        return converted
    moved: list[Tensor] = trainer.strategy.batch_to_device(converted, device)
    return moved
