"""How the clients' data differ: a picture of the split, and a small table of numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.dataset import FederatedDataset, _PartitionedDataset, labels_of
from lightning_fed.data.draws import Floats
from lightning_fed.data.partition import check_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["SkewTable", "skew_table", "split_figure"]

Split: TypeAlias = Mapping[ClientId, Tensor] | Sequence[Tensor] | FederatedDataset | FederatedDataModule
"""Each client's labels [n_i], integers, by id or in order; or clients whose data sets tell their labels."""

_MAX_CLASS_NAMES = 20


@dataclass(frozen=True)
class SkewTable:
    """How much the clients of a split differ. Distance and entropy are means over clients, weighted by examples.

    Args:
        clients: The number of clients N.
        empty_clients: Clients without examples.
        examples: The examples of all clients.
        classes: The classes of all clients.
        min_size: The examples of the smallest client.
        median_size: The examples of the median client.
        max_size: The examples of the largest client.
        size_gini: The Gini coefficient of the sizes: 0 if all are equal, (N - 1) / N if one client has everything.
        label_distance: The total variation distance, in [0, 1], of a client's label distribution to that of all.
        label_entropy: The entropy of a client's label distribution, in bits.
        global_entropy: The entropy of the label distribution of all examples, in bits.
    """

    clients: int
    empty_clients: int
    examples: int
    classes: int
    min_size: int
    median_size: float
    max_size: int
    size_gini: float
    label_distance: float
    label_entropy: float
    global_entropy: float

    def __str__(self) -> str:
        """Show the numbers with their names."""
        rows = {
            "clients": f"{self.clients:,} ({self.empty_clients:,} empty)",
            "examples": f"{self.examples:,} of {self.classes:,} classes",
            "examples per client": f"min {self.min_size:,}, median {self.median_size:,g}, max {self.max_size:,}",
            "Gini of the sizes": f"{self.size_gini:.3f} (0: equal sizes)",
            "label distance": f"{self.label_distance:.3f} (total variation; 0: every client's labels are like all)",
            "label entropy": f"{self.label_entropy:.3f} bits per client, {self.global_entropy:.3f} of all",
        }
        return "\n".join(f"{name:<21}{value}" for name, value in rows.items())


def skew_table(split: Split) -> SkewTable:
    """Measure how much the clients' labels and sizes differ.

    Args:
        split: Each client's labels [n_i], as a mapping id -> labels or a sequence; or a ``FederatedDataset`` or
            ``FederatedDataModule``, of which every client is visited.

    Raises:
        FederatedError: If there are no clients or no examples, or a client's labels cannot be found.

    Example:
        >>> table = skew_table([torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 0, 0])])
        >>> table.label_distance, table.size_gini
        (0.25, 0.0)
    """
    _, _, counts = _count(split)
    sizes = counts.sum(axis=1)
    total = sizes.sum()
    pooled = counts.sum(axis=0) / total
    mixtures = counts / np.maximum(sizes, 1)[:, None]
    weights = sizes / total
    ranks = np.arange(1, len(sizes) + 1)
    return SkewTable(
        clients=len(sizes),
        empty_clients=int((sizes == 0).sum()),
        examples=int(total),
        classes=len(pooled),
        min_size=int(sizes.min()),
        median_size=float(np.median(sizes)),
        max_size=int(sizes.max()),
        size_gini=float((2 * ranks - len(sizes) - 1) @ np.sort(sizes) / (len(sizes) * total)),
        label_distance=float(weights @ np.abs(mixtures - pooled).sum(axis=1) / 2),
        label_entropy=float(weights @ _entropy(mixtures)),
        global_entropy=float(_entropy(pooled)),
    )


def split_figure(split: Split, max_clients: int = 50) -> "Figure":
    """Draw who has what: a bubble per client and class whose area is the number of examples, and the sizes.

    The histogram of the sizes is of all clients. The figure is not registered with ``pyplot``: save it with
    ``figure.savefig("split.png")``, or end a notebook cell with it.

    Args:
        split: As for :func:`skew_table`.
        max_clients: The bubbles of at most so many clients are shown, evenly spaced among all.

    Raises:
        FederatedError: If matplotlib is missing, there are no clients or no examples, or a client's labels cannot be
            found.
    """
    check_count("split_figure", "max_clients", max_clients, least=1)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FederatedError("split_figure draws with matplotlib, which is missing: pip install matplotlib.") from error
    ids, classes, counts = _count(split)
    chosen = np.unique(np.linspace(0, len(ids) - 1, min(max_clients, len(ids))).round().astype(int))
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    bubbles, histogram = figure.subplots(1, 2, width_ratios=[3, 1])
    _draw_bubbles(bubbles, [ids[position] for position in chosen], classes, counts[chosen])
    shown = f"{len(chosen):,} of {len(ids):,} clients" if len(chosen) < len(ids) else f"{len(ids):,} clients"
    bubbles.set_title(f"examples by class, {shown}")
    histogram.hist(counts.sum(axis=1), bins=min(30, max(10, len(ids) // 5)), color="C0")
    histogram.set(title="sizes", xlabel="examples", ylabel="clients")
    histogram.locator_params(integer=True)
    return figure


def _draw_bubbles(axes: "Axes", ids: list[ClientId], classes: list[int], counts: Floats) -> None:
    """Draw a bubble for every client and class; the largest one fills its cell."""
    cell = 72 * min(5.5 / len(ids), 2.4 / len(classes))  # in points, for the figure's size
    clients, codes = np.nonzero(counts)
    areas = counts[clients, codes] / counts.max() * (1.3 * max(cell, 2.5)) ** 2
    axes.scatter(clients, codes, s=areas, c=[f"C{code % 10}" for code in codes], linewidths=0, alpha=0.85)
    axes.set(xlabel="client", ylabel="class", xlim=(-0.8, len(ids) - 0.2), ylim=(-0.8, len(classes) - 0.2))
    for axis, names, most in ((axes.xaxis, ids, 8), (axes.yaxis, classes, _MAX_CLASS_NAMES)):
        ticks = range(0, len(names), -(-len(names) // most))
        axis.set_ticks(ticks, [str(names[tick])[:12] for tick in ticks])


def _count(split: Split) -> tuple[Sequence[ClientId], list[int], Floats]:
    """Return the ids of the clients, the classes, and how many examples of each class each client has [N, C]."""
    ids, labels, sizes = _labels(split)
    if len(ids) == 0 or len(labels) == 0:
        raise FederatedError(
            f"The split has {len(ids):,} clients and {len(labels):,} examples: there is nothing to see."
        )
    classes, codes = torch.unique(labels, return_inverse=True)
    owners = torch.repeat_interleave(torch.tensor(sizes))
    counts = torch.bincount(owners * len(classes) + codes, minlength=len(ids) * len(classes))
    return ids, classes.tolist(), counts.view(len(ids), len(classes)).double().numpy()


def _labels(split: Split) -> tuple[Sequence[ClientId], Tensor, list[int]]:
    """Return the ids of the clients, their labels one client after another, and their sizes."""
    source = split
    if isinstance(source, FederatedDataModule) and not source._overrides("client_dataset", "client_dataloader"):
        source = source.clients or source
    if isinstance(source, _PartitionedDataset):
        known = labels_of(source._source) if source._labels is None else source._labels
        return source.ids, known[source._order], source.known_sizes
    if isinstance(source, FederatedDataModule):
        ids, parts = source.client_ids, _labels_of_all([source.client_dataset(i) for i in source.client_ids])
    elif isinstance(source, FederatedDataset):
        ids, parts = source.ids, _labels_of_all([source.dataset(i) for i in source.ids])
    elif isinstance(source, Mapping):
        ids, parts = list(source), list(source.values())
    elif isinstance(source, Sequence) and not isinstance(source, str):
        ids, parts = range(len(source)), list(source)
    else:
        raise FederatedError(
            f"split={type(source).__name__}: give each client's labels, as a mapping id -> labels or a sequence, or a"
            " FederatedDataset or FederatedDataModule."
        )
    tensors = [_as_integers(part, client_id) for client_id, part in zip(ids, parts, strict=True)]
    labels = torch.cat(tensors) if tensors else torch.empty(0, dtype=torch.int64)
    return ids, labels, [len(part) for part in tensors]


def _labels_of_all(datasets: Sequence[Dataset[Any]]) -> list[Tensor]:
    """Return the labels of each data set; those of a data set with many subsets are read once."""
    whole: dict[int, Tensor] = {}
    found = []
    for dataset in datasets:
        if not isinstance(dataset, Subset):
            found.append(labels_of(dataset))
            continue
        source = dataset.dataset
        if id(source) not in whole:
            whole[id(source)] = labels_of(source)
        found.append(whole[id(source)][torch.as_tensor(dataset.indices, dtype=torch.int64)])
    return found


def _as_integers(values: Any, client_id: ClientId) -> Tensor:
    if isinstance(values, Dataset):
        raise FederatedError(
            f"Client {client_id!r} has a {type(values).__name__}: give its labels, or all data sets as a"
            " FederatedDataset."
        )
    labels: Tensor = torch.as_tensor(values)
    if labels.ndim != 1 or (len(labels) and (labels.is_floating_point() or labels.is_complex())):
        raise FederatedError(
            f"Client {client_id!r} has labels of {labels.dtype} and shape {list(labels.shape)}: give integers [n_i]."
        )
    return labels.detach().cpu().long()


def _entropy(distribution: Floats) -> Floats:
    """Return the entropy over the last axis, in bits."""
    positive = np.where(distribution > 0, distribution, 1.0)
    entropy: Floats = np.asarray(-(positive * np.log2(positive)).sum(axis=-1))
    return np.maximum(entropy, 0.0)  # no negative zero
