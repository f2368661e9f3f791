"""Rows of clients' tensors, looked up where the tensors lie: on the device, several steps at once."""

import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_fed._lightning import pl
from lightning_fed.data.batches import ClientBatches, TensorBatches

__all__ = ["DeviceData", "RowLookup", "are_of_one_kind", "fits_one_lookup", "is_rows", "on_device"]

_EPOCH = 2**26  # bytes of a local epoch that are looked up at once
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

    def moved(self, rows: list[Tensor]) -> list[Tensor]:
        """Return tensors of rows on the device, all in one transfer."""
        if not rows:
            return rows
        return list(torch.cat(rows).to(self.device, non_blocking=True).split([len(r) for r in rows]))

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
        self._trainer, self._data = trainer, data
        self._own = [b.tensors for b in clients]
        sources = list({id(tensors): tensors for tensors in self._own}.values())
        self._whole: Sequence[Tensor] | None = None
        self._starts = [0] * len(clients)
        of_each = sum(t.element_size() * (t.numel() // max(1, len(t))) for t in clients[0].tensors)
        self._ahead = _AHEAD // max(1, of_each)
        if len(sources) == 1:
            self._whole = data.of(sources[0])
        elif sum(t.numel() * t.element_size() for tensors in sources for t in tensors) <= _JOINED:
            joined = [torch.cat(column) for column in zip(*sources, strict=True)]
            self._whole = joined if data.is_near else [t.to(data.device) for t in joined]
            starts, start = dict[int, int](), 0
            for tensors in sources:
                starts[id(tensors)], start = start, start + len(tensors[0])
            self._starts = [starts[id(tensors)] for tensors in self._own]

    def places(self, rows: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Return where rows of clients' tensors are looked up, on the device in one transfer.

        Args:
            rows: For every client some rows [B], as often as there are batches.
        """
        shifted = [
            [part + start for part in parts] if start else list(parts)
            for parts, start in zip(rows, self._starts, strict=True)
        ]
        if self._whole is None or self._data.is_near:
            return shifted
        moved = iter(self._data.moved([part for parts in shifted for part in parts]))
        return [[next(moved) for _ in parts] for parts in shifted]

    def in_order(self, steps: Sequence[Sequence[tuple[int, Tensor]]]) -> Iterator[list[Tensor]]:
        """Yield the rows of one step after the other, [n * B, ...]; those of several are looked up at once.

        Args:
            steps: For every step its clients, each with its :meth:`places` [B].
        """
        if self._whole is None:
            for step in steps:
                own = [self._pick(self._own[client], places) for client, places in step]
                yield own[0] if len(own) == 1 else [torch.cat(column) for column in zip(*own, strict=True)]
            return
        waiting, lengths, rows = list[Tensor](), list[int](), 0
        for i, step in enumerate(steps):
            waiting += [places for _, places in step]
            lengths.append(sum([places.shape[0] for _, places in step]))
            rows += lengths[-1]
            if i + 1 == len(steps) or rows >= self._ahead:
                found = self._pick(self._whole, waiting[0] if len(waiting) == 1 else torch.cat(waiting))
                yield from (list(parts) for parts in zip(*(t.split_with_sizes(lengths) for t in found), strict=True))
                waiting, lengths, rows = [], [], 0

    def one(self, rows: Tensor) -> list[Tensor]:
        """Return rows of the first client's tensors."""
        ((places,), *_) = self.places([[rows]] + [[] for _ in self._own[1:]])
        return next(self.in_order([[(0, places)]]))

    def _pick(self, tensors: Sequence[Tensor], places: Tensor) -> list[Tensor]:
        return on_device(self._trainer, [t.index_select(0, places.to(t.device)) for t in tensors])


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


def fits_one_lookup(batches: TensorBatches) -> bool:
    """Whether a local epoch is small enough to be looked up at once."""
    return batches.size * sum(t.element_size() * (t.numel() // max(1, len(t))) for t in batches.tensors) <= _EPOCH


def on_device(trainer: pl.Trainer, tensors: list[Tensor]) -> list[Tensor]:
    """Convert and move tensors as Lightning does where nobody has transfer hooks."""
    converted: list[Tensor] = trainer.precision_plugin.convert_input(tensors)
    device = trainer.strategy.root_device
    if device.type == "cpu" and all(t.device.type == "cpu" for t in converted):
        return converted
    moved: list[Tensor] = trainer.strategy.batch_to_device(converted, device)
    return moved
