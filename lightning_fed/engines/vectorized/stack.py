"""Memory for the parameters of a chunk's clients."""

from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from lightning_fed.core.flat import Layout
from lightning_fed.core.types import Vector

__all__ = ["Cut", "Stack"]


@dataclass(frozen=True, slots=True)
class Cut:
    """The parameters of n adjacent clients of a chunk, in pieces.

    Attributes:
        columns: Each parameter of all of them, [n, n_p].
        views: The same in the parameter's shape, [n, *shape].
        alone: The same of a single client, [*shape]; none if there are several.
    """

    columns: list[Tensor]
    views: list[Tensor]
    alone: list[Tensor]


class Stack:
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
        self.spans = list(zip(accumulate(layout.sizes, initial=0), layout.sizes, strict=False))
        self._cuts: dict[tuple[int, int], Cut] = {}

    def cut(self, start: int, stop: int) -> Cut:
        """Return the parameters of some clients in pieces."""
        found = self._cuts.get((start, stop))
        if found is None:
            columns = [self.y[start:stop, a : a + n] for a, n in self.spans]
            views = [c.view(stop - start, *shape) for c, shape in zip(columns, self.layout.shapes, strict=True)]
            found = Cut(columns, views, [view[0] for view in views] if stop - start == 1 else [])
            self._cuts[start, stop] = found
        return found
