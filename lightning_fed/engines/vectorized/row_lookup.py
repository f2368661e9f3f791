"""Rows of clients' tensors, looked up where the tensors lie: on the device, several steps at once."""

import weakref
from collections.abc import Iterator, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from lightning_fed.compat.package import pl
from lightning_fed.data.batches.batches import ClientBatches, TensorBatches

__all__ = ["DeviceData", "RowLookup", "is_rows", "on_device", "rows_of_one_kind"]

_AHEAD = 2**22  # bytes of several steps that are looked up at once
_SHARE = 4  # at most one part in so many of the free memory holds data
_JOINED = 2**25  # bytes of the tensors of several clients that are put side by side


class DeviceData:
    """Copies of data sets' tensors on a GPU, where they fit a quarter of its free memory; on a CPU there is no need.

    A copy is let go of together with its original: clients that are built on demand leave nothing behind.

    Args:
        device: Where clients are trained.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies: dict[tuple[int, ...], tuple[tuple[int, ...], tuple[Tensor, ...] | None]] = {}

    def of(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return tensors of the same content, on the device if they fit; anew where somebody has written to them."""
        if self.is_near:
            return tensors
        key, versions = tuple(map(id, tensors)), tuple(t._version for t in tensors)
        copy = self._copies.get(key)
        if copy is None:
            for t in tensors:  # its id may be another's later
                weakref.finalize(t, _forget, weakref.ref(self), key).atexit = False
        if copy is None or copy[0] != versions:
            size = sum(t.numel() * t.element_size() for t in tensors if t.device != self.device)
            fits = _SHARE * size <= self.free()
            copy = self._copies[key] = (versions, tuple(t.to(self.device) for t in tensors) if fits else None)
        return tensors if copy[1] is None else copy[1]

    @property
    def is_near(self) -> bool:
        """Whether tensors of the CPU are read from the device as they are."""
        return self.device.type == "cpu"

    def free(self) -> int:
        """The free memory of the device in bytes."""
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0


def _forget(data: "weakref.ref[DeviceData]", key: tuple[int, ...]) -> None:
    found = data()
    if found is not None:
        found._copies.pop(key, None)


class RowLookup:
    """Looks up rows of the tensors of several clients.

    Clients that are cut out of the same tensors take one lookup. Tensors of clients that have their own are put side by
    side first if they are small; each client has a lookup of its own if they are not.

    Args:
        trainer: The trainer, which says where batches go.
        clients: The clients, of one kind.
        data: The data on the device.
    """

    def __init__(self, trainer: pl.Trainer, clients: Sequence[TensorBatches], data: DeviceData) -> None:
        self._trainer = trainer
        self._clients = clients
        self._ahead = _AHEAD // max(1, bytes_of_row(clients[0]))
        sources = list({id(b.tensors): b.tensors for b in clients}.values())
        self._whole: Sequence[Tensor] | None = None
        self._starts = [0] * len(clients)  # where the rows of each begin
        if len(sources) == 1:
            self._whole = data.of(sources[0])
        elif sum(t.numel() * t.element_size() for tensors in sources for t in tensors) <= _JOINED:
            self._whole = [torch.cat(column).to(data.device) for column in zip(*sources, strict=True)]
            starts, start = dict[int, int](), 0
            for tensors in sources:
                starts[id(tensors)], start = start, start + len(tensors[0])
            self._starts = [starts[id(b.tensors)] for b in clients]

    def in_order(self, steps: Sequence[Sequence[tuple[int, Tensor]]]) -> Iterator[list[Tensor]]:
        """Yield the rows of one step after the other, [n * B, ...]; those of several are looked up at once.

        Args:
            steps: For every step its clients, each with rows of its tensors [B].
        """
        if self._whole is None:
            for step in steps:
                own = [self._pick(self._clients[client].tensors, rows) for client, rows in step]
                yield own[0] if len(own) == 1 else [torch.cat(column) for column in zip(*own, strict=True)]
            return
        places, lengths = list[Tensor](), list[int]()
        for step in steps:
            lengths.append(0)
            for client, rows in step:
                places.append(rows + self._starts[client] if self._starts[client] else rows)
                lengths[-1] += rows.shape[0]
        rest = torch.cat(places).to(self._whole[0].device, non_blocking=True)
        waiting, count = list[int](), 0
        for i, length in enumerate(lengths):
            waiting.append(length)
            count += length
            if i + 1 == len(lengths) or count >= self._ahead:
                found, rest = self._pick(self._whole, rest[:count]), rest[count:]
                yield from map(list, zip(*(t.split_with_sizes(waiting) for t in found), strict=True))
                waiting, count = [], 0

    def _pick(self, tensors: Sequence[Tensor], rows: Tensor) -> list[Tensor]:
        return on_device(self._trainer, [t.index_select(0, rows.to(t.device)) for t in tensors])


def is_rows(batches: ClientBatches) -> TypeGuard[TensorBatches]:
    """Whether a batch is nothing but rows of tensors, which takes no randomness but the order's."""
    return isinstance(batches, TensorBatches) and batches.is_plain


def rows_of_one_kind(clients: Sequence[ClientBatches]) -> list[TensorBatches]:
    """Return clients whose batches are all rows of as many tensors of the same types, shapes and places; else none."""
    rows, sources = list[TensorBatches](), dict[int, tuple[Tensor, ...]]()
    for batches in clients:
        if not is_rows(batches):
            return []
        rows.append(batches)
        sources[id(batches.tensors)] = batches.tensors
    kinds = {tuple((t.dtype, t.device, t.shape[1:]) for t in tensors) for tensors in sources.values()}
    return rows if len(kinds) == 1 else []


def bytes_of_row(batches: TensorBatches) -> int:
    """Return how many bytes an example takes."""
    return sum(t.element_size() * (t.numel() // max(1, len(t))) for t in batches.tensors)


def on_device(trainer: pl.Trainer, tensors: list[Tensor]) -> list[Tensor]:
    """Convert and move tensors as Lightning does where nobody has transfer hooks."""
    converted: list[Tensor] = trainer.precision_plugin.convert_input(tensors)
    device = trainer.strategy.root_device
    if device.type == "cpu" and all(t.device.type == "cpu" for t in converted):
        return converted
    moved: list[Tensor] = trainer.strategy.batch_to_device(converted, device)
    return moved
