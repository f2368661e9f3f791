"""Batch settings: how examples become batches, batch transforms, and the settings of a given loader."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler
from torch.utils.data.dataloader import default_collate

from lightning_fed.core.arguments import kind_of
from lightning_fed.core.errors import FederatedError
from lightning_fed.data.batches.counting import BatchSizeOf

Batches: TypeAlias = Iterator[tuple[Any, int]]
"""Batches, each with the number of examples in it."""

BatchTransform: TypeAlias = Callable[[Any], Any]
"""A deterministic function of a whole batch, such as the conversion of bytes to normalized floats."""

BatchAugmentation: TypeAlias = Callable[[Any, torch.Generator], Any]
"""A random function of a whole training batch that draws only from the given CPU generator."""


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """The settings of a client's batches; see :class:`lightning_fed.FederatedDataModule`."""

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

    def epoch_size(self, size: int) -> int:
        """Return the number of examples in a local epoch of a client with ``size`` examples."""
        whole = size // self.batch_size * self.batch_size
        return whole if self.drop_last and whole else size

    def num_batches(self, size: int) -> int:
        """Return the number of batches in a local epoch of a client with ``size`` examples."""
        return -(-self.epoch_size(size) // self.batch_size)

    def augment_stream(self, generator: torch.Generator) -> torch.Generator | None:
        """Return the generator of one epoch's augmentation, or None if there is none.

        The first number drawn from ``generator`` seeds it. So the stream does not depend on how batches are loaded, and
        two epochs differ even without shuffling. Without augmentation, nothing is drawn.
        """
        if self.augment is None:
            return None
        return torch.Generator().manual_seed(int(torch.randint(2**63 - 1, (), generator=generator)))

    def finish(self, batches: Batches, stream: torch.Generator | None) -> Batches:
        """Yield the batches, augmented if there is a stream, and transformed."""
        for batch, examples in batches:
            if self.augment is not None and stream is not None:
                batch = self.augment(batch, stream)
                if isinstance(batch, (list, tuple)) and any(part is stream for part in batch):
                    raise FederatedError(
                        f"augment={self.augment!r} returned the generator as a part of the batch: it must be a function"
                        " (batch, generator) -> batch, which a transform of torchvision is not. Apply that one in the"
                        " data set, so that every image gets a new draw, or use RandomFlip and RandomCrop of"
                        " lightning_fed.data."
                    )
            if self.transform is not None:
                batch = self.transform(batch)
            yield batch, examples


class Chain:
    """Functions of a batch, applied one after another."""

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        self.functions = list(functions)

    def __call__(self, batch: Any, *generator: torch.Generator) -> Any:
        """Return the batch after all functions."""
        for function in self.functions:
            batch = function(batch, *generator)
        return batch

    def __repr__(self) -> str:
        """Return the functions as text."""
        return repr(self.functions)


def chain(owner: str, name: str, functions: Any) -> Callable[..., Any] | None:
    """Return the argument ``functions`` (a function, a list of them in order, or None) as one function."""
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


_OPTIONS = ("timeout", "prefetch_factor", "multiprocessing_context")


def check_options(owner: str, options: Any) -> dict[str, Any]:
    """Return the argument ``loader_options`` as a dictionary."""
    if options is None:
        return {}
    if not isinstance(options, Mapping) or (unknown := sorted(set(options) - set(_OPTIONS), key=str)):
        found = repr(options) if not isinstance(options, Mapping) else f"it has {unknown[0]!r}"
        raise FederatedError(f"{owner}: loader_options may give {', '.join(_OPTIONS)}; {found}.")
    return dict(options)


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments of a ``DataLoader`` that only affect its workers, if set."""
    options = {name: getattr(loader, name) for name in _OPTIONS}
    return {name: value for name, value in options.items() if value and loader.num_workers > 0}


def order_of(loader: DataLoader[Any]) -> Any:
    """Return the object that orders a loader's examples: its sampler, or a batch sampler of a custom class.

    A loader built with a ``batch_sampler`` has a ``SequentialSampler`` as ``sampler``, but does not use it.
    """
    batches = loader.batch_sampler
    return batches.sampler if type(batches) is BatchSampler else loader.sampler if batches is None else batches


def repeats_or_skips(loader: DataLoader[Any]) -> bool:
    """Return whether the loader's sampler is known to repeat examples or to skip some at random."""
    order = order_of(loader)
    if not isinstance(order, (RandomSampler, WeightedRandomSampler)):
        return False
    examples: Any = loader.dataset
    return bool(order.replacement or order.num_samples != len(examples))


def settings_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments of :class:`lightning_fed.FederatedDataModule` that correspond to a loader.

    The loader's ``generator`` and ``persistent_workers`` are ignored, with a warning. A loader that selects or repeats
    examples raises an error, since clients cannot do that.
    """
    if not isinstance(loader, DataLoader):
        raise FederatedError(f"from_loader(loader=...) must be a DataLoader, found a {type(loader).__name__}.")
    remedy = "override FederatedDataModule.client_dataloader(client_id, generator)"
    kind, sampler = type(loader), order_of(loader)
    batches: Any = loader.batch_sampler
    if kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator:
        raise FederatedError(
            f"from_loader: {kind_of(loader)} makes its batches in its own way, which clients' loaders would not do."
            f" Pass a torch.utils.data.DataLoader; or {remedy}."
        )
    if batches is None:
        raise FederatedError(
            "from_loader: the loader has batch_size=None, so its data set gives whole batches, which cannot be split"
            f" among clients. Pass a loader with a batch size; or {remedy}."
        )
    in_order, in_random = type(sampler) is SequentialSampler, type(sampler) is RandomSampler
    if not (in_order or in_random) or repeats_or_skips(loader):
        raise FederatedError(
            f"from_loader: the loader's order comes from {type(sampler).__name__}, which clients cannot apply to their"
            f" parts. Pass a loader that visits every example once, with shuffle=True or False; or {remedy}."
        )
    if loader.generator is not None or getattr(sampler, "generator", None) is not None:
        warnings.warn(
            "from_loader does not use the loader's generator: the order of each client's examples comes from the"
            " trainer's seed, the round and the client.",
            stacklevel=3,
        )
    if loader.persistent_workers:
        warnings.warn(
            "from_loader does not use persistent_workers=True: the workers start in every local epoch of every client.",
            stacklevel=3,
        )
    return {
        "train": loader.dataset,
        "batch_size": batches.batch_size,
        "shuffle": in_random,
        "drop_last": batches.drop_last,
        "collate_fn": None if loader.collate_fn is default_collate else loader.collate_fn,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "worker_init_fn": loader.worker_init_fn,
        "loader_options": options_of(loader),
    }
