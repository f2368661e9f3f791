"""What a ready loader of a whole data set says of how clients should batch their parts of it."""

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import default_collate

from lightning_fed.core.errors import FederatedError

__all__ = ["settings_of"]


def settings_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments of a :class:`lightning_fed.FederatedDataModule` that a loader stands for.

    Args:
        loader: A ``DataLoader`` that visits a map-style data set once, in stored or in random order.

    Raises:
        FederatedError: If it is another loader, or one that chooses or repeats examples, as clients could not.
    """
    if not isinstance(loader, DataLoader):
        raise FederatedError(f"from_loader(loader=...) must be a DataLoader, found a {type(loader).__name__}.")
    sampler = loader.sampler
    in_order, in_random = type(sampler) is SequentialSampler, type(sampler) is RandomSampler
    examples: Any = loader.dataset
    repeats = isinstance(sampler, RandomSampler) and (sampler.replacement or sampler.num_samples != len(examples))
    if type(loader.batch_sampler) is not BatchSampler or not (in_order or in_random) or repeats:
        chosen = loader.batch_sampler if type(loader.batch_sampler) is not BatchSampler else sampler
        raise FederatedError(
            f"from_loader: the loader's order comes from {type(chosen).__name__}, which clients cannot apply to their"
            " parts. Pass a loader that visits every example once, with shuffle=True or False; or override"
            " FederatedDataModule.client_dataloader(client_id, generator)."
        )
    return {
        "train": loader.dataset,
        "batch_size": loader.batch_size,
        "shuffle": in_random,
        "drop_last": loader.drop_last,
        "collate_fn": None if loader.collate_fn is default_collate else loader.collate_fn,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
    }
