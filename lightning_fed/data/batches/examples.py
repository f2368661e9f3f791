"""Properties of a map-style data set: its length, labels and other attributes of examples."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from lightning_fed.core.arguments import kind_of
from lightning_fed.core.errors import FederatedError

_LABEL_NAMES = ("targets", "labels", "target", "label")
_REMEDY = (
    "Pass the class of each example, a tensor [n] or a function of an example, as"
    " FederatedDataModule(clients=FederatedDataset.from_partition(dataset, partition, labels=...)), or use a partition"
    " that needs no labels, such as Iid."
)


def labels_of(dataset: Dataset[Any]) -> Tensor:
    """Return each example's class, int64 [n]; see :meth:`FederatedDataset.from_partition` for the lookup order."""
    for name, values in _own_labels(dataset).items():
        return as_labels(values, size_of(dataset), f"{type(dataset).__name__}.{name}")
    if isinstance(dataset, Subset):
        return labels_of(dataset.dataset)[rows_in(dataset.dataset, dataset.indices)]
    if isinstance(dataset, TensorDataset):
        for tensor in reversed(dataset.tensors):
            if tensor.ndim == 1 and not tensor.is_floating_point() and not tensor.is_complex():
                return tensor.detach().cpu().long()
    source = f"the last element of each example of {type(dataset).__name__}"
    label: list[Any] = []
    for index in range(size_of(dataset)):
        label.append(_label_in(cast("Any", dataset)[index], type(dataset).__name__))
        if index == 0:
            _check_class(label[0], source)
    return as_labels(label, size_of(dataset), source)


def targets_of(datasets: Sequence[Dataset[Any]]) -> list[Tensor]:
    """Return the targets [n_i] of each data set: int64 classes, or real numbers.

    Targets are real numbers if the last tensor of a ``TensorDataset`` holds one per example. A data set shared by
    several subsets is read once.
    """
    whole: dict[int, Tensor] = {}
    found = []
    for dataset in datasets:
        source, indices = dataset, None
        while isinstance(source, Subset) and not _own_labels(source):
            indices = inner_indices(source, indices)
            source = source.dataset
        if id(source) not in whole:
            whole[id(source)] = _targets(source)
        targets = whole[id(source)]
        found.append(targets if indices is None else targets[rows_in(source, indices)])
    return found


def has_labels_at_hand(dataset: Any) -> bool:
    """Return whether the labels are in tensors or an attribute, so that no example or property is read."""
    while isinstance(dataset, Subset) and not _attributes(dataset):
        dataset = dataset.dataset
    return type(dataset) is TensorDataset or bool(_attributes(dataset))


def _attributes(dataset: Any) -> set[str]:
    return {"targets", "labels"} & vars(dataset).keys() if hasattr(dataset, "__dict__") else set()


def class_counts(parts: Sequence[Tensor]) -> tuple[list[int], Tensor]:
    """Return the classes in the clients' labels [n_i], and each client's class counts [N, C], float64."""
    classes, codes = torch.unique(torch.cat(list(parts)), return_inverse=True)
    owners = torch.repeat_interleave(torch.tensor([len(part) for part in parts]))
    counts = torch.bincount(owners * len(classes) + codes, minlength=len(parts) * len(classes))
    return classes.tolist(), counts.view(len(parts), len(classes)).double()


def label_distance(counts: Tensor) -> float:
    """Return the mean total variation distance, weighted by examples, of clients' label distributions to the overall.

    ``counts`` are :func:`class_counts` [N, C].
    """
    sizes = counts.sum(1)
    mixtures = counts / sizes.clamp(min=1)[:, None]
    return float(sizes / sizes.sum() @ (mixtures - counts.sum(0) / counts.sum()).abs().sum(1) / 2)


def inner_indices(subset: Subset[Any], indices: Any) -> Any:
    """Map indices into a subset (None for all) to indices into the data set that it selects from."""
    chosen = subset.indices
    if indices is None:
        return chosen
    try:
        return [chosen[index] for index in indices]
    except IndexError:
        rows_in(subset, indices)
        raise


def rows_in(dataset: Dataset[Any], indices: Any) -> Tensor:
    """Return a subset's non-negative indices into a data set [n], int64, on the CPU."""
    size = size_of(dataset)
    rows = torch.as_tensor(indices, dtype=torch.int64).cpu()
    low, high = (int(rows.min()), int(rows.max())) if len(rows) else (0, 0)
    if len(rows) and not -size <= low <= high < size:
        raise FederatedError(
            f"A client's Subset selects examples {low} to {high}, but its {type(dataset).__name__} has only {size:,}:"
            " correct the indices."
        )
    return torch.where(rows < 0, rows + size, rows) if low < 0 else rows


def size_of(dataset: Any) -> int:
    """Return the number of examples of a map-style data set."""
    return len(dataset)


def is_map_style(dataset: Any) -> bool:
    """Return whether a data set has a length and can be indexed; strings, mappings and classes do not count."""
    sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return sized and not isinstance(dataset, IterableDataset | str | bytes | Mapping | type)


def check_map_style(dataset: Any, owner: str) -> None:
    """Raise if a data set cannot be counted and indexed."""
    if isinstance(dataset, DataLoader):
        raise FederatedError(
            f"{owner} has a DataLoader, but the data module makes the batches itself, in an order of each round: give"
            f" loader.dataset, with batch_size={dataset.batch_size or 32} and the loader's other settings in"
            " FederatedDataModule(...)."
        )
    if not is_map_style(dataset):
        raise FederatedError(
            f"{owner} has {kind_of(dataset)}, whose examples cannot be counted and shuffled: give a map-style"
            " Dataset with __len__ and __getitem__."
        )
    if isinstance(dataset, tuple | list) and _are_columns(dataset):
        raise FederatedError(
            f"{owner} has {kind_of(dataset)} of {len(dataset)} arrays, which would be {len(dataset)} examples:"
            " give torch.utils.data.TensorDataset(inputs, labels), whose examples are pairs."
        )
    if isinstance(dataset, Subset):
        check_positions(dataset, owner)


def check_positions(dataset: Any, owner: str) -> None:
    """Raise if a subset's indices are not positions, such as a mask, which would select the examples 0 and 1."""
    while isinstance(dataset, Subset):
        if not _are_positions(dataset.indices):
            raise FederatedError(
                f"{owner} has a Subset whose indices are {_shown(dataset.indices)}, and not the positions of its"
                " examples. Give integers [n]; those of a mask are mask.nonzero().flatten().tolist()."
            )
        dataset = dataset.dataset


def _are_positions(indices: Any) -> bool:
    """Return whether indices are integers [n], judging by their shape and their first element."""
    if not hasattr(indices, "__len__"):
        return False
    shape = getattr(indices, "shape", (len(indices),))
    if len(shape) != 1 or len(indices) == 0:
        return len(shape) == 1
    first = next(iter(indices))
    if isinstance(first, Tensor):
        return not (first.ndim or first.is_floating_point() or first.is_complex() or first.dtype == torch.bool)
    return hasattr(first, "__index__") and not isinstance(first, bool | np.bool_)


def _shown(indices: Any) -> str:
    if hasattr(indices, "dtype"):
        return f"{kind_of(indices)} of {indices.dtype}, shape {list(indices.shape)}"
    return kind_of(indices) + (f" that begins with {indices[0]!r}" if isinstance(indices, list | tuple) else "")


def column_of(dataset: Any, name: str, owner: str) -> list[Any]:
    """Return a data set's attribute with one value per example; for a subset, select from its data set's attribute."""
    values = getattr(dataset, name, None)
    if values is None and isinstance(dataset, Subset):
        inner = column_of(dataset.dataset, name, owner)
        return [inner[index] for index in dataset.indices]
    if values is None or not _has_length(values, size_of(dataset)):
        raise FederatedError(
            f"{owner}: {type(dataset).__name__} has no attribute {name!r} with one key for each of its"
            f" {size_of(dataset):,} examples. Pass the keys themselves: ByKey(keys)."
        )
    return list(values.tolist() if hasattr(values, "tolist") else values)


def _are_columns(arrays: Sequence[Any]) -> bool:
    """Return whether a tuple or list holds inputs and labels as columns.

    A list of arrays may also be a data set of inputs only. In columns, the last array has a value per row of the first.
    """
    if isinstance(arrays, tuple):
        return any(hasattr(part, "shape") for part in arrays)
    if len(arrays) < 2 or not all(getattr(part, "shape", ()) for part in (arrays[0], arrays[-1])):
        return False
    first, last = tuple(arrays[0].shape), tuple(arrays[-1].shape)
    return first != last and len(arrays) < first[0] == last[0] and (len(last) < len(first) or last[1:] == (1,))


def _targets(dataset: Dataset[Any]) -> Tensor:
    if isinstance(dataset, TensorDataset) and not hasattr(dataset, "targets"):
        *inputs, last = dataset.tensors
        classes = any(tensor.ndim == 1 and not tensor.is_floating_point() for tensor in inputs)
        if inputs and not classes and last.is_floating_point() and last.numel() == len(last):
            return last.detach().cpu().flatten()
    return labels_of(dataset)


def _own_labels(dataset: Dataset[Any]) -> dict[str, Any]:
    """Return the data set's first attribute with one label per example, by name; empty if it has none."""
    for name in ("targets", "labels"):  # read it once: it may be a property
        values = getattr(dataset, name, None)
        if values is not None and not callable(values) and _has_length(values, size_of(dataset)):
            return {name: values}
    return {}


def _has_length(values: Any, length: int) -> bool:
    return hasattr(values, "__len__") and len(values) == length


def _label_in(example: Any, owner: str) -> Any:
    if isinstance(example, Mapping):
        for name in _LABEL_NAMES:
            if name in example:
                return example[name]
    elif isinstance(example, (tuple, list)) and len(example) > 1:
        return example[-1]
    raise FederatedError(
        f"Cannot find labels in {owner}: an example is {kind_of(example)} without one. Give the data set an attribute"
        f" `targets` [n]. Or: {_REMEDY}"
    )


def as_labels(values: Any, length: int, source: str) -> Tensor:
    """Return labels, [n] or [n, 1], as int64 [n]; class names become numbers in sorted order."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "USO" and values.ndim == 1:
        values = values.tolist()
    if isinstance(values, (list, tuple)) and len(values):
        _check_class(values[0], source)
    if isinstance(values, (list, tuple)) and len(values) and isinstance(values[0], str):
        numbers = {name: number for number, name in enumerate(sorted(set(values)))}
        values = [numbers[name] for name in values]
    try:
        labels = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FederatedError(f"{source} cannot be read as labels [n]: {error}. {_REMEDY}") from error
    if labels.shape == (length, 1):
        labels = labels.flatten()
    if labels.shape != (length,) or labels.is_floating_point() or labels.is_complex():
        raise FederatedError(
            f"{source} must hold one integer class per example [{length}]; found {labels.dtype} of shape"
            f" {list(labels.shape)}. {_REMEDY}"
        )
    return labels.detach().cpu().long()


def _check_class(label: Any, source: str) -> None:
    """Raise if a label is not a single class, such as several labels, a mask or a mapping."""
    shape = tuple(getattr(label, "shape", ()))
    if math.prod(shape) != 1:
        raise FederatedError(f"{source} is {kind_of(label)} of shape {list(shape)}, and not one class. {_REMEDY}")
    if label is None or isinstance(label, (Mapping, list, tuple, set)):
        raise FederatedError(f"{source} is {kind_of(label)}, and not one class. {_REMEDY}")
