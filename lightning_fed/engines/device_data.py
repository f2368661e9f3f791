"""Copies of data sets on an accelerator, so that batches are not transferred again."""

from collections.abc import Iterable, MutableMapping
from operator import attrgetter
from typing import TypeGuard

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_fed.core.devices import memory_of
from lightning_fed.data.batches.batches import ClientBatches, RepeatedBatches, TensorBatches

_SHARE = 4  # all copies together use at most 1 / _SHARE of the memory that is free without them


class DeviceData:
    """Copies of data sets' tensors on an accelerator, if they fit a part of its memory; unused on a CPU.

    A copy is freed together with its original, so clients that are built on demand leave nothing behind.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # by tensor: its version when last seen, and its copy, if any
        self._copies: MutableMapping[Tensor, tuple[int, Tensor | None]] = WeakTensorKeyDictionary()
        self._is_full = False

    def of_each(self, *sources: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        """Return equal tensors for data sets, copied to the device if they fit; changed tensors are copied again."""
        if self.device.type == "cpu":
            return list(sources)
        copies = self._copies
        new = [
            t
            for tensors in sources
            for t in tensors
            if t.device != self.device and copies.get(t, (-1, None))[0] != t._version
        ]
        if new:
            fits = self.fits(num_bytes(new))
            for t in new:
                copies[t] = (t._version, t.to(self.device) if fits else None)
        return [tuple([self._found(t) for t in tensors]) for tensors in sources]

    def _found(self, tensor: Tensor) -> Tensor:
        copy = self._copies.get(tensor, (0, None))[1]
        return tensor if copy is None else copy

    def fits(self, more: int) -> bool:
        """Return whether ``more`` bytes still fit the part of the memory for data."""
        if self._is_full:
            return False
        held = num_bytes([copy for _, copy in self._copies.values() if copy is not None])
        return _SHARE * (held + more) <= held + self.free()

    def free(self) -> int:
        """Return the free memory of the device in bytes; 0 if unknown."""
        memory = memory_of(self.device)
        return memory.free if memory else 0

    def clear(self) -> None:
        """Drop all copies."""
        self._copies.clear()

    def give_up(self) -> None:
        """Drop all copies and make no more, since the device is out of memory."""
        self._is_full = True
        self.clear()

    def to_device(self, batches: ClientBatches) -> ClientBatches:
        """Return a client's batches, from copies on the device if they are rows of tensors that fit."""
        if self.device.type == "cpu":
            return batches
        if isinstance(batches, RepeatedBatches):
            return RepeatedBatches(self.to_device(batches.batches), batches.times)
        if not is_rows(batches):
            return batches
        (tensors,) = self.of_each(batches.tensors)
        on_device = all(t.device == self.device for t in tensors)
        return TensorBatches(tensors, batches.indices, batches.settings) if on_device else batches


def is_rows(batches: ClientBatches) -> TypeGuard[TensorBatches]:
    """Return whether batches are rows of tensors, and only their order is random."""
    return isinstance(batches, TensorBatches) and batches.is_plain


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the number of bytes in tensors."""
    return sum(map(attrgetter("nbytes"), tensors))
