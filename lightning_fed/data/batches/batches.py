"""One client's batches: an epoch in an order fixed by a generator, and a full pass in stored order."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from lightning_fed.core.devices import can_pin
from lightning_fed.core.errors import ClientError
from lightning_fed.core.seeds import KeyedStream, Purpose
from lightning_fed.data.batches.examples import inner_indices, rows_in, size_of
from lightning_fed.data.batches.random_states import RandomStates, WorkerSeeds
from lightning_fed.data.batches.settings import Batches, BatchSettings

_AHEAD = 2**22  # bytes of batches to look up at once on an accelerator


class ClientBatches(ABC):
    """One client's training data as batches.

    Attributes:
        size: The client's number of examples n_i.
    """

    size: int

    expected_size: float | None = None
    """The expected number of examples in a batch, if batches are random samples of the examples."""

    @abstractmethod
    def num_batches(self) -> int:
        """Return the number of training batches in one local epoch."""

    def num_examples(self, num_batches: int) -> int:
        """Return the number of examples in the first ``num_batches`` batches of a local epoch.

        The default assumes batches of equal size.
        """
        return round(self.size * min(1.0, num_batches / max(1, self.num_batches())))

    @abstractmethod
    def epoch(self, generator: torch.Generator, shuffle: bool = True) -> Batches:
        """Yield the augmented and transformed batches of one local epoch, each with its number of examples.

        Args:
            generator: The only source of order and augmentation. A second epoch from the same generator has a different
                order and augmentation.
            shuffle: False gives the stored order, even if the data module's ``shuffle`` is True.
        """

    @abstractmethod
    def full(self, generator: torch.Generator) -> Batches:
        """Yield every example once, in stored order and in batches of ``full_batch_size``.

        Args:
            generator: The source of augmentation and of the worker seeds.
        """

    def unaugmented(self, generator: torch.Generator) -> Batches:
        """Yield the batches of :meth:`full` without augmentation, for measurements."""
        return self.full(generator)

    def one(self, generator: torch.Generator) -> Batches:
        """Yield a batch of one example, as may end a local epoch; custom loaders yield nothing.

        Args:
            generator: The source of augmentation.
        """
        return iter(())

    def check_counts(self) -> None:  # noqa: B027
        """Raise before training if the examples in a batch cannot be counted; only custom loaders need this check."""

    def for_own_solve(self) -> "ClientBatches":
        """Return the batches for the inner solve of methods that have one."""
        return self


class _IndexedBatches(ClientBatches):
    """Batches sliced from an ordering of the examples 0, ..., n_i - 1."""

    def __init__(self, size: int, settings: BatchSettings) -> None:
        self.size = size
        self.settings = settings

    def num_batches(self) -> int:
        return self.settings.num_batches(self.size)

    def num_examples(self, num_batches: int) -> int:
        return min(num_batches * self.settings.batch_size, self.settings.epoch_size(self.size))

    def epoch(self, generator: torch.Generator, shuffle: bool = True) -> Batches:
        stream = self.settings.augment_stream(generator)
        batches = self._load(self._order(generator, shuffle), self.settings.batch_size, generator)
        return self.settings.finish(batches, stream)

    def full(self, generator: torch.Generator) -> Batches:
        return self._full(generator, self.settings.augment_stream(generator))

    def unaugmented(self, generator: torch.Generator) -> Batches:
        return self._full(generator, None)

    def one(self, generator: torch.Generator) -> Batches:
        stream = self.settings.augment_stream(generator)
        return self.settings.finish(self._load(torch.arange(1), 1, generator), stream)

    def _full(self, generator: torch.Generator, stream: torch.Generator | None) -> Batches:
        batches = self._load(torch.arange(self.size), self.settings.full_batch_size, generator)
        return self.settings.finish(batches, stream)

    @abstractmethod
    def load(self, chunks: Sequence[Tensor], generator: torch.Generator) -> Batches:
        """Yield one batch of stored examples per chunk of positions; no chunk is empty."""

    def _order(self, generator: torch.Generator, shuffle: bool) -> Tensor:
        # Draw even if unused: this advances the generator, which also seeds the next epoch's workers.
        order = torch.randperm(self.size, generator=generator)
        if self.size == 1 and self.settings.augment is None:  # randperm(1) draws nothing, so advance the generator here
            torch.randint(2, (), generator=generator)
        if not (shuffle and self.settings.shuffle):
            order = torch.arange(self.size)
        size = self.settings.epoch_size(self.size)
        return order if size == self.size else order[:size]

    @abstractmethod
    def _load(self, order: Tensor, batch_size: int, generator: torch.Generator) -> Batches:
        """Yield the stored examples of ``order`` in batches."""


class TensorBatches(_IndexedBatches):
    """Batches indexed directly from tensors: the fast path, a few microseconds per batch.

    The batches match :class:`LoaderBatches` in content, type (a list of tensors) and order. ``num_workers`` is ignored.
    Tensors on an accelerator stay there, and one kernel looks up the rows of several batches. ``indices`` are the
    client's examples [n_i], int64, or None for all.
    """

    def __init__(self, tensors: tuple[Tensor, ...], indices: Tensor | None, settings: BatchSettings) -> None:
        super().__init__(len(tensors[0]) if indices is None else indices.numel(), settings)
        self.tensors = tensors
        self.indices = indices
        self._pin = settings.pin_memory and can_pin()

    @staticmethod
    def of(dataset: Dataset[Any], settings: BatchSettings) -> "TensorBatches | None":
        """Return the batches of a ``TensorDataset`` or its (nested) subsets, or None for any other data set."""
        if settings.collate_fn is not None:
            return None
        indices: Any = None
        while isinstance(dataset, Subset) and _reads_like(dataset, Subset):
            indices = inner_indices(dataset, indices)
            dataset = dataset.dataset
        if not isinstance(dataset, TensorDataset) or not _reads_like(dataset, TensorDataset):
            return None
        if any(type(tensor) is not Tensor or tensor.layout is not torch.strided for tensor in dataset.tensors):
            return None
        if indices is not None:
            indices = rows_in(dataset, indices)
        return TensorBatches(dataset.tensors, indices, settings)

    def part(self, indices: Tensor, settings: BatchSettings) -> "TensorBatches":
        """Return the batches of some of these examples."""
        return TensorBatches(self.tensors, indices if self.indices is None else self.indices[indices], settings)

    @property
    def is_plain(self) -> bool:
        """True if batches are rows of the tensors, without transform or augmentation."""
        return self.settings.augment is None and self.settings.transform is None

    def epoch_rows(self, generator: torch.Generator, shuffle: bool = True) -> Tensor:
        """Return the tensor rows that :meth:`epoch` visits, in order; only valid for plain batches."""
        order = self._order(generator, shuffle)
        return order if self.indices is None else self.indices.index_select(0, order)

    def stored_rows(self) -> Tensor:
        """Return the client's rows of the tensors [n_i], in stored order."""
        return torch.arange(self.size) if self.indices is None else self.indices

    def pick(self, chosen: Tensor) -> list[Tensor]:
        """Return a batch of the client's examples at the positions [B]."""
        return self.look_up((chosen if self.indices is None else self.indices[chosen]).to(self.tensors[0].device))

    def _load(self, order: Tensor, batch_size: int, generator: torch.Generator) -> Batches:
        order = order if self.indices is None else self.indices[order]
        order = order.to(self.tensors[0].device)
        several = 1  # on a CPU: the cache should still hold a batch when training reads it
        if order.device.type != "cpu":
            bytes_of_one = sum([batch_size * tensor[:1].nbytes for tensor in self.tensors])
            several = max(1, _AHEAD // max(1, bytes_of_one))
        for rows in _chunks(order, several * batch_size):
            found = self.look_up(rows)
            if len(rows) <= batch_size:
                yield found, len(rows)
                continue
            for batch in zip(*[tensor.split(batch_size) for tensor in found], strict=True):
                yield list(batch), len(batch[0])

    def load(self, chunks: Sequence[Tensor], generator: torch.Generator) -> Batches:
        """Yield one batch of stored examples per chunk of positions; no chunk is empty."""
        for chunk in chunks:
            yield self.pick(chunk), len(chunk)

    def look_up(self, rows: Tensor) -> list[Tensor]:
        """Return rows of the tensors [n], in pinned memory if requested."""
        batch = [tensor.index_select(0, rows.to(tensor.device)) for tensor in self.tensors]
        if self._pin:
            batch = [tensor.pin_memory() if tensor.device.type == "cpu" else tensor for tensor in batch]
        return batch


class LoaderBatches(_IndexedBatches):
    """Batches of any map-style data set from a PyTorch ``DataLoader``."""

    def __init__(self, dataset: Dataset[Any], settings: BatchSettings) -> None:
        super().__init__(size_of(dataset), settings)
        self.dataset = dataset

    def loader(self, generator: torch.Generator) -> DataLoader[Any]:
        """Return a loader of one local epoch: the batches of :meth:`epoch` before augmentation and transforms."""
        return self._loader(_chunks(self._order(generator, True), self.settings.batch_size), generator)

    def _load(self, order: Tensor, batch_size: int, generator: torch.Generator) -> Batches:
        return self.load(_chunks(order, batch_size), generator)

    def load(self, chunks: Sequence[Tensor], generator: torch.Generator) -> Batches:
        """Yield one batch of stored examples per chunk of positions; no chunk is empty."""
        states = RandomStates(self.dataset, self.settings.collate_fn)
        seeds_here = bool(states) and not self.settings.num_workers
        seed = int(torch.randint(2**63 - 1, (), generator=_copy_of(generator))) if seeds_here else 0
        loaded = iter(self._loader(chunks, generator))
        for batch_idx, chunk in enumerate(chunks):
            if seeds_here:  # seed every batch: clients that share a data set may alternate
                states.seed(seed, batch_idx)
            try:
                batch = next(loaded)
            except (TypeError, RuntimeError) as error:
                message = None if self.settings.collate_fn is not None else batching_problem(self.dataset, error)
                if message is None:
                    raise
                raise ClientError(message) from error
            yield batch, len(chunk)

    def _loader(self, chunks: Sequence[Tensor], generator: torch.Generator) -> DataLoader[Any]:
        settings = self.settings
        num_workers = settings.num_workers if chunks else 0
        return DataLoader(
            self.dataset,
            batch_sampler=[chunk.tolist() for chunk in chunks],
            collate_fn=settings.collate_fn,
            num_workers=num_workers,
            pin_memory=settings.pin_memory and can_pin(),
            generator=_copy_of(generator),  # the loader draws the worker seeds from it
            worker_init_fn=WorkerSeeds(settings.collate_fn, settings.worker_init_fn) if num_workers else None,
            **(settings.loader_options if num_workers else {}),
        )


def batching_problem(dataset: Any, error: Exception) -> str | None:
    """Return a message if ``default_collate`` cannot batch the examples, None for any other error."""
    text = str(error)
    if isinstance(error, TypeError) and "default_collate" in text:
        remedy = (
            "Turn them into tensors in the data set, as with transform=torchvision.transforms.ToTensor() for images, or"
            " give collate_fn."
        )
    elif isinstance(error, RuntimeError) and "stack expects each tensor to be equal size" in text:
        remedy = (
            "Give them one size in the data set, as with transform=torchvision.transforms.Resize((32, 32)) for images"
            " (ClientImages: image_transform, which ends in a tensor), or give collate_fn, which can pad them."
        )
    else:
        return None
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return f"Examples of {type(dataset).__name__} do not make a batch: {text.splitlines()[-1]}. {remedy}"


def _copy_of(generator: torch.Generator) -> torch.Generator:
    """Return a generator in the same state, so that draws do not change the order of later epochs."""
    copied = torch.Generator()
    copied.set_state(generator.get_state())
    return copied


def _chunks(order: Tensor, batch_size: int) -> tuple[Tensor, ...]:
    return torch.split(order, batch_size) if len(order) else ()  # an empty tensor would give one empty chunk


def _reads_like(dataset: Dataset[Any], kind: type[Dataset[Any]]) -> bool:
    """Return whether a data set reads its examples with the methods of the class ``kind``."""
    names = ("__getitem__", "__getitems__", "__len__")
    return all(getattr(type(dataset), name, None) is getattr(kind, name, None) for name in names)


class _OtherBatches(ClientBatches):
    """Base of wrappers around a client's batches; by default, the batches pass through unchanged."""

    def __init__(self, batches: ClientBatches) -> None:
        self.batches, self.size = batches, batches.size

    def num_batches(self) -> int:
        return self.batches.num_batches()

    def num_examples(self, num_batches: int) -> int:
        return self.batches.num_examples(num_batches)

    def epoch(self, generator: torch.Generator, shuffle: bool = True) -> Batches:
        return self._changed(self.batches.epoch(generator, shuffle))

    def full(self, generator: torch.Generator) -> Batches:
        return self._changed(self.batches.full(generator))

    def unaugmented(self, generator: torch.Generator) -> Batches:
        return self._changed(self.batches.unaugmented(generator))

    def one(self, generator: torch.Generator) -> Batches:
        return self._changed(self.batches.one(generator))

    def check_counts(self) -> None:
        self.batches.check_counts()

    def _changed(self, batches: Batches) -> Batches:
        return batches


class ChangedBatches(_OtherBatches):
    """A client's batches, each passed through a function that keeps the number of examples."""

    def __init__(self, batches: ClientBatches, change: Callable[[Any], Any]) -> None:
        super().__init__(batches)
        self.change, self.expected_size = change, batches.expected_size

    def for_own_solve(self) -> ClientBatches:
        """Return the batches for the inner solve of methods that have one."""
        batches = self.batches.for_own_solve()
        return self if batches is self.batches else ChangedBatches(batches, self.change)

    def _changed(self, batches: Batches) -> Batches:
        return ((self.change(batch) if examples else batch, examples) for batch, examples in batches)


class RepeatedBatches(_OtherBatches):
    """A client's batches, each repeated several times."""

    def __init__(self, batches: ClientBatches, times: int) -> None:
        super().__init__(batches)
        self.times = times

    def num_batches(self) -> int:
        """Return the number of training batches in one local epoch, repetitions included."""
        return self.times * self.batches.num_batches()

    def num_examples(self, num_batches: int) -> int:
        """Return the number of examples in the first ``num_batches`` batches, repetitions included."""
        whole, rest = divmod(num_batches, self.times)
        before, after = self.batches.num_examples(whole), self.batches.num_examples(whole + 1) if rest else 0
        return self.times * before + rest * (after - before if rest else 0)

    def epoch(self, generator: torch.Generator, shuffle: bool = True) -> Batches:
        """Yield the batches of one local epoch."""
        for batch, examples in self.batches.epoch(generator, shuffle):
            for _ in range(self.times - 1):
                yield own_copy(batch), examples  # a step may write into its batch
            yield batch, examples


class PoissonBatches(_OtherBatches):
    """A client's batches from Poisson sampling; an epoch has the same number of batches as without it.

    Empty batches are yielded as None. The draws are unpredictable without the run's seed. Different rounds and clients
    draw independently, even if the generators of their batches are equal: these have only 32 bits of seed.
    """

    batches: TensorBatches | LoaderBatches

    def __init__(self, batches: TensorBatches | LoaderBatches, seed: int, round: int, client: int) -> None:
        super().__init__(batches)
        self._key = seed, Purpose.POISSON, round, client
        self.expected_size = batches.size / max(1, batches.num_batches())

    def num_examples(self, num_batches: int) -> int:
        """Return the expected number of examples in some batches."""
        return round(num_batches * self.size / max(1, self.num_batches()))

    def epoch(self, generator: torch.Generator, shuffle: bool = True) -> Batches:
        """Yield the batches of one local epoch; ``shuffle`` does not matter."""
        settings = self.batches.settings
        stream = settings.augment_stream(generator)
        of_epoch = int(torch.randint(2**63 - 1, (), generator=generator))
        bits = KeyedStream(*self._key, of_epoch)
        chosen = list(self._draws(bits))
        some = settings.finish(self.batches.load([rows for rows in chosen if len(rows)], generator), stream)
        for rows in chosen:
            yield next(some) if len(rows) else (None, 0)

    def _draws(self, bits: KeyedStream) -> Iterator[Tensor]:
        """Yield the ascending positions of each batch's examples."""
        count = self.num_batches()
        for _ in range(count):
            yield torch.nonzero(bits.uniform(self.size) < 1.0 / count).flatten()


_DEPTH = 4  # maximum nesting of objects that are not plain collections


def own_copy(batch: Any, depth: int = _DEPTH) -> Any:
    """Copy a batch with its collections, tensors and arrays.

    Other objects are copied with their attributes, or with their ``clone`` method if they have one, as PyG and DGL
    graphs do. Objects that cannot be copied, such as open files, are shared.
    """
    if type(batch) is list and {*map(type, batch)} == {Tensor}:  # fast path
        return [tensor.clone() for tensor in batch]
    return pytree.tree_map(lambda value: _copied(value, depth), batch)


def _copied(value: Any, depth: int) -> Any:
    if depth == 0:
        return value
    if callable(clone := getattr(value, "clone", None)) and not isinstance(value, type):
        return clone()
    try:
        found = copy.copy(value)
    except TypeError:
        return value
    if found is value:  # immutable, such as a number or a string
        return value
    if isinstance(found, MutableMapping):
        for key in found:
            found[key] = own_copy(found[key], depth - 1)
    elif isinstance(found, MutableSequence):
        found[:] = [own_copy(part, depth - 1) for part in found]
    attributes = getattr(found, "__dict__", {})
    for name, part in attributes.items():
        attributes[name] = own_copy(part, depth - 1)
    return found
