"""Exchanges in shared memory: what arrives, who is missed, and that they come to the same as those of gloo."""

import os
import re
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fed.strategies import shared_memory
from lightning_fed.strategies.ddp import ClientsStrategy
from lightning_fed.strategies.processes import Ranks
from lightning_fed.strategies.shared_memory import SharedMemory
from tests.engines.test_clients_strategy import TWO, assert_one_result, end
from tests.helpers.processes import HANGS, in_processes, wait_until

Work = Callable[[SharedMemory | None, int, int], Any]


def shared(work: Work, folder: Path, count: int = 2, timeout: float = HANGS) -> list[Any]:
    """Run a function in several processes that have memory in common."""

    def run() -> Any:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", rank=rank, world_size=size)
        return work(SharedMemory.open(rank, size, timeout), rank, size)

    return in_processes(run, folder, count)


def message(rank: int, length: int) -> Tensor:
    return torch.arange(length, dtype=torch.int64).add(7 * rank).to(torch.uint8)


@pytest.mark.parametrize("count", [2, 3])
def test_everybody_gets_everybodys_bytes(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "PIECE", 1000)
    # nothing, less than a piece, exactly one, several, and each process another number of pieces
    lengths = [[0] * 3, [1, 0, 5], [1000, 1000, 1000], [1001, 3, 999], [2500, 10_000, 1], [8, 8, 8], [1, 5000, 3000]]

    def work(memory: SharedMemory | None, rank: int, size: int) -> Any:
        assert memory is not None
        return [[part.clone() for part in memory.gather(message(rank, of[rank]))] for of in lengths]

    for outcome in shared(work, tmp_path, count):
        assert not outcome.error, outcome.trace
        for found, of in zip(outcome.value, lengths, strict=True):
            assert [part.tolist() for part in found] == [message(r, of[r]).tolist() for r in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_are_added_up_by_rank(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "PIECE", 1000)
    sizes = [1, 125, 126, 3000, 2]

    def of(rank: int, size: int) -> Tensor:
        return torch.randn(size, generator=torch.Generator().manual_seed(rank), dtype=dtype)

    def work(memory: SharedMemory | None, rank: int, size: int) -> Any:
        assert memory is not None
        totals = [of(rank, n) for n in sizes]
        for total in totals:
            memory.sum(total)
        return totals

    for outcome in shared(work, tmp_path, 3):
        assert not outcome.error, outcome.trace
        for found, n in zip(outcome.value, sizes, strict=True):
            assert torch.equal(found, of(0, n) + of(1, n) + of(2, n))


def test_no_message_is_overwritten_before_it_is_read(tmp_path: Path) -> None:
    def work(memory: SharedMemory | None, rank: int, size: int) -> Any:
        assert memory is not None
        wrong = 0
        for k in range(300):
            if k % 50 == 10 * rank:
                time.sleep(0.02)  # each falls behind at times, long enough to be waited for asleep
            found = memory.gather(torch.full((1 + 13 * k * (rank + 1) % 401,), k % 251, dtype=torch.uint8))
            wrong += any(bool((part != k % 251).any()) for part in found)
        return wrong

    assert [outcome.value for outcome in shared(work, tmp_path, 3)] == [0, 0, 0]


def test_what_has_begun_arrives_while_its_sender_does_other_work(tmp_path: Path) -> None:
    length = 3 * shared_memory.PIECE + 5  # however much it is

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
            if k == 0:  # rank 0 takes part in nothing until rank 1 has everything
                wait_until(has_arrived.exists)
        return found, [part.tolist() for part in memory.gather(message(rank, 2))]

    first, second = shared(work, tmp_path)
    assert not first.error, first.trace
    assert not second.error, second.trace
    last = [message(0, 2).tolist(), message(1, 2).tolist()]
    assert first.value == ([], last)  # what it has never asked for does not get in the way
    ends = [message(k, 3).tolist() for k in range(4)]
    assert second.value == ([[[0, e[1], *e], [7, e[1], *e]] for e in ends], last)


def test_a_process_that_ends_is_missed_by_name(tmp_path: Path) -> None:
    def work(memory: SharedMemory | None, rank: int, size: int) -> Any:
        assert memory is not None
        memory.gather(message(rank, 3))
        if rank == 0:
            memory.gather(message(rank, 3))
        return os.getpid()

    waiting, gone = shared(work, tmp_path)
    assert f"FederatedError: Process 1 (pid {gone.value}) has ended while process 0 waited" in waiting.error


def test_the_last_message_of_a_process_that_ends_arrives(tmp_path: Path) -> None:
    def work(memory: SharedMemory | None, rank: int, size: int) -> Any:
        assert memory is not None
        if rank == 0:
            time.sleep(0.5)
        elif not os.fork():  # which ends at once, as its parent would after its last exchange
            os._exit(0)
        return [part.tolist() for part in memory.gather(message(rank, 3))]

    assert [outcome.value for outcome in shared(work, tmp_path)] == [[[0, 1, 2], [7, 8, 9]]] * 2


def test_waiting_ends_after_the_timeout(tmp_path: Path) -> None:
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


def test_too_little_memory_is_said(tmp_path: Path) -> None:
    def work(memory: SharedMemory | None, rank: int, size: int) -> Any:
        assert memory is not None
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        memory.gather(message(rank, 2**21))

    for rank, outcome in enumerate(shared(work, tmp_path)):
        assert f"FederatedError: Process {rank} cannot get 4 MiB of memory to share" in outcome.error


@pytest.mark.parametrize("fault", ["machine", "files"])
def test_processes_that_cannot_share_memory_do_not(fault: str, tmp_path: Path) -> None:
    def run() -> Any:
        rank = int(os.environ["RANK"])
        if rank == 1 and fault == "machine":
            shared_memory._machine = lambda: "another"
        if rank == 1 and fault == "files":
            shared_memory._offer = list
        dist.init_process_group("gloo", rank=rank, world_size=3)
        return SharedMemory.open(rank, 3, HANGS) is None

    assert [outcome.value for outcome in in_processes(run, tmp_path, 3)] == [True] * 3


def test_ranks_exchange_the_same_with_and_without(tmp_path: Path) -> None:
    def work(memory: SharedMemory | None, rank: int, size: int) -> Any:
        assert memory is not None
        found = []
        for ranks in (Ranks(rank, size, torch.device("cpu"), memory), Ranks(rank, size, torch.device("cpu"))):
            large = [torch.arange(10_000.0).view(100, 100) * (rank + 1), torch.full((8192,), rank + 0.5)]
            totals = [torch.full((2, 3), rank + 0.25), large[0], torch.arange(5.0) * rank, large[1]]
            ranks.sum(totals)
            ranks.sum(large[:1])
            sent = [[message(rank, 16 * (to + 1)), message(rank + to, 16)] for to in range(size)]
            received = [(record, part.tolist()) for record, part in ranks.deliver(f"from {rank}", sent)()]
            found.append(([t.tolist() for t in totals], received, ranks.gather({"rank": rank})))
        return found

    for outcome in shared(work, tmp_path, 3):
        assert not outcome.error, outcome.trace
        assert outcome.value[0] == outcome.value[1]


def test_what_was_sent_before_another_exchange_is_not_taken_for_something_else(tmp_path: Path) -> None:
    def work(memory: SharedMemory | None, rank: int, size: int) -> Any:
        ranks = Ranks(rank, size, torch.device("cpu"), memory)
        deliver = ranks.deliver("first", [[message(rank, 16)]] * size)
        ranks.gather("second")
        deliver()

    for outcome in shared(work, tmp_path):
        assert "FederatedError: Processes have exchanged something else" in outcome.error


def test_a_fit_ends_the_same_with_and_without(tmp_path: Path) -> None:
    alone = end()
    for name, work in {
        "with": lambda: end(**TWO),
        "without": lambda: end(strategy=ClientsStrategy(share_memory=False), devices=2),
    }.items():
        (tmp_path / name).mkdir()
        outcomes = in_processes(work, tmp_path / name)
        for outcome in outcomes:
            assert not outcome.error, outcome.trace
        assert_one_result(alone, [{"run": outcome.value} for outcome in outcomes], "run")
