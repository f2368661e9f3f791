"""The processes that share the clients of a round among them."""

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from lightning_fed.compat.package import pl
from lightning_fed.core.devices import has_float64
from lightning_fed.core.errors import FederatedError
from lightning_fed.strategies.ddp import ClientsStrategy, UnwrappedDDPStrategy
from lightning_fed.strategies.peers import NO_PEERS, Peers
from lightning_fed.strategies.shared_memory import PIECE, SharedMemory, add_up
from lightning_fed.strategies.stopping import Failure

__all__ = ["Ranks", "Sent", "metrics_alone", "padded"]

Record = TypeVar("Record")
Sent: TypeAlias = Sequence[Sequence[Tensor]]
"""What goes to each process, as bytes in host memory."""

_ALONE = 2**13  # numbers from which a tensor is summed by itself where processes share memory
_TO_ALL = 2**13  # numbers up to which everybody sends all of a sum to everybody: in one exchange rather than two
_ALIGNED = 16  # bytes that what is sent starts at a multiple of


class Ranks:
    """What the processes of a run exchange: one record and one sum a round. A single process exchanges nothing.

    Args:
        rank: This process, from 0.
        size: The number of processes.
        device: Where the process group takes and gives what is exchanged.
        memory: What they share, if they do; all else goes through the default process group.
        peers: Who is named if an exchange fails, as far as they can be seen.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        device: torch.device | None = None,
        memory: SharedMemory | None = None,
        peers: Peers = NO_PEERS,
    ) -> None:
        self.rank, self.size, self.device, self._shared = rank, size, device, memory
        self._peers = peers
        self._capacity = 2**13  # bytes of a record that are exchanged at once

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is alone until its trainer's next fit, which finds the other processes again."""
        return Ranks, ()

    @staticmethod
    def of(trainer: pl.Trainer) -> "Ranks":
        """Return the processes of a trainer; refuse several without float64, whose sums would be on the CPU."""
        strategy = trainer.strategy
        if trainer.world_size > 1 and not has_float64(strategy.root_device):
            raise FederatedError(
                f"{trainer.world_size} processes cannot sum over clients in float64 on {strategy.root_device}, which"
                " does not have it. Train in one process, devices=1, or on CPUs, accelerator='cpu'."
            )
        memory = strategy.shared_memory if isinstance(strategy, ClientsStrategy) else None
        peers = strategy.peers if isinstance(strategy, UnwrappedDDPStrategy) else NO_PEERS
        return Ranks(trainer.global_rank, trainer.world_size, strategy.root_device, memory, peers)

    def gather(self, record: Any) -> list[Any]:
        """Return everybody's record, in the order of ranks, on every rank."""
        if self.size == 1:
            return [record]
        if self._shared is not None:
            return [part for part, _ in self.deliver(record, [()] * self.size)()]
        mine = _pickled(record)
        parts = self._all_gather(mine)
        longest = max(length for length, _ in parts)
        if longest > self._capacity:  # everybody sees that, and knows better next time
            self._capacity = 2 * longest
            parts = self._all_gather(mine)
        # this run's own processes wrote it
        return [pickle.loads(data[:length].numpy().tobytes()) for length, data in parts]  # noqa: S301

    def _all_gather(self, record: bytes) -> list[tuple[int, Tensor]]:
        """Return everybody's length and bytes in one exchange; all_gather_object takes two: 10 % of a short round."""
        mine = torch.zeros(8 + self._capacity, dtype=torch.uint8)
        message = len(record).to_bytes(8, "little") + (record if len(record) <= self._capacity else b"")
        mine[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        mine = mine.to(self.device)
        everybodys = [torch.empty_like(mine) for _ in range(self.size)]
        with self._peers.naming():
            dist.all_gather(everybodys, mine)
        return [(int.from_bytes(m[:8].cpu().numpy().tobytes(), "little"), m[8:].cpu()) for m in everybodys]

    def exchange(self, work: Callable[[], tuple[Record, Sent]]) -> list[tuple[Record, Tensor]]:
        """Do this process's part, and return every process's record and the bytes sent here; see :meth:`deliver`.

        An error in one process is raised in all, so that none waits for one that is gone. So is a request to stop.

        Raises:
            ClientError: If another process failed.
            SIGTERMException: If one was told to stop, and no other failed; KeyboardInterrupt likewise.
        """
        if self.size == 1:
            return [(work()[0], torch.empty(0, dtype=torch.uint8))]
        record: Record | None = None
        sent: Sent = [()] * self.size
        failure = None
        try:
            record, sent = work()
        except BaseException as error:
            failure = error
        parts = self.deliver((record, Failure.of(failure)), sent)()
        Failure.raise_first([part for (_, part), _ in parts], failure)
        return [(part, received) for (part, _), received in parts]  # type: ignore[misc]  # nobody failed

    def gather_at_zero(self, record: Any) -> list[Any]:
        """Return everybody's record on rank zero, and nothing elsewhere."""
        if self.size == 1:
            return [record]
        records: list[Any] = [None] * self.size if self.rank == 0 else []
        with self._peers.naming():
            dist.gather_object(record, records or None)
        return records

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace contiguous tensors of one dtype by their sums over all ranks, whose tensors have the same shapes.

        On CPUs they are added up by rank, however they travel, so that the bits are those of any other machines.
        """
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
            with self._peers.naming():
                self._sum_by_group(whole)
        for tensor, total in zip(tensors, whole.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(total.view_as(tensor))

    def _sum_by_group(self, whole: Tensor) -> None:
        """Replace a tensor [n] by its sum over all ranks."""
        if whole.device.type != "cpu":
            dist.all_reduce(whole)
            return
        for piece in whole.split(PIECE // whole.element_size()):
            if len(piece) <= _TO_ALL:
                parts = [torch.empty_like(piece) for _ in range(self.size)]
                dist.all_gather(parts, piece)
                add_up(parts, piece)
                continue
            sent = piece.new_zeros(self.size, -(-len(piece) // self.size))  # everybody adds up a part of it
            sent.view(-1)[: len(piece)] = piece
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent)
            total = torch.empty_like(sent[0])
            add_up(received.unbind(), total)
            dist.all_gather(list(sent.unbind()), total)
            piece.copy_(sent.view(-1)[: len(piece)])

    def columns(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return this process's share of the columns of everybody's rows [S, p], in the order of ranks.

        ``rows`` [n, P] are this process's, ``counts`` the number of rows of each process.
        """
        if self.size == 1:
            return rows
        parts = rows.tensor_split(self.size, dim=1)
        widths = [part.shape[1] for part in parts]
        mine = widths[self.rank]
        sent = torch.cat([part.reshape(-1) for part in parts])
        received = sent.new_empty(sum(counts) * mine)
        with self._peers.naming():
            dist.all_to_all_single(
                received, sent, [count * mine for count in counts], [len(rows) * width for width in widths]
            )
        return received.view(sum(counts), mine)

    def deliver(self, record: Record, sent: Sent) -> Callable[[], list[tuple[Record, Tensor]]]:
        """Send a record to everybody, and bytes to each process; return a function that returns what comes here.

        Processes that share memory do not wait for each other until it is called, which must be before the next
        exchange. It returns everybody's record and bytes [n], in the order of ranks and in host memory, valid until the
        next exchange.
        """
        if self.size == 1:
            return lambda: [(record, torch.empty(0, dtype=torch.uint8))]
        lengths = _lengths(sent)
        if self._shared is None:
            parts = self._delivered_by_group(self.gather((record, lengths)), sent)
            return lambda: parts
        mine = pickle.dumps((record, lengths))
        head = bytearray(_ALIGNED + padded(len(mine)))
        head[:8], head[_ALIGNED : _ALIGNED + len(mine)] = len(mine).to_bytes(8, "little"), mine
        self._shared.begin(torch.frombuffer(head, dtype=torch.uint8), *(part for to in sent for part in to))
        return partial(self._delivered_in_memory, self._shared, self._shared.number, (record, lengths))

    def _delivered_in_memory(self, memory: SharedMemory, number: int, own: Any) -> list[tuple[Any, Tensor]]:
        if memory.number != number:
            raise FederatedError(
                "Processes have exchanged something else while clients' states were on their way. Gather values in the"
                " hooks of rounds, not in those of clients."
            )
        parts = []
        for rank, message in enumerate(memory.end()):
            size = int.from_bytes(message[:8].numpy().tobytes(), "little")
            # this run's own processes wrote it
            written = None if rank == self.rank else message[_ALIGNED : _ALIGNED + size].numpy().tobytes()
            record, lengths = own if written is None else pickle.loads(written)  # noqa: S301
            start = _ALIGNED + padded(size) + sum(lengths[: self.rank])
            parts.append((record, message[start : start + lengths[self.rank]]))
        return parts

    def _delivered_by_group(self, records: Sequence[tuple[Any, Sequence[int]]], sent: Sent) -> list[tuple[Any, Tensor]]:
        arriving = [lengths[self.rank] for _, lengths in records]
        if not any(any(lengths) for _, lengths in records):
            return [(record, torch.empty(0, dtype=torch.uint8)) for record, _ in records]
        whole = torch.cat([torch.empty(0, dtype=torch.uint8), *(t for to in sent for t in to)]).to(self.device)
        received = whole.new_empty(sum(arriving))
        with self._peers.naming():
            dist.all_to_all_single(received, whole, arriving, list(records[self.rank][1]))
        received = received.cpu()
        return [(record, part) for (record, _), part in zip(records, received.split(arriving), strict=True)]

    def owner_of(self, index: int) -> int:
        """The process that keeps the state of the client with this stored index."""
        return index % self.size

    def owns(self, index: int) -> bool:
        """Whether this process keeps the state of the client with this stored index."""
        return self.owner_of(index) == self.rank


@contextmanager
def metrics_alone(trainer: pl.Trainer) -> Iterator[None]:
    """Let the module's metric objects count what this process has seen, without exchanging anything with others."""
    if trainer.world_size == 1:
        yield
        return
    parts = trainer.lightning_module.modules()
    kept = [(part, part.distributed_available_fn) for part in parts if isinstance(part, Metric)]
    for metric, _ in kept:
        metric.distributed_available_fn = bool  # always False, and can be pickled
    try:
        yield
    finally:
        for metric, function in kept:
            metric.distributed_available_fn = function


class _HostPickler(pickle.Pickler):
    """Pickles tensors of a device as tensors of the CPU: unpickled, they would take that device's memory everywhere."""

    def reducer_override(self, value: Any) -> Any:
        is_elsewhere = isinstance(value, Tensor) and value.device.type != "cpu"
        return value.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL) if is_elsewhere else NotImplemented


def _pickled(record: Any) -> bytes:
    with io.BytesIO() as file:
        _HostPickler(file).dump(record)
        return file.getvalue()


def padded(length: int) -> int:
    """Return the bytes that something takes before what is sent next."""
    return -(-length // _ALIGNED) * _ALIGNED


def _lengths(sent: Sent) -> list[int]:
    """Return how many bytes go to each process."""
    return [sum(map(len, to)) for to in sent]
