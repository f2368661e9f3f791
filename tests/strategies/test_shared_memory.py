"""Exchanges in shared memory: messages, lost processes, and the same results as with gloo."""

import os
import re
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fed.strategies import shared_memory
from lightning_fed.strategies.shared_memory import SharedMemory
from tests.helpers.memory import message, shared
from tests.helpers.processes import HANGS, in_processes, wait_until
from tests.helpers.selection import few


@pytest.mark.parametrize("count", few([2, 3], [3]))
def test_gather_returns_the_bytes_of_every_process(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "PIECE", 1000)
    # no bytes, less than a piece, exactly one, several, and a different number of pieces in each process
    lengths = [[0] * 3, [1, 0, 5], [1000, 1000, 1000], [1001, 3, 999], [2500, 10_000, 1], [8, 8, 8], [1, 5000, 3000]]

    def work(memory: SharedMemory | None, rank: int, size: int) -> Any:
        assert memory is not None
        return [[part.clone() for part in memory.gather(message(rank, of[rank]))] for of in lengths]

    for outcome in shared(work, tmp_path, count):
        assert not outcome.error, outcome.trace
        for found, of in zip(outcome.value, lengths, strict=True):
            assert [part.tolist() for part in found] == [message(r, of[r]).tolist() for r in range(count)]


def test_sums_are_added_in_rank_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "PIECE", 1000)
    cases = [(n, dtype) for dtype in (torch.float32, torch.float64) for n in (1, 125, 126, 3000, 2)]

    def of(rank: int, size: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(size, generator=torch.Generator().manual_seed(rank), dtype=dtype)

    def work(memory: SharedMemory | None, rank: int, size: int) -> Any:
        assert memory is not None
        totals = [of(rank, *case) for case in cases]
        for total in totals:
            memory.sum(total)
        return totals

    for outcome in shared(work, tmp_path, 3):
        assert not outcome.error, outcome.trace
        for found, case in zip(outcome.value, cases, strict=True):
            assert torch.equal(found, of(0, *case) + of(1, *case) + of(2, *case)), case


@pytest.mark.thorough
def test_messages_are_not_overwritten_before_they_are_read(tmp_path: Path) -> None:
    def work(memory: SharedMemory | None, rank: int, size: int) -> Any:
        assert memory is not None
        wrong = 0
        for k in range(300):
            if k % 50 == 10 * rank:
                time.sleep(0.02)  # each process falls behind at times, long enough that the others sleep
            found = memory.gather(torch.full((1 + 13 * k * (rank + 1) % 401,), k % 251, dtype=torch.uint8))
            wrong += any(bool((part != k % 251).any()) for part in found)
        return wrong

    assert [outcome.value for outcome in shared(work, tmp_path, 3)] == [0, 0, 0]


@pytest.mark.thorough
def test_message_arrives_while_its_sender_does_other_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "PIECE", 2**16)
    length = 3 * shared_memory.PIECE + 5  # several pieces, since any length must work
    has_arrived = tmp_path / "arrived"

    def work(memory: SharedMemory | None, rank: int, size: int) -> Any:
        assert memory is not None
        found = []
        for k in range(4):
            memory.begin(message(rank, length), torch.empty(0, dtype=torch.uint8), message(k, 3))
            if rank == 1:
                time.sleep(0.05)
                found.append([part[:: length + 1].tolist() + part[-3:].tolist() for part in memory.end()])
                has_arrived.touch()
            if k == 0:  # rank 0 joins no exchange until rank 1 has the whole message
                wait_until(has_arrived.exists)
        return found, [part.tolist() for part in memory.gather(message(rank, 2))]

    first, second = shared(work, tmp_path)
    assert not first.error, first.trace
    assert not second.error, second.trace
    last = [message(0, 2).tolist(), message(1, 2).tolist()]
    assert first.value == ([], last)  # messages that it did not read do not disturb later ones
    ends = [message(k, 3).tolist() for k in range(4)]
    assert second.value == ([[[0, e[1], *e], [7, e[1], *e]] for e in ends], last)


def test_ended_process_raises_an_error_naming_it(tmp_path: Path) -> None:
    def work(memory: SharedMemory | None, rank: int, size: int) -> Any:
        assert memory is not None
        memory.gather(message(rank, 3))
        if rank == 0:
            memory.gather(message(rank, 3))
        return os.getpid()

    waiting, gone = shared(work, tmp_path)
    assert f"FederatedError: Process 1 (pid {gone.value}) has ended while process 0 waited" in waiting.error


@pytest.mark.thorough
def test_last_message_of_an_ended_process_arrives(tmp_path: Path) -> None:
    def work(memory: SharedMemory | None, rank: int, size: int) -> Any:
        assert memory is not None
        if rank == 0:
            time.sleep(0.5)
        elif not os.fork():  # it ends at once, as its parent would after its last exchange
            os._exit(0)
        return [part.tolist() for part in memory.gather(message(rank, 3))]

    assert [outcome.value for outcome in shared(work, tmp_path)] == [[[0, 1, 2], [7, 8, 9]]] * 2


@pytest.mark.thorough
def test_waiting_raises_after_the_timeout(tmp_path: Path) -> None:
    has_ended = tmp_path / "ended"

    def work(memory: SharedMemory | None, rank: int, size: int) -> Any:
        assert memory is not None
        if rank == 1:
            return wait_until(has_ended.exists)
        try:
            memory.gather(message(rank, 3))
        finally:
            has_ended.touch()

    waiting, _ = shared(work, tmp_path, timeout=0.3)
    assert re.search(r"Process 0 has waited \d+ s for process 1", waiting.error)
    assert "ClientsStrategy(timeout=...)" in waiting.error


def test_insufficient_shared_memory_raises_an_error_with_the_size(tmp_path: Path) -> None:
    def work(memory: SharedMemory | None, rank: int, size: int) -> Any:
        assert memory is not None
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        memory.gather(message(rank, 2**21))

    for rank, outcome in enumerate(shared(work, tmp_path)):
        assert f"FederatedError: Process {rank} cannot get 4 MiB of memory to share" in outcome.error


def test_shared_memory_is_disabled_if_any_process_cannot_share(tmp_path: Path) -> None:
    faults = {"_machine": lambda: "another", "_memory_files": list}

    def run() -> Any:
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", rank=rank, world_size=3)
        found = []
        for name, fault in faults.items():
            with pytest.MonkeyPatch.context() as patch:
                if rank == 1:
                    patch.setattr(shared_memory, name, fault)
                found.append(SharedMemory.open(rank, 3, HANGS) is None)
        return found

    assert [outcome.value for outcome in in_processes(run, tmp_path, 3)] == [[True, True]] * 3
