"""Clients of a chunk as a unit, one or several at once: their tensors, and means of logged values."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.func import vmap

from lightning_fed.core.devices import memory_of
from lightning_fed.core.flat import Layout
from lightning_fed.core.types import State, Vector
from lightning_fed.server.client_states.state import Stacked

_Entry: TypeAlias = tuple[Sequence[int], Tensor, float]  # clients, each one's value, and the weight
_Sums: TypeAlias = tuple[list[float], list[float]]  # by client: sums of values times weights, and of weights

_SMALL = 2**16  # up to this number of parameters, a CPU runs several clients at once
_MOST = 2**10  # the most clients that an accelerator runs at once
_VECTORS = 16  # vectors [P] per client in addition to its gradient; up to 9 were measured (Mime with Adam)


class Clients:
    """Clients of a chunk that step together: some rows of the chunk's parameters [S, P].

    Tensors of several clients have an extra first dimension. :meth:`each` applies a function of one client to each of
    them.
    """

    def __init__(self, y: Tensor, rows: Sequence[int], layout: Layout) -> None:
        self.rows, self.count, self._layout = rows, len(rows), layout
        self.is_one = len(rows) == 1
        self.at: int | slice | Tensor = rows[0]  # indexes tensors of the chunk's clients [S, ...]
        if not self.is_one:
            self.at = slice(rows.start, rows.stop) if isinstance(rows, range) else torch.tensor(rows, device=y.device)
        self.y = y[self.at]  # [n, P], or [P] for one; a copy if several rows are not a range
        self.views = self._cut(self.y)

    def of(self, stacked: Iterable[Tensor]) -> list[Tensor]:
        """Return these clients' part of the chunk's tensors [S, ...]."""
        return [value[self.at] for value in stacked]

    def cut(self, stacked: Tensor) -> list[Tensor]:
        """Return these clients' part of the chunk's vectors [S, P], one per parameter."""
        return self._cut(stacked[self.at])

    def _cut(self, part: Tensor) -> list[Tensor]:
        return self._layout.views(part) if self.is_one else self._layout.stacked_views(part)

    def put(self, stacked: Tensor, columns: Sequence[Tensor]) -> None:
        """Write these clients' vectors, given per parameter, into the chunk's [S, P]."""
        shape = (-1,) if self.is_one else (self.count, -1)
        stacked[self.at] = torch.cat([column.reshape(shape) for column in columns], dim=-1)

    def each(self, function: Callable[..., Any], in_dims: Any = 0) -> Callable[..., Any]:
        """Turn a function of one client's tensors into one of all clients' tensors; with ``vmap`` for several."""
        return function if self.is_one else vmap(function, in_dims=in_dims, randomness="different")


def default_chunk_size(y: Vector, step_bytes: int = 0) -> int:
    """Return the number of clients with parameters [P] to run at once.

    On a CPU, one at a time is fastest unless the model is small, since its parameters stay in the cache. On an
    accelerator, it is a power of two that fills half of the memory, given the bytes of one gradient. It does not depend
    on the free memory, since random layers draw different numbers for other chunk sizes.
    """
    if y.device.type == "cpu":
        return min(128, 2**20 // y.numel()) if y.numel() <= _SMALL else 1
    memory = memory_of(y.device)
    room = (memory.total if memory else 2**33) // 2
    fitting = room // (step_bytes + _VECTORS * y.numel() * y.element_size())
    return 1 << max(0, min(_MOST, fitting).bit_length() - 1)


class ChunkMemory:
    """Memory for the parameters and changes [S, P] of up to S clients, reused by every chunk."""

    def __init__(self, layout: Layout, count: int, like: Vector) -> None:
        self.layout = layout
        self.y = like.new_empty(count, layout.numel)
        self.delta = like.new_empty(count, layout.numel)
        self._clients: dict[range, Clients] = {}

    def clients(self, rows: range) -> Clients:
        """Return some clients, cached since views of their parameters take a few microseconds each."""
        if rows not in self._clients:
            if len(self._clients) > 2 * len(self.y):  # groups of clients may differ from round to round
                self._clients.clear()
            self._clients[rows] = Clients(self.y, rows, self.layout)
        return self._clients[rows]


class ChunkMeans:
    """Collects the values of a chunk's steps, and reads them once at the end."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._losses: list[_Entry] = []
        self._logged: dict[str, list[_Entry]] = {}
        self._sums: dict[str, _Sums] = {}

    def add(
        self,
        clients: Sequence[int],
        examples: int,
        loss: Tensor,
        values: Mapping[str, Tensor],
        sizes: Mapping[str, float | None],
    ) -> None:
        """Add the losses and logged values of some clients' step on batches of ``examples`` examples.

        ``sizes`` are the batch sizes that the values were logged with; None means ``examples``.
        """
        self._losses.append((clients, loss, examples))
        for name, value in values.items():
            size = sizes[name]
            self._logged.setdefault(name, []).append((clients, value, examples if size is None else size))

    def of_clients(self) -> tuple[list[float], list[dict[str, float]]]:
        """Return each client's mean loss, and the means of its logged values."""
        read: dict[tuple[int, ...], list[float]] = {}  # a loss that is also logged is the same tensor
        totals, weights = self._sum(self._losses, read)
        loss, logged = list[float](), list[dict[str, float]]()
        for total, weight in zip(totals, weights, strict=True):
            loss.append(total / weight if weight else float("nan"))
            logged.append({})
        for name, entries in self._logged.items():
            self._sums[name] = self._sum(entries, read)
            for own, total, weight in zip(logged, *self._sums[name], strict=True):
                if weight:
                    own[name] = total / weight
        return loss, logged

    def _sum(self, entries: Sequence[_Entry], read: dict[tuple[int, ...], list[float]]) -> _Sums:
        totals, weights = [0.0] * self._count, list[float]([0] * self._count)
        key = tuple([id(value) for _, value, _ in entries])
        if entries and key not in read:
            read[key] = torch.cat([value.reshape(-1) for _, value, _ in entries]).tolist()
        values = iter(read.get(key, ()))
        for clients, _, weight in entries:
            for client in clients:
                totals[client] += weight * next(values)
                weights[client] += weight
        return totals, weights

    def losses_of(self, row: int) -> list[float]:
        """Return the loss of each local step of one client."""
        steps = (zip(at, loss.reshape(-1).tolist(), strict=True) for at, loss, _ in self._losses if row in at)
        return [loss for step in steps for client, loss in step if client == row]

    def add_to(self, means: dict[str, tuple[float, float]], without: Collection[int] = ()) -> None:
        """Add clients' logged values, except for some rows, to the round's sums of values and of examples."""
        for name, (totals, weights) in self._sums.items():
            for row in without:
                totals[row], weights[row] = 0.0, 0
            if any(weights):
                total, weight = means.get(name, (0.0, 0))
                means[name] = (total + sum(totals), weight + sum(weights))


def of_each(function: Callable[..., Any], arguments: tuple[Any, ...], count: int) -> Any:
    """Apply a function of one client's tensors, in dicts and tuples, to all clients' stacked ones [S, ...]."""
    if count > 1:
        return vmap(function)(*arguments)
    return _in_tensors(function(*_in_tensors(arguments, 0)), None)


def _in_tensors(value: Any, index: int | None) -> Any:
    """Index all tensors in dicts and tuples; ``torch.utils._pytree`` takes three times as long."""
    if isinstance(value, Tensor):
        return value[index]
    if isinstance(value, tuple):
        return tuple([_in_tensors(part, index) for part in value])
    return {name: _in_tensors(part, index) for name, part in value.items()}


def stack_states(states: Sequence[State], order: Sequence[int]) -> State:
    """Return states stacked [S, ...] in the given order."""
    if not isinstance(states, Stacked) and not states[order[0]]:
        return {}
    if len(states) == 1:
        return {name: value[None] for name, value in states[0].items()}  # a view, since nothing changes it in place
    if isinstance(states, Stacked):
        is_ordered = list(order) == list(range(len(order)))
        return {name: value if is_ordered else value[list(order)] for name, value in states.together.items()}
    return {name: torch.stack([states[i][name] for i in order]) for name in states[order[0]]}
