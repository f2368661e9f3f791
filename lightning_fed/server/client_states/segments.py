"""Files to which client states are appended, one after the other, and which are never changed otherwise."""

import os
import re
import zlib
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_fed.core.errors import FederatedError

__all__ = ["ENTRY", "Segment", "SegmentReader", "SegmentWriter", "owner", "read_entries", "sync_folder"]

ENTRY = np.dtype([("client", "<i8"), ("offset", "<i8"), ("length", "<i8"), ("checksum", "<u4")])
STATES, INDEX = ".states", ".index"
_NAME = re.compile(r"\d{6}-[0-9a-f]{8}-\d{4}-\d{6}")

Entries = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Segment:
    """The committed part of a pair of files: states, and an index of which client's state lies where.

    Attributes:
        name: The files' common name; names sort in the order of writing.
        entries: How many entries of the index are committed.
        checksum: The CRC-32 of these entries.
    """

    name: str
    entries: int
    checksum: int

    @classmethod
    def parse(cls, saved: Any) -> "Segment":
        """Return what was written as a list of name, entries and checksum.

        Raises:
            ValueError: If it is nothing of the kind, or names a file elsewhere.
        """
        name, entries, checksum = saved
        if not (isinstance(name, str) and _NAME.fullmatch(name) and type(entries) is int and type(checksum) is int):
            raise ValueError(f"{saved!r} is no segment")
        return cls(name, entries, checksum)


def owner(name: str) -> tuple[str, int]:
    """Return the prefix of the run and the rank of the process that wrote the segment of a name."""
    return name[:15], int(name[16:20])


class SegmentWriter:
    """Append states to a new segment.

    Args:
        folder: The store's folder.
        name: The segment's name.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.entries, self.checksum, self.size = name, 0, 0, 0
        self._end = 0  # of what is written, committed or not
        self.paths = folder / (name + STATES), folder / (name + INDEX)
        self._states: FileIO = open(self.paths[0], "xb", buffering=0)  # noqa: SIM115
        self._index: FileIO = open(self.paths[1], "xb", buffering=0)  # noqa: SIM115

    @property
    def committed(self) -> Segment:
        """The committed part."""
        return Segment(self.name, self.entries, self.checksum)

    def append(self, client: int, state: bytes) -> tuple[int, int, int, int]:
        """Write a client's state, and return the entry for it, to be committed."""
        offset = self._end
        _write(self._states, state, offset)
        self._end += len(state)
        return client, offset, len(state), zlib.crc32(state, client)

    def commit(self, entries: Entries) -> None:
        """Make written states part of the segment."""
        data = entries.tobytes()
        _write(self._index, data, self.entries * ENTRY.itemsize)
        self.entries += len(entries)
        self.checksum = zlib.crc32(data, self.checksum)
        self.size = self._end

    def rollback(self) -> None:
        """Take back what was written since the last commit."""
        if self._end > self.size:
            self._states.truncate(self.size)
            self._end = self.size

    def sync(self) -> None:
        """Wait until everything is on the disk.

        Raises:
            FederatedError: If the disk fails.
        """
        for file in (self._states, self._index):
            try:
                os.fsync(file.fileno())
            except OSError as error:
                raise _failure(file.name, error) from error

    def close(self) -> None:
        """Close the files; the segment stays as it is for good."""
        self._states.close()
        self._index.close()


def sync_closed(path: Path) -> None:
    """Wait until a file that was closed is on the disk; one that is gone is missed by whoever needs it.

    Raises:
        FederatedError: If the disk fails.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            os.fsync(file.fileno())
    except FileNotFoundError:
        return
    except OSError as error:
        raise _failure(path, error) from error


def _write(file: FileIO, data: bytes, offset: int) -> None:
    """Write all of the data at an offset, over what a write that failed may have left there.

    Raises:
        FederatedError: If the disk takes no more.
    """
    rest = memoryview(data)
    try:
        file.seek(offset)
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as error:
        raise _failure(file.name, error) from error


def _failure(path: object, error: OSError) -> FederatedError:
    return FederatedError(
        f"Client states cannot be written to {str(path)!r}: {error.strerror}. Checkpoints written so far keep their"
        " states; make room, and resume from the last one."
    )


class SegmentReader:
    """Read single states; a few files stay open.

    They are read, and not mapped into memory: a mapped file that somebody truncates ends the process, and its pages
    count as the process's memory.

    Args:
        folder: The store's folder.
    """

    _most = 16

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: OrderedDict[str, FileIO] = OrderedDict()

    def read(self, name: str, client: int, offset: int, length: int, checksum: int) -> bytes:
        """Return a client's state as it was written.

        Raises:
            FederatedError: If the file is missing or damaged.
        """
        path = self.folder / (name + STATES)
        if name in self._files:
            self._files.move_to_end(name)
        else:
            try:
                self._files[name] = open(path, "rb", buffering=0)  # noqa: SIM115
            except OSError as error:
                raise FederatedError(
                    f"{path}, which holds kept client states, cannot be opened: {error.strerror}."
                ) from error
            if len(self._files) > self._most:
                self._files.popitem(last=False)[1].close()
        file = self._files[name]
        file.seek(offset)
        data = bytearray()
        while len(data) < length and (part := file.read(length - len(data))):
            data += part
        if len(data) != length or zlib.crc32(data, client) != checksum:
            raise FederatedError(f"{path} is damaged: what it holds of the client with index {client} was changed.")
        return bytes(data)

    def close(self) -> None:
        """Close all files."""
        while self._files:
            self._files.popitem()[1].close()


def read_entries(folder: Path, segment: Segment, num_clients: int) -> Entries:
    """Return the committed entries of a segment, oldest first.

    Raises:
        FederatedError: If a file is missing, shorter than what was committed, or damaged.
    """
    index, states = folder / (segment.name + INDEX), folder / (segment.name + STATES)
    wanted = segment.entries * ENTRY.itemsize
    try:
        size, found = states.stat().st_size, index.stat().st_size
        with open(index, "rb") as file:
            data = file.read(wanted) if 0 <= wanted <= found else b""
    except OSError as error:
        raise FederatedError(
            f"{error.filename}, which holds kept client states, cannot be read: {error.strerror}. Copy the whole folder"
            f" {folder.name!r} along with a checkpoint."
        ) from error
    if len(data) != wanted or zlib.crc32(data) != segment.checksum:
        raise FederatedError(f"{index} is damaged: it is not what was written there.")
    entries = np.frombuffer(data, dtype=ENTRY)
    client, offset, length = entries["client"], entries["offset"], entries["length"]
    if np.any((client < 0) | (client >= num_clients) | (offset < 0) | (length < 1)):
        raise FederatedError(f"{index} is damaged: an entry points to no client or no place.")
    if np.any(offset > size - length):
        raise FederatedError(f"{states} is damaged: it has {size:,} bytes, fewer than were written.")
    return entries


def sync_folder(folder: Path) -> None:
    """Wait until names made or changed in a folder are on the disk, where the system can say so."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            with suppress(OSError):
                os.fsync(handle)
        finally:
            os.close(handle)
