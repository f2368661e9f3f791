"""Label and size skew of a split: a plot and a table of statistics."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_fed.core.arguments import check_count, kind_of
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.data.batches.examples import class_counts, label_distance, targets_of
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.dataset import FederatedDataset
from lightning_fed.data.partitions import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Split: TypeAlias = Mapping[ClientId, Tensor] | Sequence[Tensor] | FederatedDataset | FederatedDataModule
"""Each client's labels [n_i], integers, by id or in order; or clients whose data sets have labels."""

_MAX_CLASS_NAMES = 20


@dataclass(frozen=True)
class SkewTable:
    """Statistics of a split's skew; distance and entropy are means weighted by examples.

    Args:
        clients: The number of clients N.
        empty_clients: The number of clients without examples.
        examples: The number of examples of all clients.
        classes: The number of classes of all clients; 0 if targets are real numbers.
        min_size: The smallest client's number of examples.
        median_size: The median number of examples.
        max_size: The largest client's number of examples.
        size_gini: The Gini coefficient of the sizes: 0 if all are equal, (N - 1) / N if one client has everything.
        label_distance: The total variation distance, in [0, 1], between the label distributions of a client and of all.
        label_entropy: The entropy of a client's label distribution, in bits.
        global_entropy: The entropy of the label distribution of all examples, in bits.
        target_share: For real-valued targets, the share of the variance between clients: 0 if all clients have the same
            mean, 1 if each has a single value. It is nan for classes; the three values above are nan otherwise.
    """

    clients: int
    empty_clients: int
    examples: int
    classes: int
    min_size: int
    median_size: float
    max_size: int
    size_gini: float
    label_distance: float = math.nan
    label_entropy: float = math.nan
    global_entropy: float = math.nan
    target_share: float = math.nan

    def __str__(self) -> str:
        """Return the statistics with their names."""
        rows = {
            "clients": f"{self.clients:,} ({self.empty_clients:,} empty)",
            "examples": f"{self.examples:,} of {self.classes:,} classes" if self.classes else f"{self.examples:,}",
            "examples per client": f"min {self.min_size:,}, median {self.median_size:,g}, max {self.max_size:,}",
            "Gini of the sizes": f"{self.size_gini:.3f} (0: equal sizes)",
        }
        if self.classes:
            rows["label distance"] = (
                f"{self.label_distance:.3f} (total variation; 0: every client's labels are like all)"
            )
            rows["label entropy"] = f"{self.label_entropy:.3f} bits per client, {self.global_entropy:.3f} of all"
        else:
            rows["targets"] = f"{self.target_share:.3f} of their variance lies between clients"
        return "\n".join(f"{name:<21}{value}" for name, value in rows.items())


def skew_table(split: Split) -> SkewTable:
    """Measure how much the clients' labels and sizes differ.

    Args:
        split: Each client's labels [n_i], as a mapping id -> labels or a sequence; or a ``FederatedDataset`` or
            ``FederatedDataModule``, which builds every client. Targets may also be real numbers.

    Raises:
        FederatedError: If there are no clients or no examples, or a client's labels cannot be found.

    Example:
        >>> table = skew_table([torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 0, 0])])
        >>> table.label_distance, table.size_gini
        (0.25, 0.0)
    """
    _, parts = _read(split)
    sizes = np.array([len(part) for part in parts], dtype=np.float64)
    ranks = np.arange(1, len(sizes) + 1)
    skew = _label_skew(parts) if _are_classes(parts) else {"classes": 0, "target_share": _share_between(parts)}
    return SkewTable(
        clients=len(sizes),
        empty_clients=int((sizes == 0).sum()),
        examples=int(sizes.sum()),
        min_size=int(sizes.min()),
        median_size=float(np.median(sizes)),
        max_size=int(sizes.max()),
        size_gini=float((2 * ranks - len(sizes) - 1) @ np.sort(sizes) / (len(sizes) * sizes.sum())),
        **skew,
    )


def split_figure(split: Split, max_clients: int = 50) -> "Figure":
    """Plot each client's examples by class, and the sizes.

    The area of a bubble is the number of examples of a client and class. For real-valued targets, each client has a
    line over its range, thick between the quartiles, with a dot at the median. The histogram shows the sizes of all
    clients. The figure is not registered with ``pyplot``: save it with ``figure.savefig("split.png")``, or end a
    notebook cell with it.

    Args:
        split: The split, as for :func:`skew_table`.
        max_clients: The maximum number of clients shown on the left, evenly spaced among all.

    Raises:
        FederatedError: If matplotlib is missing, there are no clients or no examples, or a client's labels cannot be
            found.
    """
    check_count("split_figure", "max_clients", max_clients, least=1)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FederatedError("split_figure draws with matplotlib, which is missing: pip install matplotlib.") from error
    ids, parts = _read(split)
    chosen = np.unique(np.linspace(0, len(ids) - 1, min(max_clients, len(ids))).round().astype(int)).tolist()
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, histogram = figure.subplots(1, 2, width_ratios=[3, 1])
    if _are_classes(parts):
        classes, counts = class_counts(parts)
        _draw_bubbles(left, classes, counts[chosen].numpy())
    else:
        _draw_ranges(left, [parts[position] for position in chosen])
    _name_ticks(left.xaxis, [ids[position] for position in chosen], most=8)
    shown = f"{len(chosen):,} of {len(ids):,} clients" if len(chosen) < len(ids) else f"{len(ids):,} clients"
    left.set(
        title=f"examples by {'class' if _are_classes(parts) else 'target'}, {shown}",
        xlabel="client",
        xlim=(-0.8, len(chosen) - 0.2),
    )
    histogram.hist([len(part) for part in parts], bins=min(30, max(10, len(ids) // 5)), color="C0")
    histogram.set(title="sizes", xlabel="examples", ylabel="clients")
    histogram.locator_params(integer=True)
    return figure


def _draw_bubbles(axes: "Axes", classes: list[int], counts: Floats) -> None:
    """Draw a bubble per client and class; the largest one fills its cell."""
    cell = 72 * min(5.5 / len(counts), 2.4 / len(classes))  # in points, given the figure's size
    clients, codes = np.nonzero(counts)
    areas = counts[clients, codes] / counts.max() * (1.3 * max(cell, 2.5)) ** 2
    axes.scatter(clients, codes, s=areas, c=[f"C{code % 10}" for code in codes], linewidths=0, alpha=0.85)
    axes.set(ylabel="class", ylim=(-0.8, len(classes) - 0.2))
    _name_ticks(axes.yaxis, classes, most=_MAX_CLASS_NAMES)


def _draw_ranges(axes: "Axes", parts: list[Tensor]) -> None:
    """Draw the range and quartiles of each client's numbers."""
    positions = [position for position, part in enumerate(parts) if len(part)]
    least, lower, median, upper, greatest = np.transpose(
        [np.quantile(parts[position].numpy(), [0, 0.25, 0.5, 0.75, 1]) for position in positions]
    )
    axes.vlines(positions, least, greatest, color="C0", linewidth=1)
    axes.vlines(positions, lower, upper, color="C0", linewidth=5)
    axes.plot(positions, median, "o", color="black", markersize=2.5)
    axes.set(ylabel="target")


def _name_ticks(axis: "Axis", names: Sequence[Any], most: int) -> None:
    ticks = range(0, len(names), -(-len(names) // most))
    axis.set_ticks(ticks, [str(names[tick])[:12] for tick in ticks])


def _read(split: Split) -> tuple[Sequence[ClientId], list[Tensor]]:
    """Return the client ids, and each client's targets: int64 classes or real numbers."""
    source = split
    if isinstance(source, FederatedDataModule) and not source._overrides("client_dataset", "client_dataloader"):
        source = source.clients or source
    if isinstance(source, FederatedDataModule):
        ids, parts = source.client_ids, targets_of([source.client_dataset(i) for i in source.client_ids])
    elif isinstance(source, FederatedDataset):
        ids, parts = source.ids, source.targets()
    elif isinstance(source, Mapping):
        ids, parts = list(source), [_as_integers(part, client_id) for client_id, part in source.items()]
    elif isinstance(source, Sequence) and not isinstance(source, str | bytes):
        ids, parts = range(len(source)), [_as_integers(part, client_id) for client_id, part in enumerate(source)]
    else:
        raise FederatedError(
            f"split={type(source).__name__}: give each client's labels, as a mapping id -> labels or a sequence, or a"
            " FederatedDataset or FederatedDataModule."
        )
    if not sum(map(len, parts)):
        raise FederatedError(f"The split has {len(ids):,} clients and 0 examples: there is nothing to see.")
    if len({part.is_floating_point() for part in parts if len(part)}) > 1:
        raise FederatedError("Some clients have classes to predict, and others real numbers: make them alike.")
    return ids, parts


def _are_classes(parts: list[Tensor]) -> bool:
    return not any(part.is_floating_point() for part in parts if len(part))


def _as_integers(values: Any, client_id: ClientId) -> Tensor:
    if isinstance(values, Dataset):
        raise FederatedError(
            f"Client {client_id!r} has {kind_of(values)}: give its labels, or all data sets as a FederatedDataset."
        )
    try:
        labels = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FederatedError(
            f"Client {client_id!r} has no labels in split, but {values!r}: give integers [n_i]."
        ) from error
    if labels.ndim != 1 or (len(labels) and (labels.is_floating_point() or labels.is_complex())):
        raise FederatedError(
            f"Client {client_id!r} has labels of {labels.dtype} and shape {list(labels.shape)} in split: give integers"
            " [n_i]."
        )
    return labels.detach().cpu().long()


def _label_skew(parts: list[Tensor]) -> dict[str, Any]:
    """Return the table's statistics for class labels."""
    classes, counts = class_counts(parts)
    sizes = counts.sum(1)
    pooled = counts.sum(0) / counts.sum()
    mixtures = counts / sizes.clamp(min=1)[:, None]
    entropies = torch.special.entr(torch.cat([mixtures, pooled[None]])).sum(1) / math.log(2)
    weights = sizes / sizes.sum()
    return {
        "classes": len(classes),
        "label_distance": label_distance(counts),
        "label_entropy": float(weights @ entropies[:-1]),
        "global_entropy": float(entropies[-1]),
    }


def _share_between(parts: list[Tensor]) -> float:
    """Return the share of the variance between the clients' means; 0 if all numbers are equal."""
    values = [part.double() for part in parts if len(part)]
    whole = torch.cat(values)
    means = torch.cat([part.mean().expand(len(part)) for part in values])
    variance = whole.var(correction=0)
    return float(means.var(correction=0) / variance) if variance else 0.0
