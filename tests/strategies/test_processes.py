"""Exchanges between processes: sums, records and messages."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_fed import FederatedError
from lightning_fed.strategies.processes import Ranks
from lightning_fed.strategies.shared_memory import SharedMemory
from tests.helpers.memory import message, shared


def test_single_process_exchanges_nothing() -> None:
    alone, total = Ranks(), torch.arange(3.0)
    alone.sum([total])
    assert total.tolist() == [0.0, 1.0, 2.0]
    assert alone.gather("mine") == ["mine"]
    ((record, received),) = alone.exchange(lambda: ("mine", [()]))
    assert record == "mine"
    assert received.tolist() == []


def test_ranks_exchange_equally_with_or_without_shared_memory(tmp_path: Path) -> None:
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


def test_message_read_out_of_order_raises(tmp_path: Path) -> None:
    def work(memory: SharedMemory | None, rank: int, size: int) -> Any:
        ranks = Ranks(rank, size, torch.device("cpu"), memory)
        deliver = ranks.deliver("first", [[message(rank, 16)]] * size)
        ranks.gather("second")
        deliver()

    for outcome in shared(work, tmp_path):
        assert "FederatedError: Processes have exchanged something else" in outcome.error


def test_multi_process_devices_without_float64_are_rejected() -> None:
    trainer: Any = SimpleNamespace(
        global_rank=0, world_size=2, strategy=SimpleNamespace(root_device=torch.device("mps"))
    )
    with pytest.raises(FederatedError, match=r"2 processes cannot sum over clients in float64 on mps"):
        Ranks.of(trainer)
    trainer.world_size = 1
    assert Ranks.of(trainer).size == 1
