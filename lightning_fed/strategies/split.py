"""Splitting every batch among processes, and the exchanges for it."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fed.core.arguments import kind_of
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.seeds import Purpose, derive_seed
from lightning_fed.strategies.peers import NO_PEERS, Peers
from lightning_fed.strategies.stopping import Failure

NO_EXAMPLES = object()
"""The part of a process without examples, if a batch has fewer examples than there are processes."""


class PeerError(ClientError):
    """Another process failed in a client's work; its own error gives the cause."""


class BatchSplit:
    """The processes that split every batch of a client; one process splits nothing.

    All run the same clients in step, with the same parameters. Each gets some examples of every batch. Gradients are
    summed over processes, weighted by examples. So a loss that is a mean over examples has the gradient of the whole
    batch.

    Every exchange during training is a sum of equal length with an entry for failures. A failed process takes part in
    the next sum of the others, and all of them stop.
    """

    def __init__(self, params: Sequence[Tensor] = (), rank: int = 0, size: int = 1, peers: Peers = NO_PEERS) -> None:
        self.rank, self.size = rank, size
        self._peers = peers
        self.fraction = 1.0  # this process's share of the current training batch
        self._params = list(params)

    def cut(self, batch: Any, examples: int) -> tuple[Any, int]:
        """Return this process's part of a batch, or :data:`NO_EXAMPLES`, and the number of examples in it.

        Parts are consecutive and differ by at most one example, larger ones first, so process 0 always has examples.
        """
        if self.size == 1:
            return batch, examples
        first, last = (-(-rank * examples // self.size) for rank in (self.rank, self.rank + 1))
        part = part_of(batch, examples, slice(first, last))  # cut empty parts too, so that all raise errors
        return (part if first < last else NO_EXAMPLES), last - first

    def take(self, batch: Any, examples: int) -> tuple[Any, int]:
        """Return :meth:`cut`, and set :attr:`fraction` for this batch."""
        part, own = self.cut(batch, examples)
        self.fraction = own / examples if examples else 0.0
        return part, own

    def seed(self, seed: int) -> int:
        """Return this process's seed of a random stream, since different examples need different random masks."""
        return seed if self.rank == 0 else derive_seed(seed, Purpose.TRAINING, client=self.rank)

    def reduce_gradients(self) -> None:
        """Replace every parameter's gradient with the sum over all processes, or None if no process has one."""
        for p, total in zip(self._params, self._sum([p.grad for p in self._params]), strict=True):
            p.grad = total

    def sum(self, vector: Tensor) -> None:
        """Replace a vector [P] with its sum over all processes."""
        if self.size > 1:
            parts = vector.split([p.numel() for p in self._params])
            for part, total in zip(parts, self._sum(parts), strict=True):
                assert total is not None
                part.copy_(total.view_as(part))

    def gather(self, record: Any) -> list[Any]:
        """Return the records of all ranks, in order, on every rank."""
        if self.size == 1:
            return [record]
        self._confirm()
        return self._gather(record)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Raise an error of one process in all of them, so that none waits for a process that is gone.

        The others raise a ClientError or, if no process failed, the request to stop that this one received.
        """
        if self.size == 1:
            yield
            return
        try:
            yield
            self._confirm()
        except PeerError:
            Failure.raise_first(self._gather(None))
        except BaseException as error:
            self._sum([None] * len(self._params), failed=True)
            Failure.raise_first(self._gather(Failure.of(error)), error)

    def _confirm(self) -> None:
        """Continue only if no process failed."""
        self._sum([None] * len(self._params))

    def _gather(self, record: Any) -> list[Any]:
        records: list[Any] = [None] * self.size
        with self._peers.naming():
            dist.all_gather_object(records, record)
        return records

    @torch.no_grad()
    def _sum(self, parts: Sequence[Tensor | None], failed: bool = False) -> list[Tensor | None]:
        """Return the sums over all processes of one part per parameter, or None if no process has it."""
        like = self._params[0]
        news = torch.tensor([part is not None for part in parts] + [failed], dtype=like.dtype, device=like.device)
        flat = [
            torch.zeros_like(p) if part is None else part.to_dense()
            for p, part in zip(self._params, parts, strict=True)
        ]
        whole = torch.cat([*(part.reshape(-1) for part in flat), news])
        with self._peers.naming():
            dist.all_reduce(whole)
        *sums, news = whole.split([*(p.numel() for p in self._params), len(news)])
        *given, failures = news.tolist()
        if failures and not failed:
            raise PeerError("Another process failed.")
        return [total.view_as(p) if count else None for p, total, count in zip(self._params, sums, given, strict=True)]


def part_of(batch: Any, examples: int, rows: slice) -> Any:
    """Return some examples of a batch of nested lists, tuples, mappings or dataclasses of tensors.

    The first dimension of every tensor is the examples, unless it is a single number. A list with the length of the
    batch has one entry per example if it holds no tensors (texts), or tensors with other first dimensions (images).

    Example:
        >>> part_of({"x": torch.arange(6).view(3, 2), "name": ["a", "b", "c"]}, 3, slice(1, 3))
        {'x': tensor([[2, 3],
                [4, 5]]), 'name': ['b', 'c']}
    """
    if isinstance(batch, Tensor):
        if batch.ndim and len(batch) != examples:
            raise _cannot_cut(f"a tensor of shape {tuple(batch.shape)}", examples)
        return batch[rows] if batch.ndim else batch
    if batch is None or isinstance(batch, (str, bytes, Number)):
        return batch
    if isinstance(batch, Mapping):
        part: Any = copy.copy(batch)
        for key, value in batch.items():
            part[key] = _column(value, examples, rows)
        return part
    if isinstance(batch, (list, tuple)):
        if len(batch) == examples and next(_tensors(batch), None) is None:
            return batch[rows]
        parts = [_column(item, examples, rows) for item in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(batch, **{f.name: part_of(getattr(batch, f.name), examples, rows) for f in fields(batch)})
    raise _cannot_cut(kind_of(batch), examples)


def _column(item: Any, examples: int, rows: slice) -> Any:
    """Return some examples of a part of a batch, which may be a list with one entry per example."""
    is_list = isinstance(item, (list, tuple)) and not hasattr(item, "_fields")
    if is_list and len(item) == examples > 0:
        shapes = [tensor.shape for tensor in _tensors(item) if tensor.ndim]
        if not shapes or any(shape[0] != examples for shape in shapes):
            return item[rows]
        if isinstance(item, tuple) and len(set(shapes)) == 1:
            # default_collate builds lists of columns; a tuple may come from zip(*examples)
            raise _cannot_cut(
                f"a tuple of {examples} tensors of shape {tuple(shapes[0])}, which may be {examples} examples or"
                f" {examples} columns",
                examples,
            )
    return part_of(item, examples, rows)


def _tensors(part: Any) -> Iterator[Tensor]:
    """Yield the tensors in a part of a batch."""
    if isinstance(part, Tensor):
        yield part
        return
    inner: Iterable[Any] = ()
    if isinstance(part, Mapping):
        inner = part.values()
    elif isinstance(part, (list, tuple)):
        inner = part
    elif is_dataclass(part) and not isinstance(part, type):
        inner = (getattr(part, field.name) for field in fields(part))
    for value in inner:
        yield from _tensors(value)


def _cannot_cut(found: str, examples: int) -> FederatedError:
    return FederatedError(
        f"A batch of {examples} examples holds {found}, which cannot be split among processes: every tensor needs the"
        " examples as its first dimension. Let collate_fn return such tensors, or set strategy='clients', which leaves"
        " batches whole."
    )
