"""Communication between the processes that share the clients of a round."""

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
from lightning_fed.strategies.shared_memory import PIECE, SharedMemory, add_together
from lightning_fed.strategies.stopping import Failure

Record = TypeVar("Record")
Sent: TypeAlias = Sequence[Sequence[Tensor]]
"""The data for each process, as bytes in host memory."""

_ALONE = 2**13  # tensors from this size on are summed separately in shared memory
_TO_ALL = 2**13  # up to this size, each process sends its whole tensor to all, in one exchange instead of two
_ALIGNED = 16  # alignment of sent parts in bytes


class Ranks:
    """The exchanges between the processes of a run: one record and one sum per round; none for one process.

    They use shared memory, if any, or the default process group on a device. ``peers`` name gone processes if an
    exchange fails.
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
        self._capacity = 2**13  # bytes of a record exchanged at once

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a single process; a trainer's next fit connects to the others again."""
        return Ranks, ()

    @staticmethod
    def of(trainer: pl.Trainer) -> "Ranks":
        """Return the processes of a trainer; raise for several without float64, which would sum on the CPU."""
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
        """Return the records of all ranks, in order, on every rank."""
        if self.size == 1:
            return [record]
        if self._shared is not None:
            return [part for part, _ in self.deliver(record, [()] * self.size)()]
        mine = _pickled(record)
        parts = self._all_gather(mine)
        longest = max(length for length, _ in parts)
        if longest > self._capacity:  # all processes see this, and use the larger size from now on
            self._capacity = 2 * longest
            parts = self._all_gather(mine)
        # written by this run's processes
        return [pickle.loads(data[:length].numpy().tobytes()) for length, data in parts]  # noqa: S301

    def _all_gather(self, record: bytes) -> list[tuple[int, Tensor]]:
        """Return all lengths and bytes in one exchange; all_gather_object needs two, 10 % of a short round."""
        mine = torch.zeros(8 + self._capacity, dtype=torch.uint8)
        message = len(record).to_bytes(8, "little") + (record if len(record) <= self._capacity else b"")
        mine[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        mine = mine.to(self.device)
        everybodys = [torch.empty_like(mine) for _ in range(self.size)]
        with self._peers.naming():
            dist.all_gather(everybodys, mine)
        return [(int.from_bytes(m[:8].cpu().numpy().tobytes(), "little"), m[8:].cpu()) for m in everybodys]

    def exchange(self, work: Callable[[], tuple[Record, Sent]]) -> list[tuple[Record, Tensor]]:
        """Do this process's work, and return all records and the bytes sent here; see :meth:`deliver`.

        An error in one process, or a request to stop, is raised in all, so that none waits for a process that is gone.
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
        return [(part, received) for (part, _), received in parts]  # type: ignore[misc]  # none failed

    def gather_at_zero(self, record: Any) -> list[Any]:
        """Return the records of all ranks on rank zero, and an empty list elsewhere."""
        if self.size == 1:
            return [record]
        records: list[Any] = [None] * self.size if self.rank == 0 else []
        with self._peers.naming():
            dist.gather_object(record, records or None)
        return records

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace contiguous tensors of one dtype with their sums over all ranks; all ranks have the same shapes.

        On CPUs, any transport adds them in order of rank, so that the bits do not depend on the machines.
        """
        if self.size == 1 or not tensors:
            return
        if self._shared is not None:  # sum large ones separately: copying them together is slower
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
        """Replace a tensor [n] with its sum over all ranks."""
        if whole.device.type != "cpu":
            dist.all_reduce(whole)
            return
        for piece in whole.split(PIECE // whole.element_size()):
            if len(piece) <= _TO_ALL:
                parts = [torch.empty_like(piece) for _ in range(self.size)]
                dist.all_gather(parts, piece)
                add_together(parts, piece)
                continue
            sent = piece.new_zeros(self.size, -(-len(piece) // self.size))  # each process sums a part of it
            sent.view(-1)[: len(piece)] = piece
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent)
            total = torch.empty_like(sent[0])
            add_together(received.unbind(), total)
            dist.all_gather(list(sent.unbind()), total)
            piece.copy_(sent.view(-1)[: len(piece)])

    def columns(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return this process's share of the columns of all rows [S, p], in the order of ranks.

        ``rows`` [n, P] are this process's rows, and ``counts`` has the number of rows of each process.
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
        """Send a record to all processes, and bytes to each; return a function that returns what arrives here.

        Processes with shared memory wait for each other only when it is called, which must be before the next exchange.
        It returns all records and bytes [n], in the order of ranks and in host memory, valid until the next exchange.
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
            # written by this run's processes
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
        """Return the rank that owns the state of a client, by stored index."""
        return index % self.size

    def owns(self, index: int) -> bool:
        """Return whether this process owns the state of a client, by stored index."""
        return self.owner_of(index) == self.rank


@contextmanager
def metrics_alone(trainer: pl.Trainer, what: str = "") -> Iterator[None]:
    """Make the module's metric objects compute from this process's data only, without exchanges.

    ``what`` describes the work if processes do it at different times; exchanges by user code are then refused.
    """
    if trainer.world_size == 1:
        yield
        return
    parts = trainer.lightning_module.modules()
    kept = [(part, part.distributed_available_fn) for part in parts if isinstance(part, Metric)]
    for metric, _ in kept:
        metric.distributed_available_fn = bool  # always False, and can be pickled
    strategy: Any = trainer.strategy
    try:
        with strategy.working_alone(what):
            yield
    finally:
        for metric, function in kept:
            metric.distributed_available_fn = function


class _HostPickler(pickle.Pickler):
    """Pickles device tensors as CPU tensors; otherwise, unpickling would use the device's memory in each process."""

    def reducer_override(self, value: Any) -> Any:
        is_elsewhere = isinstance(value, Tensor) and value.device.type != "cpu"
        return value.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL) if is_elsewhere else NotImplemented


def _pickled(record: Any) -> bytes:
    with io.BytesIO() as file:
        _HostPickler(file).dump(record)
        return file.getvalue()


def padded(length: int) -> int:
    """Return a length in bytes, rounded up to the alignment."""
    return -(-length // _ALIGNED) * _ALIGNED


def _lengths(sent: Sent) -> list[int]:
    """Return the number of bytes for each process."""
    return [sum(map(len, to)) for to in sent]
