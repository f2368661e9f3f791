"""What a ready loader of a whole data set says of how clients should batch their parts of it."""

import warnings
from collections.abc import Mapping
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import default_collate

from lightning_fed.core.arguments import kind_of
from lightning_fed.core.errors import FederatedError

__all__ = ["check_options", "options_of", "settings_of"]

_OPTIONS = ("timeout", "prefetch_factor", "multiprocessing_context")


def check_options(owner: str, options: Any) -> dict[str, Any]:
    """Return the argument ``loader_options`` as a dictionary.

    Raises:
        FederatedError: If it is not a mapping, or has other names than the options of loaders with workers.
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping) or (unknown := sorted(set(options) - set(_OPTIONS), key=str)):
        found = repr(options) if not isinstance(options, Mapping) else f"it has {unknown[0]!r}"
        raise FederatedError(f"{owner}: loader_options may give {', '.join(_OPTIONS)}; {found}.")
    return dict(options)


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments of a ``DataLoader`` that only concern its workers, as far as they are given."""
    options = {name: getattr(loader, name) for name in _OPTIONS}
    return {name: value for name, value in options.items() if value and loader.num_workers > 0}


def settings_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments of a :class:`lightning_fed.FederatedDataModule` that a loader stands for.

    The loader's ``generator`` and ``persistent_workers`` have no counterpart; a warning says so.

    Args:
        loader: A ``DataLoader`` that visits a map-style data set once, in stored or in random order.

    Raises:
        FederatedError: If it is another loader, or one that chooses or repeats examples, as clients could not.
    """
    if not isinstance(loader, DataLoader):
        raise FederatedError(f"from_loader(loader=...) must be a DataLoader, found a {type(loader).__name__}.")
    remedy = "override FederatedDataModule.client_dataloader(client_id, generator)"
    kind, sampler = type(loader), loader.sampler
    if kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator:
        raise FederatedError(
            f"from_loader: {kind_of(loader)} makes its batches in its own way, which clients' loaders would not do."
            f" Pass a torch.utils.data.DataLoader; or {remedy}."
        )
    if loader.batch_sampler is None:
        raise FederatedError(
            "from_loader: the loader has batch_size=None, so its data set gives whole batches, which cannot be split"
            f" among clients. Pass a loader with a batch size; or {remedy}."
        )
    in_order, in_random = type(sampler) is SequentialSampler, type(sampler) is RandomSampler
    examples: Any = loader.dataset
    repeats = isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != len(examples))
    if type(loader.batch_sampler) is not BatchSampler or not (in_order or in_random) or repeats:
        chosen = loader.batch_sampler if type(loader.batch_sampler) is not BatchSampler else sampler
        raise FederatedError(
            f"from_loader: the loader's order comes from {type(chosen).__name__}, which clients cannot apply to their"
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
        "batch_size": loader.batch_size,
        "shuffle": in_random,
        "drop_last": loader.drop_last,
        "collate_fn": None if loader.collate_fn is default_collate else loader.collate_fn,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "worker_init_fn": loader.worker_init_fn,
        "loader_options": options_of(loader),
    }
