"""Exchanges between the processes of one machine through shared memory.

Through sockets, an exchange takes from 0.2 ms to several ms, because a waiting process sleeps and must be woken. This
is slowest on virtual machines. Here, a process first polls for a while.
"""

import mmap
import os
import select
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fed.core.errors import FederatedError

PIECE = 2**22
"""Bytes of a sum exchanged at once; larger sums are exchanged in pieces."""

_HEADER = 64  # bytes before the data: the exchange's number and the message's length in bytes
_SPIN = 0.005  # seconds of busy waiting
_LONGEST_SLEEP = 0.001  # seconds of one sleep after busy waiting
_NUMBER = 8  # bytes of a number


class SharedMemory:
    """Exchanges between the processes of one machine.

    Every process writes to its own memory, which the others read. It alternates between two halves. When a process
    rewrites one, all others have begun the exchange in between, and so have read the earlier data. ``files`` are open,
    two per process, and ``timeout`` is in seconds.
    """

    def __init__(self, rank: int, pids: Sequence[int], files: Sequence[Sequence[int]], timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, len(pids), timeout
        self._pids, self._files = pids, files
        self._alive = {r: os.pidfd_open(pid) for r, pid in enumerate(pids) if r != rank}
        self._maps: dict[tuple[int, int], Tensor] = {}
        self.number = 0  # exchanges begun so far
        self._has_begun = False  # whether an exchange is unfinished
        weakref.finalize(self, _close, [*self._alive.values(), *(file for pair in files for file in pair)])

    @staticmethod
    def open(rank: int, size: int, timeout: float) -> "SharedMemory | None":
        """Set up shared memory between all processes of the default process group; all must call it.

        Returns None on several machines, or if the system does not support it.
        """
        own = _memory_files()
        offers: list[tuple[str, int, list[int]]] = [("", 0, [])] * size
        dist.all_gather_object(offers, (_machine(), os.getpid(), own))
        found = None
        if all(machine == _machine() and files for machine, _, files in offers):
            try:
                files = [
                    own if r == rank else [os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR) for file in theirs]
                    for r, (_, pid, theirs) in enumerate(offers)
                ]
                found = SharedMemory(rank, [pid for _, pid, _ in offers], files, timeout)
            except OSError:
                found = None
        if found is None:
            _close(own)
        answers = [False] * size
        dist.all_gather_object(answers, found is not None)
        return found if all(answers) else None

    def begin(self, *parts: Tensor) -> None:
        """Publish a message of parts, as bytes [n_1], [n_2], ...; the others read it in :meth:`end`.

        If :meth:`end` is not called, the next exchange ends this one.
        """
        if self._has_begun:
            self.end()
        half, length = self.number % 2, sum(map(len, parts))
        file, memory, at = self._files[self.rank][half], self._memory(self.rank, half, length), 0
        for part in parts:
            memory[at : at + len(part)] = part
            at += len(part)
        self.number += 1
        os.pwrite(file, length.to_bytes(_NUMBER, "little"), _NUMBER)
        os.pwrite(file, self.number.to_bytes(_NUMBER, "little"), 0)  # last: marks the rest as complete
        self._has_begun = True

    def end(self) -> list[Tensor]:
        """Return all messages, in the order of ranks, in shared memory; valid until the next exchange begins."""
        self._has_begun = False
        half, found = (self.number - 1) % 2, []
        for rank, files in enumerate(self._files):
            if rank != self.rank:
                self._wait_for(rank, half)
            length = int.from_bytes(os.pread(files[half], _NUMBER, _NUMBER), "little")
            found.append(self._memory(rank, half, length)[:length])
        return found

    def gather(self, message: Tensor) -> list[Tensor]:
        """Publish a message of any length [n], and return the messages of all processes."""
        self.begin(message)
        return self.end()

    def sum(self, whole: Tensor) -> None:
        """Replace a tensor [n] with its sum over all processes, in order of rank; lengths must be equal."""
        for piece in whole.split(PIECE // whole.element_size()):
            add_together([part.view(whole.dtype) for part in self.gather(piece.view(torch.uint8))], piece)

    def _memory(self, rank: int, half: int, length: int) -> Tensor:
        """Return a process's memory, of at least ``length`` bytes."""
        found = self._maps.get((rank, half))
        if found is None or len(found) < length:
            file = self._files[rank][half]
            size = os.fstat(file).st_size
            if size < _HEADER + length:
                size = _HEADER + max(length, min(PIECE, 2 * length))
                try:
                    os.posix_fallocate(file, 0, size)
                except OSError as error:
                    raise FederatedError(
                        f"Process {self.rank} cannot get {size / 2**20:,.0f} MiB of memory to share with the others"
                        f" ({error.strerror}). Free memory, or train in one process."
                    ) from error
            found = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)[_HEADER:]
            self._maps[rank, half] = found
        return found

    def _wait_for(self, rank: int, half: int) -> None:
        """Wait until another process has written its message."""
        file, expected = self._files[rank][half], self.number.to_bytes(_NUMBER, "little")
        started, interrupt = time.monotonic(), None
        while os.pread(file, _NUMBER, 0) != expected:
            waited = time.monotonic() - started
            try:
                if waited < _SPIN:
                    os.sched_yield()
                    continue
                time.sleep(min(waited / 8, _LONGEST_SLEEP))
            except KeyboardInterrupt as error:
                interrupt = error  # the others need this process until the exchange is over
            gone = self._is_gone(rank)
            if (gone or waited > self.timeout) and os.pread(file, _NUMBER, 0) != expected:
                what = (
                    f"Process {rank} (pid {self._pids[rank]}) has ended while process {self.rank} waited for it."
                    if gone
                    else f"Process {self.rank} has waited {waited:.0f} s for process {rank}, and"
                    " ClientsStrategy(timeout=...) says to wait no longer."
                )
                raise FederatedError(f"{what} See its last lines for the reason. The run can resume from a checkpoint.")
        if interrupt is not None:
            raise interrupt

    def _is_gone(self, rank: int) -> bool:
        poll = select.poll()
        poll.register(self._alive[rank], select.POLLIN)
        return bool(poll.poll(0))


def add_together(parts: Sequence[Tensor], total: Tensor) -> None:
    """Add at least two tensors in order, which determines the bits, and write the sum to ``total``."""
    torch.add(parts[0], parts[1], out=total)
    for part in parts[2:]:
        total.add_(part)


def _memory_files() -> list[int]:
    """Return two new files in memory, or an empty list if not supported."""
    try:
        files = [os.memfd_create(f"lightning_fed_{half}") for half in range(2)]
        for file in files:
            os.posix_fallocate(file, 0, mmap.PAGESIZE)
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return []
    return files


def _close(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)


def _machine() -> str:
    """Return an id of this machine and of the processes that can see each other on it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown {os.getpid()}"  # unique to this process
