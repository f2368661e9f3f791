"""Batches of one client from a loader of the user's own."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from lightning_fed.core.arguments import kind_of
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.data.batch_settings import Batches, BatchSettings
from lightning_fed.data.batches import ClientBatches, LoaderBatches

__all__ = ["CustomBatches", "count_examples"]


class CustomBatches(ClientBatches):
    """Batches of a loader of the user's own.

    A full pass reads the loader's data set in stored order if the loader is a ``DataLoader`` over all of a map-style
    data set; any other loader is iterated as it is and must give every example once.

    Args:
        make: Returns a fresh loader of one local epoch, given the generator that its order should come from.
        client_id: The client's id, for messages.
        settings: How a full pass is batched, and what is done to whole batches; an epoch's batches, order and last
            batch are the loader's own affair.
        size: The client's number of examples, if the loader cannot tell.

    Raises:
        FederatedError: If neither the loader nor ``size`` tells the number of examples.
    """

    def __init__(
        self,
        make: Callable[[torch.Generator], Iterable[Any]],
        client_id: ClientId,
        settings: BatchSettings,
        size: int | None = None,
    ) -> None:
        self.client_id = client_id
        self.settings = settings
        self._make = make
        self._measured = make(torch.Generator())  # never iterated: it only tells its lengths
        self.size = self._measure() if size is None else size

    def num_batches(self) -> int:
        """Return the length of the loader.

        Raises:
            FederatedError: If it has none.
        """
        try:
            return len(self._measured)  # type: ignore[arg-type]
        except TypeError as error:
            raise self._error("has no len()", "Give it a __len__, its number of batches") from error

    def num_examples(self, num_batches: int) -> int:
        """Return the number of examples in the first so many batches; a loader with ``drop_last`` leaves some out."""
        loader = self._measured
        if isinstance(loader, DataLoader) and loader.batch_size and loader.drop_last:
            return min(min(num_batches, self.num_batches()) * loader.batch_size, self.size)
        return super().num_examples(num_batches)

    def epoch(self, generator: torch.Generator, shuffle: bool = True) -> Batches:
        """Yield the batches of a fresh loader, which shuffles as it is made to.

        Args:
            generator: What the loader's order and the augmentation come from.
            shuffle: False gives the stored order where the loader is a ``DataLoader`` over all of a data set; another
                keeps its order, with a warning.
        """
        loader = self._measured
        if shuffle or (isinstance(loader, DataLoader) and isinstance(loader.sampler, SequentialSampler)):
            return self._finished(generator, augment=True)
        stored = self._stored()
        if stored is None or not isinstance(loader, DataLoader) or loader.batch_size is None:
            warnings.warn(
                "A client's loader decides on its own which examples it gives, and in which order: overfit_batches may"
                " see other batches in every round. Return a DataLoader with shuffle=False.",
                stacklevel=2,
            )
            return self._finished(generator, augment=True)
        stored.settings = replace(stored.settings, batch_size=loader.batch_size, drop_last=loader.drop_last)
        return stored.epoch(generator, shuffle=False)

    def full(self, generator: torch.Generator) -> Batches:
        """Yield every example once."""
        stored = self._stored()
        return self._finished(generator, augment=True) if stored is None else stored.full(generator)

    def unaugmented(self, generator: torch.Generator) -> Batches:
        """Yield every example once, without augmentation."""
        stored = self._stored()
        return self._finished(generator, augment=False) if stored is None else stored.unaugmented(generator)

    def _stored(self) -> LoaderBatches | None:
        """Return the batches of the loader's data set in stored order, if the loader reads all of it."""
        loader = self._measured
        if not isinstance(loader, DataLoader) or not _reads_all(loader):
            return None
        settings = replace(self.settings, collate_fn=loader.collate_fn, num_workers=loader.num_workers)
        return LoaderBatches(loader.dataset, settings)

    def _finished(self, generator: torch.Generator, augment: bool) -> Batches:
        stream = self.settings.augment_stream(generator) if augment else None
        batches = ((batch, count_examples(batch)) for batch in self._make(generator))
        return self.settings.finish(batches, stream)

    def _measure(self) -> int:
        loader: Any = self._measured
        try:
            # A sampler may choose a part of the data set; one hidden in a custom batch_sampler cannot be counted.
            examples: Any = loader.sampler if isinstance(loader, DataLoader) and loader.batch_size else loader.dataset
            return len(examples)
        except (AttributeError, TypeError) as error:
            problem = "does not tell its number of examples"
            raise self._error(problem, "Override client_size(client_id) as well") from error

    def _error(self, problem: str, remedy: str) -> FederatedError:
        found = f"{kind_of(self._measured)} that {problem}"
        return FederatedError(f"client_dataloader({self.client_id!r}, ...) returned {found}. {remedy}.")


def count_examples(batch: Any) -> int:
    """Return the first dimension of the first tensor in a batch of nested lists, tuples, mappings or dataclasses.

    Raises:
        ClientError: If there is no tensor with a first dimension.

    Example:
        >>> count_examples({"ids": ["a", "b"], "x": torch.zeros(2, 3)})
        2
    """
    for tensor in _tensors(batch):
        if tensor.ndim > 0:
            return len(tensor)
    raise ClientError(f"A batch of type {type(batch).__name__} holds no tensor, so its examples cannot be counted.")


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
        return
    parts: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, (list, tuple)):
        parts = batch
    elif is_dataclass(batch):
        parts = (getattr(batch, field.name) for field in fields(batch))
    for part in parts:
        yield from _tensors(part)


def _reads_all(loader: DataLoader[Any]) -> bool:
    plain = type(loader.batch_sampler) is BatchSampler and not isinstance(loader.dataset, IterableDataset)
    return plain and isinstance(loader.sampler, (RandomSampler, SequentialSampler))
