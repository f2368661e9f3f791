"""The IDX format of MNIST's files: a magic number, the dimensions, then bytes."""

import gzip
import math
import zlib
from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor

from lightning_fed.core.errors import FederatedError

__all__ = ["find_idx", "read_idx"]

_UINT8 = 0x08
_MOST_PACKED = 1032  # deflate packs no more than so many bytes into one


def find_idx(path: Path) -> Path | None:
    """Return a file as it is or with ``.gz`` at its end, whichever there is, or None."""
    return next((file for file in (path, path.with_name(path.name + ".gz")) if file.is_file()), None)


def read_idx(path: Path, ndim: int) -> Tensor:
    """Return the bytes of an IDX file in their shape, uint8.

    Args:
        path: The file; it is unpacked on the way if its name ends in ``.gz``.
        ndim: The number of dimensions that it should have.

    Raises:
        FederatedError: If it is damaged, or holds something else.
    """
    packed = path.suffix == ".gz"
    try:
        with gzip.open(path) if packed else path.open("rb") as file:
            shape = _shape(file.read(4 + 4 * ndim), path, ndim)
            size = math.prod(shape)
            # before memory is asked for: a damaged header may claim anything
            if size > path.stat().st_size * (_MOST_PACKED if packed else 1):
                raise _damaged(path, f"its header says {shape}, which is more than it can hold")
            values = torch.empty(shape, dtype=torch.uint8)
            missing = size - _fill(values, file)
            if missing or file.read(1):
                found = f"{missing:,} of its bytes are missing" if missing else "more bytes follow"
                raise _damaged(path, f"its header says {shape}, and {found}")
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    return values


def _shape(header: bytes, path: Path, ndim: int) -> list[int]:
    expected = bytes([0, 0, _UINT8, ndim])
    if len(header) != 4 + 4 * ndim or header[:4] != expected:
        found = header[:4].hex(" ") or "nothing"
        raise _damaged(path, f"it should begin with the magic number {expected.hex(' ')}, and begins with {found}")
    return [int.from_bytes(header[i : i + 4], "big") for i in range(4, len(header), 4)]


def _fill(values: Tensor, file: BufferedReader | gzip.GzipFile) -> int:
    """Read into a tensor's memory until it is full or the file ends; return the number of bytes read."""
    room, filled = values.numpy().reshape(-1).data, 0
    while filled < len(room) and (count := file.readinto(room[filled:])):
        filled += count
    return filled


def _damaged(path: Path, problem: str) -> FederatedError:
    return FederatedError(f"{path} is damaged or no IDX file: {problem}. Download it again.")
