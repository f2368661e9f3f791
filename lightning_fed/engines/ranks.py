"""The processes that share the clients of a round among them."""

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from lightning_fed.engines.plan import WorkPlan
from lightning_fed.server.aggregation import Participant
from lightning_fed.stopping import Failure
from lightning_fed.strategies.clients import ClientsStrategy
from lightning_fed.strategies.shared_memory import SharedMemory

__all__ = ["Ranks", "deal", "metrics_alone"]

Record = TypeVar("Record")
# In local steps on a batch of 20, about, of a small model and of a large one:
_MOVE = (4, 1)  # what it takes to send a client's state of one vector, there and back
_TRIP = (8, 1)  # what it takes to send anything at all
_ALONE = 2**13  # numbers from which a tensor is summed by itself where processes share memory
_LARGE = 2**20  # parameters from which a step takes longer than they take to be sent


class Ranks:
    """What the processes of a run exchange: one record and one sum a round. A single process exchanges nothing.

    Args:
        rank: This process, from 0.
        size: The number of processes.
        device: Where what is exchanged must live.
        memory: What they share, if they do; all else goes through the default process group.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        device: torch.device | None = None,
        memory: SharedMemory | None = None,
    ) -> None:
        self.rank, self.size, self.device, self._shared = rank, size, device, memory
        self._capacity = 2**13  # bytes of a record that are exchanged at once

    @staticmethod
    def of(trainer: pl.Trainer) -> "Ranks":
        """Return the processes of a trainer."""
        strategy = trainer.strategy
        memory = strategy.shared_memory if isinstance(strategy, ClientsStrategy) else None
        return Ranks(trainer.global_rank, trainer.world_size, strategy.root_device, memory)

    def gather(self, record: Any) -> list[Any]:
        """Return everybody's record, in the order of ranks, on every rank."""
        if self.size == 1:
            return [record]
        mine = pickle.dumps(record)
        if self._shared is not None:
            found = self._shared.gather(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
            # this run's own processes wrote it
            return [pickle.loads(data.numpy().tobytes()) for data in found]  # noqa: S301
        parts = self._all_gather(mine)
        longest = max(length for length, _ in parts)
        if longest > self._capacity:  # everybody sees that, and knows better next time
            self._capacity = 2 * longest
            parts = self._all_gather(mine)
        # this run's own processes wrote it
        return [pickle.loads(data[:length].numpy().tobytes()) for length, data in parts]  # noqa: S301

    def _all_gather(self, record: bytes) -> list[tuple[int, Tensor]]:
        """Return everybody's length and bytes in a single exchange, which is what takes time in short rounds."""
        mine = torch.zeros(8 + self._capacity, dtype=torch.uint8)
        message = len(record).to_bytes(8, "little") + (record if len(record) <= self._capacity else b"")
        mine[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        mine = mine.to(self.device)
        everybodys = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everybodys, mine)
        return [(int.from_bytes(m[:8].cpu().numpy().tobytes(), "little"), m[8:].cpu()) for m in everybodys]

    def exchange(self, work: Callable[[], Record]) -> list[Record]:
        """Do this process's part, and return what everybody's part came to.

        What goes wrong in one process is raised in all: nobody waits for one that is gone. So is a request to stop.

        Args:
            work: Returns this process's record.

        Raises:
            ClientError: If another process failed.
            SIGTERMException: If one was told to stop, and no other failed; KeyboardInterrupt likewise.
        """
        if self.size == 1:
            return [work()]
        record, failure = None, None
        try:
            record = work()
        except BaseException as error:
            failure = error
        parts = self.gather((record, Failure.of(failure)))
        Failure.raise_first([part for _, part in parts], failure)
        return [part for part, _ in parts]

    def gather_at_zero(self, record: Any) -> list[Any]:
        """Return everybody's record on rank zero, and nothing elsewhere."""
        if self.size == 1:
            return [record]
        records: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(record, records)
        return records or []

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace contiguous tensors of one dtype by their sums over all ranks, whose tensors have the same shapes."""
        if self.size == 1 or not tensors:
            return
        if self._shared is not None:  # large ones one by one, as putting them side by side takes longer than to wait
            large = [t for t in tensors if t.numel() >= _ALONE]
            for tensor in large:
                self._shared.sum(tensor.view(-1))
            tensors = [t for t in tensors if not any(t is other for other in large)]
        if not tensors:
            return
        whole = torch.cat([tensor.reshape(-1) for tensor in tensors])
        if self._shared is not None:
            self._shared.sum(whole)
        else:
            dist.all_reduce(whole)
        for tensor, total in zip(tensors, whole.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(total.view_as(tensor))

    def columns(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return this process's share of the columns of everybody's rows [S, p], in the order of ranks.

        Args:
            rows: This process's rows [n, P], of the same dtype everywhere.
            counts: How many rows each process has.
        """
        if self.size == 1:
            return rows
        parts = rows.tensor_split(self.size, dim=1)
        widths = [part.shape[1] for part in parts]
        mine = widths[self.rank]
        sent = torch.cat([part.reshape(-1) for part in parts])
        received = sent.new_empty(sum(counts) * mine)
        dist.all_to_all_single(
            received, sent, [count * mine for count in counts], [len(rows) * width for width in widths]
        )
        return received.view(sum(counts), mine)

    def exchange_bytes(self, sent: Sequence[Sequence[Tensor]], received: Sequence[int]) -> Tensor:
        """Return the bytes [n] that all processes send to this one, in the order of ranks.

        Args:
            sent: What goes to each process, as bytes.
            received: How many bytes come from each process.
        """
        if self._shared is not None:
            return self._exchange_in_memory(sent)
        whole = torch.cat([torch.empty(0, dtype=torch.uint8, device=self.device), *(t for to in sent for t in to)])
        found = whole.new_empty(sum(received))
        dist.all_to_all_single(found, whole, list(received), [sum(len(part) for part in to) for to in sent])
        return found

    def _exchange_in_memory(self, sent: Sequence[Sequence[Tensor]]) -> Tensor:
        """Do the same where every process may read all that is sent; its lengths go before it."""
        assert self._shared is not None
        sizes = torch.tensor([sum(len(part) for part in to) for to in sent], dtype=torch.int64).view(torch.uint8)
        arrived = []
        for message in self._shared.gather(torch.cat([sizes, *(part for to in sent for part in to)])):
            ends = (message[: len(sizes)].view(torch.int64).cumsum(0) + len(sizes)).tolist()
            part = message[ends[self.rank - 1] if self.rank else len(sizes) : ends[self.rank]]
            arrived += [part] if len(part) else []
        return arrived[0] if len(arrived) == 1 else torch.cat([sizes[:0], *arrived])

    def home_of(self, index: int) -> int:
        """The process that keeps the state of the client with this stored index."""
        return index % self.size

    def is_home_of(self, index: int) -> bool:
        """Whether this process keeps the state of the client with this stored index."""
        return self.home_of(index) == self.rank


def deal(
    plans: Iterable[WorkPlan], ranks: Ranks, keeps_state: bool, most_moves: int = 2**31, numel: int = 0
) -> Mapping[int, int]:
    """Return who trains whom: ranks by stored index.

    Args:
        plans: The clients' work.
        ranks: The processes.
        keeps_state: Whether clients keep state from round to round. They are then trained where it is kept, but for
            those by whose moving all are done sooner; else the largest are dealt first, each to whoever has the fewest
            local steps so far.
        most_moves: The most clients that are trained elsewhere than their state is kept.
        numel: The number of parameters.
    """
    members = {plan.participant.index: plan.participant for plan in plans}
    if keeps_state or ranks.size == 1:
        homes = {index: ranks.home_of(index) for index in members}
        return _balanced(homes, members, ranks.size, most_moves, numel >= _LARGE)
    loads = [0] * ranks.size
    owners = {}
    for member in sorted(members.values(), key=lambda m: (-m.steps, -m.size, m.index)):
        rank = loads.index(min(loads))
        loads[rank] += max(1, member.steps)
        owners[member.index] = rank
    return owners


def _balanced(
    homes: Mapping[int, int], members: Mapping[int, Participant], size: int, most_moves: int, is_large: bool
) -> Mapping[int, int]:
    """Move clients from the process with the most local steps to that with the fewest, as long as it gains."""
    a_move, a_trip = _MOVE[is_large], _TRIP[is_large]
    loads = [0] * size
    for index, rank in homes.items():
        loads[rank] += members[index].steps
    movable = [[i for i, home in homes.items() if home == rank] for rank in range(size)]
    owners, at_home, moves = dict(homes), max(loads), 0
    while True:
        most, fewest = loads.index(max(loads)), loads.index(min(loads))

        def after(index: int, most: int = most, fewest: int = fewest) -> tuple[int, int]:
            return max(loads[most] - members[index].steps, loads[fewest] + members[index].steps) + a_move, index

        best = min(movable[most], key=after, default=None)
        if best is None or moves == most_moves or after(best)[0] >= loads[most]:
            return owners if loads[most] + a_trip < at_home else homes
        owners[best], moves = fewest, moves + 1
        movable[most].remove(best)
        loads[most] += a_move - members[best].steps
        loads[fewest] += a_move + members[best].steps


@contextmanager
def metrics_alone(trainer: pl.Trainer) -> Iterator[None]:
    """Let the module's metric objects count what this process has seen, without exchanging anything with others."""
    parts = trainer.lightning_module.modules() if trainer.world_size > 1 else ()
    kept = [(part, part.distributed_available_fn) for part in parts if isinstance(part, Metric)]
    for metric, _ in kept:
        metric.distributed_available_fn = _is_alone
    try:
        yield
    finally:
        for metric, function in kept:
            metric.distributed_available_fn = function


def _is_alone() -> bool:
    return False
