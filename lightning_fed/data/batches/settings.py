"""How a client's examples become batches, and what is done to a batch as a whole."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from lightning_fed.core.errors import FederatedError
from lightning_fed.data.batches.counting import BatchSizeOf

__all__ = ["BatchAugmentation", "BatchSettings", "BatchTransform", "Batches", "Chain", "chain"]

Batches: TypeAlias = Iterator[tuple[Any, int]]
"""Batches, each with the number of examples in it."""

BatchTransform: TypeAlias = Callable[[Any], Any]
"""A deterministic function of a whole batch, such as one from bytes to normalised floats."""

BatchAugmentation: TypeAlias = Callable[[Any, torch.Generator], Any]
"""A random function of a whole training batch, which draws from the CPU generator it is given and from nothing else."""


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """How a client's examples become batches.

    Attributes:
        batch_size: Examples in a training batch.
        full_batch_size: Examples in a batch of a full pass, which changes nothing but memory and speed.
        shuffle: Whether an epoch is shuffled at all.
        drop_last: Whether an epoch leaves out a last, smaller batch. A client with fewer examples than ``batch_size``
            keeps its only batch.
        collate_fn: Makes a batch of a list of examples; by default PyTorch's ``default_collate``.
        num_workers: Processes that load a client's examples; they start anew in every epoch of every client.
        pin_memory: Whether collated batches are copied to pinned memory, if there is a GPU.
        transform: Applied to every collated batch.
        augment: Applied to every batch of a gradient, before ``transform``.
        batch_size_of: Counts the examples in a batch of a loader of the user's own, if the loader cannot.
        worker_init_fn: The user's own function of a worker's number, called in each worker.
        loader_options: Other arguments of a ``DataLoader`` with workers, such as ``timeout``.
    """

    batch_size: int = 32
    full_batch_size: int = 512
    shuffle: bool = True
    drop_last: bool = False
    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    pin_memory: bool = False
    transform: BatchTransform | None = None
    augment: BatchAugmentation | None = None
    batch_size_of: BatchSizeOf | None = None
    worker_init_fn: Callable[[int], Any] | None = None
    loader_options: Mapping[str, Any] = field(default_factory=dict)

    def augment_stream(self, generator: torch.Generator) -> torch.Generator | None:
        """Return the generator of one epoch's augmentation, or None if there is none.

        One number is taken from ``generator`` before anything else is, so that the stream does not depend on how the
        batches are loaded, and two epochs differ even if neither draws an order. Without augmentation nothing is drawn.

        Args:
            generator: The generator of the client's epochs.
        """
        if self.augment is None:
            return None
        return torch.Generator().manual_seed(int(torch.randint(2**63 - 1, (), generator=generator)))

    def finish(self, batches: Batches, stream: torch.Generator | None) -> Batches:
        """Yield the batches augmented, if there is a stream to draw from, and transformed."""
        for batch, examples in batches:
            if self.augment is not None and stream is not None:
                batch = self.augment(batch, stream)
            if self.transform is not None:
                batch = self.transform(batch)
            yield batch, examples


class Chain:
    """Functions of a batch, applied one after another.

    Args:
        functions: The functions in order; each is also given the generator, if there is one.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        self.functions = list(functions)

    def __call__(self, batch: Any, *generator: torch.Generator) -> Any:
        """Return what the last function makes of the batch."""
        for function in self.functions:
            batch = function(batch, *generator)
        return batch

    def __repr__(self) -> str:
        """Show the functions."""
        return repr(self.functions)


def chain(owner: str, name: str, functions: Any) -> Callable[..., Any] | None:
    """Return one function of a batch in place of several.

    Args:
        owner: Who was given them, for messages.
        name: The argument they came in.
        functions: A function, a list of functions that are applied in order, or None.

    Raises:
        FederatedError: If something is not a function, or is a class that has yet to be made an instance.
    """
    if functions is None:
        return None
    several: list[Any] = list(functions) if isinstance(functions, (list, tuple)) else [functions]
    for function in several:
        if isinstance(function, type):
            raise FederatedError(
                f"{owner}({name}={function.__name__}) is a class: instantiate it, as in {function.__name__}(...)."
            )
        if not callable(function):
            raise FederatedError(
                f"{owner}({name}={function!r}): {name} must be a function of a whole batch, or a list of them."
            )
    return Chain(several) if len(several) > 1 else next(iter(several), None)
