"""Some clients of a chunk as one thing: one client, or several at once."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from lightning_fed.core.flat import Layout
from lightning_fed.core.types import State, Vector
from lightning_fed.server.client_state import Stacked

__all__ = ["ChunkMemory", "Clients", "default_chunk_size", "of_each", "stack_states"]

_SMALL = 2**16  # parameters, up to which a CPU runs several clients at once


class Clients:
    """Some clients of a chunk that step together.

    Tensors of one client have their own shapes; those of several have one dimension more, the first. Whatever is
    written for one client is :meth:`each` client's.

    Args:
        y: The parameters of all clients of the chunk [S, P].
        rows: Which of them these are; parameters of rows that are no range are copies.
        layout: The parameters' shapes.

    Attributes:
        count: Their number, n.
        is_one: Whether it is a single client.
        y: Their parameters [n, P], [P] of one.
        views: The same once per parameter, [n, *shape], [*shape] of one.
    """

    def __init__(self, y: Tensor, rows: Sequence[int], layout: Layout) -> None:
        self.rows, self.count, self._layout = rows, len(rows), layout
        self.is_one = len(rows) == 1
        self._at: int | slice | Tensor = rows[0]
        if not self.is_one:
            self._at = slice(rows.start, rows.stop) if isinstance(rows, range) else torch.tensor(rows, device=y.device)
        self.y = y[self._at]
        self.views = self._cut(self.y)

    def of(self, stacked: Sequence[Tensor]) -> list[Tensor]:
        """Return these clients' part of tensors of the chunk's clients [S, ...]."""
        return [value[self._at] for value in stacked]

    def cut(self, stacked: Tensor) -> list[Tensor]:
        """Return these clients' part of vectors of the chunk's clients [S, P], once per parameter."""
        return self._cut(stacked[self._at])

    def put(self, stacked: Tensor, columns: Sequence[Tensor]) -> None:
        """Write vectors of these clients, given once per parameter, into those of the chunk's [S, P]."""
        shape = (-1,) if self.is_one else (self.count, -1)
        stacked[self._at] = torch.cat([column.reshape(shape) for column in columns], dim=-1)

    def put_states(self, stacked: Tensor, values: Tensor) -> None:
        """Write what is no vector of these clients into that of the chunk's [S, ...]."""
        stacked[self._at] = values

    def _cut(self, part: Tensor) -> list[Tensor]:
        return self._layout.views(part) if self.is_one else self._layout.stacked_views(part)

    def each(self, function: Callable[..., Any], in_dims: Any = 0) -> Callable[..., Any]:
        """Return a function of one client's tensors as one of all of theirs: itself for one, mapped for several.

        Args:
            function: The function.
            in_dims: As for ``vmap``: 0 for arguments that are the clients' own, None for those that all share.
        """
        return function if self.is_one else vmap(function, in_dims=in_dims, randomness="different")


def default_chunk_size(y: Vector) -> int:
    """Return how many clients to run at once.

    On a CPU one at a time is fastest unless the model is small: its parameters stay in the cache then. On a GPU as many
    as fit its memory.

    Args:
        y: The parameters [P].
    """
    if y.device.type == "cpu":
        return min(128, 2**20 // y.numel()) if y.numel() <= _SMALL else 1
    # not what happens to be free: random layers draw other numbers in a chunk of another size
    memory = torch.cuda.get_device_properties(y.device).total_memory if y.device.type == "cuda" else 2**33
    return max(1, min(1024, memory // (32 * y.numel() * y.element_size())))


class ChunkMemory:
    """Memory for the parameters of a chunk's clients and for their changes, the same for every chunk.

    Args:
        layout: The parameters' shapes.
        count: The most clients of a chunk, S.
        like: A vector [P] of the type and the device that the parameters have.
    """

    def __init__(self, layout: Layout, count: int, like: Vector) -> None:
        self.layout = layout
        self.y = like.new_empty(count, layout.numel)
        self.delta = like.new_empty(count, layout.numel)
        self._clients: dict[tuple[int, int], Clients] = {}

    def clients(self, start: int, stop: int) -> Clients:
        """Return some clients; making the views of their parameters takes a few microseconds each."""
        key = (start, stop)
        if key not in self._clients:
            self._clients[key] = Clients(self.y, range(start, stop), self.layout)
        return self._clients[key]


def of_each(function: Callable[..., Any], arguments: tuple[Any, ...], count: int) -> Any:
    """Call a function of one client's tensors for every client of a chunk.

    Args:
        function: The function; tensors may come and go in dictionaries and tuples.
        arguments: Its arguments, stacked [S, ...].
        count: The number of clients, S.
    """
    if count > 1:
        return vmap(function)(*arguments)
    return _each_tensor(lambda value: value[None], function(*_each_tensor(lambda value: value[0], arguments)))


def _each_tensor(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _each_tensor(function, part) for key, part in value.items()}
    return tuple(_each_tensor(function, part) for part in value)


def stack_states(states: Sequence[State], order: Sequence[int]) -> State:
    """Return states stacked [S, ...] in another order."""
    if len(states) == 1:
        return {name: value[None] for name, value in states[0].items()}  # a view, as nothing changes it in place
    if isinstance(states, Stacked):
        is_ordered = list(order) == list(range(len(order)))
        return {name: value if is_ordered else value[list(order)] for name, value in states.together.items()}
    return {name: torch.stack([states[i][name] for i in order]) for name in states[order[0]]}
