"""The number of examples in a batch: from the loader's sampler, a user's function, or the batch itself."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import fields, is_dataclass
from numbers import Integral
from typing import Any, TypeAlias

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_fed.core.arguments import kind_of
from lightning_fed.core.errors import FederatedError

BatchSizeOf: TypeAlias = Callable[[Any], int]
"""A function from a batch to the number of examples in it."""

_NONE = -1  # marks a 0-dim tensor, which holds no examples


def has_index_lists(loader: Any) -> bool:
    """Return whether a loader builds each batch from one list of indices, with one index per example."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
    )


def sampled_length(loader: Any, batch_idx: int) -> int | None:
    """Return the number of examples in a batch of a loader, if known without iterating its batch sampler.

    Example:
        >>> loader = DataLoader(range(5), batch_size=2)
        >>> [sampled_length(loader, k) for k in range(3)]
        [2, 2, 1]
    """
    if not has_index_lists(loader) or not (loader.in_order or loader.num_workers == 0):
        return None
    batches = loader.batch_sampler
    if isinstance(batches, (list, tuple)):
        return len(batches[batch_idx]) if batch_idx < len(batches) else None
    if type(batches) is not BatchSampler or not isinstance(batches.sampler, Sized):
        return None
    left = len(batches.sampler) - batch_idx * batches.batch_size
    return min(batches.batch_size, left) if left > 0 else None


class RecordedBatches:
    """A batch sampler that records the length of every list of indices it yields.

    A loader with workers draws the lists ahead of its batches, but in the same order.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches
        self.lengths: deque[int | None] = deque()

    def __iter__(self) -> Iterator[Any]:
        """Yield the lists of indices."""
        for indices in self.batches:
            self.lengths.append(len(indices) if hasattr(indices, "__len__") else None)
            yield indices

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self.batches)  # type: ignore[arg-type]


def count_examples(batch: Any, batch_size_of: BatchSizeOf | None = None) -> int:
    """Return the number of examples in a batch, before transforms.

    Without ``batch_size_of``, every tensor must have the same first dimension, and every list of examples the same
    length. A batch of graphs has ``num_graphs``.

    Example:
        >>> import torch
        >>> count_examples({"ids": ["a", "b"], "x": torch.zeros(2, 3)})
        2
        >>> count_examples((tuple(torch.zeros(3, 8, 8) for _ in range(4)), ({}, {}, {}, {})))
        4
    """
    if batch_size_of is not None:
        count = batch_size_of(batch)
        if isinstance(count, bool) or not isinstance(count, Integral) or count < 0:
            raise FederatedError(
                f"batch_size_of returned {count!r} for {kind_of(batch)}: it must return the number of examples in the"
                " batch, an integer."
            )
        return int(count)
    counts = possible_counts(batch)
    if not counts:
        raise FederatedError(
            f"The number of examples in {_shape_of(batch)} is not clear. Pass batch_size_of=..., a function from a"
            " batch to its number of examples, to the data module."
        )
    return counts[0]


def possible_counts(batch: Any) -> list[int]:
    """Return the possible numbers of examples in a batch, starting with the usual convention.

    By convention, the parts of a batch are columns: a tensor's first dimension indexes the examples, and a list of
    values of one kind has one entry per example. Alternatively, a nested list may hold columns, and a batch that is a
    list of values of one kind may be a list of examples.
    """
    shallow, deep = (set(_lengths(batch, True, deep)) for deep in (False, True))
    is_list = isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields")
    found = [next(iter(lengths)) for lengths in (shallow, deep) if len(lengths) == 1 and _NONE not in lengths]
    if is_list and _are_alike(batch) and (found or not shallow):
        found.append(len(batch))
    return list(dict.fromkeys(found))


def _lengths(part: Any, is_outermost: bool, deep: bool) -> Iterator[int]:
    """Yield the number of examples in each part of a batch; ``deep`` reads nested lists as columns."""
    graphs = getattr(part, "num_graphs", None)
    columns: Iterable[Any] | None = None
    if isinstance(part, Mapping):
        columns = part.values()
    elif isinstance(part, tuple) and hasattr(part, "_fields"):
        columns = part
    elif is_dataclass(part) and not isinstance(part, type):
        columns = [getattr(part, field.name) for field in fields(part)]
    if isinstance(part, Tensor):
        yield part.size(0) if part.ndim else _NONE
    elif isinstance(part, PackedSequence):
        yield int(part.batch_sizes[0])
    elif isinstance(graphs, Integral):
        yield int(graphs)
    elif columns is not None:
        for column in columns:
            yield from _lengths(column, False, deep)
    elif isinstance(part, (list, tuple)):
        inner = [length for item in part for length in _lengths(item, False, deep)]
        if is_outermost or (inner and (deep or not _are_alike(part))):
            yield from inner
        else:
            yield len(part)


def _are_alike(items: Sequence[Any]) -> bool:
    """Return whether items may be examples of one kind: tensors of equal ``ndim``, or values of one class."""
    kinds = {(type(item), item.ndim if isinstance(item, Tensor) else 0) for item in items}
    return len(kinds) == 1


def _shape_of(part: Any, depth: int = 0) -> str:
    """Describe a batch briefly, for messages."""
    if isinstance(part, Tensor):
        return f"a tensor {list(part.shape)}"
    named: Any = None
    if isinstance(part, Mapping):
        named = [f"{key!r}: {_shape_of(value, depth + 1)}" for key, value in list(part.items())[:3]]
    elif isinstance(part, (list, tuple)):
        named = [_shape_of(item, depth + 1) for item in part[:3]]
    if not named or depth > 1:
        return kind_of(part)
    return f"{kind_of(part)} of {', '.join(named)}{', ...' if len(part) > 3 else ''}"
