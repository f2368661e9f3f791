"""Processes that share memory."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fed.strategies.shared_memory import SharedMemory
from tests.helpers.processes import HANGS, in_processes

__all__ = ["message", "shared"]

Work = Callable[[SharedMemory | None, int, int], Any]


def shared(work: Work, folder: Path, count: int = 2, timeout: float = HANGS) -> list[Any]:
    """Run a function in several processes that share memory."""

    def run() -> Any:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", rank=rank, world_size=size)
        return work(SharedMemory.open(rank, size, timeout), rank, size)

    return in_processes(run, folder, count)


def message(rank: int, length: int) -> Tensor:
    """Return the bytes that a process sends."""
    return torch.arange(length, dtype=torch.int64).add(7 * rank).to(torch.uint8)
