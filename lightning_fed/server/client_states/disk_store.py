"""Kept client states in files: memory for an index of them, and for no state."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import State
from lightning_fed.server.client_states.segments import (
    ENTRY,
    Entries,
    Segment,
    SegmentReader,
    SegmentWriter,
    read_entries,
    sync_closed,
)
from lightning_fed.server.client_states.store import ClientStore, MemoryClientStore

__all__ = ["DiskClientStore"]

_PLACE = np.dtype([("segment", "<i4"), ("checksum", "<u4"), ("offset", "<i8"), ("length", "<i8")])  # segment 0: none
_MOST_OPEN = 8  # full segments that wait for a version before they are closed


class _Part:
    """A segment in use, and how much of it is still the newest state of its client."""

    def __init__(self, segment: Segment, size: int = 0, live: int = 0) -> None:
        self.segment, self.size, self.live = segment, size, live  # bytes


class DiskClientStore(ClientStore):
    """Kept client states in files of a folder.

    A state is appended, in the safetensors format, to the segment that this process writes, when it is staged; reading
    runs no code. Memory holds 24 bytes for every client that has a state. Segments of which more than half is out of
    date are written anew, little by little: what is on the disk for one version is at most about twice the states.

    Args:
        folder: The folder.
        prefix: The start of the names of this run's segments.
        num_clients: The number of clients, N.
        device: Where states are read to.
        rank: This process.
        writes_versions: Whether versions will refer to this process's segments; if not, it removes what it no longer
            needs by itself.
    """

    segment_bytes = 2**26

    def __init__(
        self,
        folder: Path,
        prefix: str,
        num_clients: int,
        device: torch.device,
        rank: int = 0,
        writes_versions: bool = True,
    ) -> None:
        self.folder, self.prefix, self.device, self.rank = folder, prefix, device, rank
        self.writes_versions = writes_versions
        self._places = np.zeros(num_clients, dtype=_PLACE)  # pages that no client touches take no memory
        self._parts: dict[int, _Part] = {}
        self._last = 0  # number of the newest part
        self._writer: SegmentWriter | None = None
        self._full: list[SegmentWriter] = []  # not yet known to be on the disk
        self._unsynced: list[Path] = []  # files that were closed before that was known
        self._staged: dict[int, tuple[int, int, int, int]] = {}
        self._reader = SegmentReader(folder)
        self._count = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy holds the states in memory: it outlives the files, which are this store's alone."""
        return _in_memory, (self.state_dict(), self.device)

    def __len__(self) -> int:
        """The number of clients with a kept state."""
        return self._count

    # ------------------------------------------------------------------ states

    def get(self, index: int) -> State | None:
        """Read a client's committed state, None if it has none yet.

        Raises:
            FederatedError: If its file is damaged.
        """
        place = self._places[index]
        if not place["segment"]:
            return None
        data = self._read(index)
        try:
            return {name: value.to(self.device) for name, value in sorted(load(data).items())}  # which has no order
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            name = self._parts[int(place["segment"])].segment.name
            raise FederatedError(
                f"Segment {name} of {self.folder} holds no tensors for the client with index {index}: {error}."
            ) from error

    def _read(self, index: int) -> bytes:
        number, checksum, offset, length = self._places[index].item()
        return self._reader.read(self._parts[number].segment.name, index, offset, length, checksum)

    def stage(self, index: int, state: State) -> None:
        """Write a client's new state, which is not to be seen until the round is complete."""
        if not state:
            return
        # copies: two names may share memory, and rows of a chunk lie apart
        copies = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in state.items()}
        try:
            data = save(copies)
        except (SafetensorError, ValueError, KeyError) as error:
            kinds = {name: str(value.dtype) for name, value in copies.items()}
            raise FederatedError(
                f"Client states of {kinds} cannot be kept on disk: {error}. Use dense tensors of common types, or set"
                " client_states='memory'."
            ) from error
        self._staged[index] = self._open_writer().append(index, data)

    def commit(self) -> None:
        """Make the staged states the kept ones."""
        if not self._staged:
            return
        self._enter(np.array(list(self._staged.values()), dtype=ENTRY))
        self._staged = {}
        self._rewrite()

    def discard(self) -> None:
        """Forget the staged states."""
        self._staged = {}
        if self._writer is not None:
            self._writer.rollback()

    def state_dict(self) -> dict[int, State]:
        """Return all committed states, in memory."""
        kept = np.flatnonzero(self._places["segment"]).tolist()
        return {index: state for index in kept if (state := self.get(index)) is not None}

    def load_state_dict(
        self, states: Mapping[int, Any], device: torch.device, is_mine: Callable[[int], bool] = lambda index: True
    ) -> None:
        """Replace all states by those of the clients that are this process's own."""
        self.clear()
        self.device = device
        for index, state in states.items():
            if is_mine(int(index)):
                self.stage(int(index), state)
        self.commit()

    # ------------------------------------------------------------------ segments

    def _open_writer(self) -> SegmentWriter:
        """Return the segment to write to, a new one where there is none or it is full."""
        if self._writer is not None and self._writer.size >= self.segment_bytes and not self._staged:
            self._seal()
        if self._writer is None:
            self._last += 1
            self._writer = SegmentWriter(self.folder, f"{self.prefix}-{self.rank:04d}-{self._last:06d}")
            self._parts[self._last] = _Part(self._writer.committed)
        return self._writer

    def _seal(self) -> None:
        if self._writer is None:
            return
        self._full.append(self._writer)
        self._writer = None
        if len(self._full) > _MOST_OPEN or not self.writes_versions:
            self._finish()

    def rest(self) -> None:
        """Close all files. The next state goes to a new segment, and reading opens files again."""
        for writer in (*self._full, *([] if self._writer is None else [self._writer])):
            writer.close()
            if self.writes_versions:
                self._unsynced.extend(writer.paths)
        self._full, self._writer = [], None
        self._reader.close()

    def _finish(self) -> None:
        """Close the segments that are full, when they are safely on the disk; so must be those that were closed."""
        while self._unsynced:
            sync_closed(self._unsynced[-1])
            self._unsynced.pop()
        for writer in self._full:
            if self.writes_versions:
                writer.sync()
            writer.close()
        self._full = []

    def _enter(self, entries: Entries) -> None:
        """Commit entries of the writer, and let their clients' older states count as out of date."""
        writer = self._writer
        assert writer is not None
        writer.commit(entries)
        part = self._parts[self._last]
        part.segment, part.size = writer.committed, writer.size
        self._place(entries, self._last)

    def _place(self, entries: Entries, number: int) -> None:
        """Let clients' states be where the entries of a part say; a client is at most once among them."""
        clients = entries["client"]
        old = self._places[clients]
        for before in np.unique(old["segment"]):
            if before:
                self._parts[int(before)].live -= int(old["length"][old["segment"] == before].sum())
        self._count += int((old["segment"] == 0).sum())
        new = np.empty(len(entries), dtype=_PLACE)
        new["segment"] = number
        for name in ("checksum", "offset", "length"):
            new[name] = entries[name]
        self._places[clients] = new
        self._parts[number].live += int(entries["length"].sum())

    def _rewrite(self) -> None:
        """Copy what still counts out of segments that are mostly out of date, and let these go.

        A round copies at most as much as a segment, or as it wrote itself if that is more.
        """
        assert self._writer is not None
        budget = max(self.segment_bytes, self._writer.size)
        for number, part in sorted(self._parts.items()):
            if number == self._last or 2 * part.live > part.size:
                continue
            if part.live:
                budget -= part.live
                if budget < 0:
                    break
                self._move(number)
            self._drop(number)

    def _move(self, number: int) -> None:
        writer = self._open_writer()
        clients = np.flatnonzero(self._places["segment"] == number).tolist()
        self._enter(np.array([writer.append(index, self._read(index)) for index in clients], dtype=ENTRY))

    def _drop(self, number: int) -> None:
        name = self._parts.pop(number).segment.name
        if not self.writes_versions and name.startswith(self.prefix):
            self._reader.close()
            for path in self.folder.glob(f"{name}.*"):
                path.unlink(missing_ok=True)

    # ------------------------------------------------------------------ versions

    @property
    def needed(self) -> list[str]:
        """The names of the segments in use."""
        return [part.segment.name for part in self._parts.values()]

    def segments(self) -> list[Segment]:
        """Return where this process's clients' states are, when all of it is safely on the disk."""
        self._finish()
        if self._writer is not None:
            self._writer.sync()
        return [part.segment for _, part in sorted(self._parts.items()) if part.segment.entries]

    def load_segments(self, segments: list[Segment], is_mine: Callable[[int], bool] = lambda index: True) -> None:
        """Take a version's states of the clients that are this process's own; nothing but the index is read.

        Raises:
            FederatedError: If a segment is missing or damaged.
        """
        self.clear()
        for segment in sorted(segments, key=lambda s: s.name):
            entries = read_entries(self.folder, segment, len(self._places))
            mine = {}  # the newest entry of each client
            size = 0
            for row, (client, _, length, _) in enumerate(entries.tolist()):
                if is_mine(client):
                    mine[client] = row
                    size += length
            self._last += 1
            self._parts[self._last] = _Part(segment, size)
            self._place(entries[list(mine.values())], self._last)
        for number in [number for number, part in self._parts.items() if not part.live]:
            del self._parts[number]

    def clear(self) -> None:
        """Forget all states; their files stay."""
        self.discard()
        self._seal()
        self._places[:] = 0
        self._parts.clear()
        self._count = 0


def _in_memory(states: Mapping[int, State], device: torch.device) -> MemoryClientStore:
    store = MemoryClientStore()
    store.load_state_dict(states, device)
    return store
