"""Loaders for evaluating the server model; tensor data are read in whole batches."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from lightning_fed.core.arguments import kind_of
from lightning_fed.core.devices import can_pin
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.data.batches.batches import TensorBatches, batching_problem
from lightning_fed.data.batches.examples import check_map_style, check_positions, is_map_style
from lightning_fed.data.batches.random_states import RandomStates, WorkerSeeds
from lightning_fed.data.batches.settings import BatchSettings, BatchTransform, Chain, options_of

_KINDS = (Dataset, DataLoader)


class _SeededLoader(DataLoader[Any]):
    """A loader without workers that seeds its data's random states from PyTorch's global generator."""

    def _get_iterator(self) -> Any:
        if self.num_workers == 0 and (states := RandomStates(self.dataset, self.collate_fn)):
            states.seed(int(torch.randint(2**63 - 1, ())))
        return super()._get_iterator()


class EvaluationLoader(_SeededLoader):
    """A loader that yields every example once, in stored order; a process may load only some of its batches."""

    def part(self, first: int, step: int, stop: int) -> DataLoader[Any]:
        """Return a loader of this loader's batches ``first``, ``first + step``, ... before ``stop``.

        Example:
            >>> loader = EvaluationLoader(range(10), batch_size=3)
            >>> [batch.tolist() for batch in loader.part(1, 2, stop=4)]
            [[3, 4, 5], [9]]
        """
        size, count = self.batch_size or 1, len(self.dataset)  # type: ignore[arg-type]
        return _SeededLoader(
            self.dataset,
            batch_sampler=[list(range(k * size, min((k + 1) * size, count))) for k in range(first, stop, step)],
            collate_fn=self.collate_fn,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            worker_init_fn=self.worker_init_fn,
            **options_of(self),
        )


def check_evaluation(owner: str, name: str, data: Any) -> None:
    """Raise unless an argument is None, a data set, a loader, or a list of these."""
    several = are_several(data)
    for part in data if several else (data,):
        if isinstance(part, _KINDS) or (part is None and not several):
            check_positions(part, f"{owner}({name}=...)")
            continue
        if not is_map_style(part):
            raise FederatedError(
                f"{owner}({name}=...) has {kind_of(part)}: give a data set with __len__ and __getitem__, a"
                " DataLoader, or a list of these."
            )
        check_map_style(part, f"{owner}({name}=...)")


def are_several(data: Any) -> bool:
    """Return whether evaluation data are a list of data sets or loaders, rather than one list of examples."""
    return isinstance(data, list | tuple) and any(isinstance(part, _KINDS) for part in data)


def check_client_val(owner: str, client_val: Mapping[ClientId, Any]) -> None:
    """Raise unless clients' validation sets are None or map-style data sets."""
    for client_id, data in client_val.items():
        if are_several(data):
            raise FederatedError(
                f"{owner}(client_val[{client_id!r}]=...) has {kind_of(data)} of"
                f" {type(data[0]).__name__}: give one map-style Dataset with __len__ and __getitem__; ConcatDataset"
                " joins several."
            )
        if data is not None:
            check_map_style(data, f"{owner}(client_val[{client_id!r}]=...)")


def evaluation_loader(dataset: Dataset[Any], settings: BatchSettings) -> DataLoader[Any]:
    """Return a loader that yields every example once, in stored order, transformed but never augmented.

    A ``TensorDataset``, or a ``Subset`` of one, is indexed a batch at a time, which yields the same batches much
    faster. The loader's ``dataset.source`` is then the given data set.
    """
    check_positions(dataset, "A data set to evaluate")
    direct = TensorBatches.of(dataset, settings) if hasattr(dataset, "__len__") else None
    if direct is not None:
        # Pass keywords: Lightning records a loader's arguments and rebuilds the loader from them to predict.
        rows = _Rows(dataset, direct)
        return EvaluationLoader(rows, batch_size=settings.batch_size, collate_fn=settings.transform or Chain([]))
    collate_fn = settings.collate_fn or _Collate(dataset)
    if settings.transform is not None:
        collate_fn = Chain([collate_fn, settings.transform])
    kind = _SeededLoader if isinstance(dataset, IterableDataset) else EvaluationLoader
    return kind(
        dataset,
        batch_size=settings.batch_size,
        collate_fn=collate_fn,
        num_workers=settings.num_workers,
        pin_memory=settings.pin_memory and can_pin(),
        worker_init_fn=WorkerSeeds(collate_fn, settings.worker_init_fn) if settings.num_workers else None,
        **(settings.loader_options if settings.num_workers else {}),
    )


def transformed_loader(loader: DataLoader[Any], transform: BatchTransform) -> DataLoader[Any]:
    """Return a loader of the same batches, transformed."""
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise FederatedError(
            f"A {type(loader).__name__} iterates in its own way, so transform=... cannot be put into it: transform its"
            " batches there, or give the data set in place of the loader."
        )
    transformed = copy.copy(loader)
    transformed.collate_fn = Chain([loader.collate_fn, transform])
    transformed._iterator = None  # persistent workers would keep the old function
    return transformed


class _Rows(Dataset[Any]):
    """A data set of tensor rows, indexed a batch at a time."""

    def __init__(self, source: Dataset[Any], batches: TensorBatches) -> None:
        self.source = source
        self.batches = batches

    def __len__(self) -> int:
        return self.batches.size

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[0] for tensor in self.batches.pick(torch.tensor([index])))

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return self.batches.pick(torch.tensor(indices))


class _Collate:
    """``default_collate`` with an error that names the examples and the fix."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __call__(self, examples: list[Any]) -> Any:
        try:
            return default_collate(examples)
        except (TypeError, RuntimeError) as error:
            message = batching_problem(self.dataset, error)
            if message is None:
                raise
            raise FederatedError(message) from error
