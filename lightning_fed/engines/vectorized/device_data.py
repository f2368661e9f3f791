"""Clients' data on the device that trains them, moved there once."""

import weakref

import torch
from torch import Tensor

__all__ = ["DeviceData"]

_SHARE = 4  # at most one part in so many of the free memory holds data


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
