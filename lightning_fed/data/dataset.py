"""The clients' data sets by client id: one per client, or split from one data set by a partition."""

import operator
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, Subset

from lightning_fed.core.arguments import kind_of
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.data.batches.examples import (
    as_labels,
    check_map_style,
    class_counts,
    column_of,
    has_labels_at_hand,
    label_distance,
    labels_of,
    size_of,
    targets_of,
)
from lightning_fed.data.feature_shift import FeatureShift, ShiftedClients
from lightning_fed.data.partitions import (
    ByKey,
    Partition,
    PartitionFunction,
    check_client_id,
    check_partition,
)


class FederatedDataset:
    """Map-style data sets by client id.

    Empty clients are allowed: they have size 0 and are never sampled.

    Args:
        clients: A sequence of data sets, for clients 0, ..., N - 1, or a mapping id -> data set. A list, tuple or dict
            is checked eagerly. Any other sequence or mapping is indexed only when a client is needed, so it may build
            data sets lazily.

    Raises:
        FederatedError: If a client's data set has no ``__len__`` or ``__getitem__``.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> data = FederatedDataset(
        ...     {
        ...         "ann": TensorDataset(torch.zeros(3)),
        ...         "bob": TensorDataset(torch.zeros(5)),
        ...     }
        ... )
        >>> list(data.ids), data.size("bob")
        (['ann', 'bob'], 5)
    """

    source: Dataset[Any] | None = None
    """The data set that all clients' data sets were split from, or None."""

    split: tuple[Tensor, str] | None = None
    """What tells a split of one data set from another: all clients' indices, and how inputs are shifted; or None."""

    def __init__(self, clients: Sequence[Dataset[Any]] | Mapping[ClientId, Dataset[Any]]) -> None:
        if isinstance(clients, Dataset | str | bytes) or not isinstance(clients, Sequence | Mapping):
            raise FederatedError(
                f"clients={type(clients).__name__}: give one data set per client, in a list or a mapping id -> data"
                " set. To cut one data set into clients, use train=..., partition=... instead."
            )
        self._clients = clients
        self._ready = isinstance(clients, (list, tuple, dict))
        self.ids: Sequence[ClientId] = _ids(clients)
        if self._ready:
            for client_id in self.ids:
                self.dataset(client_id)

    @staticmethod
    def from_partition(
        dataset: Dataset[Any], partition: Partition | PartitionFunction, labels: Any = None
    ) -> "FederatedDataset":
        """Split one data set into clients with a partition; this stores indices, not copies.

        A :class:`FeatureShift` copies a client's inputs when the client is needed.

        Args:
            dataset: A map-style data set of n examples.
            partition: A partition, or any callable from labels [n] to each client's indices. If the last tensor of a
                ``TensorDataset`` holds real-valued targets, a callable gets these. Examples are read for their labels
                only if a callable uses more than their number n.
            labels: The class of each example [n], or a function from an example to its class. By default, these are the
                data set's ``targets`` or ``labels``, the last integer tensor [n] of a ``TensorDataset``, the labels of
                the data set below a ``Subset``, or else the last element of every example, which takes one pass over
                the data. They are looked up only if the partition needs them.

        Raises:
            FederatedError: If the labels cannot be found, or the indices do not fit the data set.

        Example:
            >>> from torch.utils.data import TensorDataset
            >>> from lightning_fed.data import Iid
            >>> data = FederatedDataset.from_partition(
            ...     TensorDataset(torch.arange(10)), Iid(num_clients=3)
            ... )
            >>> [data.size(client_id) for client_id in data.ids]
            [4, 3, 3]
        """
        return _PartitionedDataset(dataset, partition, labels)

    def __len__(self) -> int:
        """Return the number of clients N."""
        return len(self.ids)

    @property
    def known_sizes(self) -> list[int] | None:
        """The clients' numbers of examples, in the order of ``ids``; None if clients would have to be built."""
        return [self.size(client_id) for client_id in self.ids] if self._ready else None

    def size(self, client_id: ClientId) -> int:
        """Return the number of examples of one client."""
        return size_of(self.dataset(client_id))

    @property
    def knows_labels(self) -> bool:
        """True if :meth:`targets` needs no pass over the data, because the partition has used the labels."""
        return False

    def indices(self, client_id: ClientId) -> Tensor:
        """Return a client's indices [n_i] into :attr:`source`, int64.

        Raises:
            FederatedError: If the clients' data sets are not parts of one data set.
        """
        raise FederatedError("These clients have their own data sets, not parts of one.")

    def dataset(self, client_id: ClientId) -> Dataset[Any]:
        """Return the data set of one client."""
        clients = cast("Mapping[ClientId, Dataset[Any]]", self._clients)
        try:
            dataset = clients[_position(client_id, self.ids) if isinstance(self.ids, range) else client_id]
        except KeyError as error:
            if client_id in self.ids:
                raise  # the user's mapping failed to build this client
            raise _unknown(client_id, self.ids) from error
        check_map_style(dataset, f"Client {client_id!r}")
        return dataset

    def targets(self) -> list[Tensor]:
        """Return each client's targets [n_i], in the order of ``ids``.

        Classes are int64; if a ``TensorDataset`` ends with one real number per example, these are the targets.

        Raises:
            FederatedError: If the targets of a client's data set cannot be found.
        """
        return targets_of([self.dataset(client_id) for client_id in self.ids])

    def summary(self) -> str:
        """Return a small table: clients, examples, examples per client and, if known, the label skew."""
        rows = {"clients": f"{len(self):,}", "examples": "unknown until the clients are built"}
        if (known := self.known_sizes) is not None:
            rows["examples"] = f"{sum(known):,}"
        if known:
            rows["per client"] = f"min {min(known):,}, median {median(known):,.10g}, max {max(known):,}"
            rows["empty clients"] = f"{known.count(0):,}"
        if (skew := self._label_skew()) is not None:
            rows["label skew"] = f"{skew:.2f} (0: every client has the same label distribution; towards 1: disjoint)"
        return "\n".join(f"{name:<15}{value}" for name, value in rows.items())

    def _label_skew(self) -> float | None:
        return None


_NOT_READ = (
    "has used labels before they were read from the examples, as torch.tensor(labels) does. Use labels.clone() there,"
    " or give the data set an attribute `targets` [n]."
)
_SHAPE_ONLY = {
    Tensor.__len__,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.nelement,
    Tensor.numel,
    Tensor.size,
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    torch.numel,
}


class _LazyLabels(Tensor):
    """Labels [n] of known length; any use of the values looks them up lazily.

    ``torch.tensor`` and a few other functions bypass ``__torch_function__``. The tensor itself is on the device "meta",
    which holds no values. So these functions fail, instead of reading zeros as labels.
    """

    look_up: Callable[[], Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a PyTorch function on the values, unless it only needs the shape."""
        if func in _SHAPE_ONLY:
            return super().__torch_function__(func, types, args, kwargs)
        args, kwargs = pytree.tree_map_only(_LazyLabels, lambda labels: labels.look_up(), (args, kwargs or {}))
        return func(*args, **kwargs)


class _PartitionedDataset(FederatedDataset):
    """Clients that share one data set; client i has the examples ``order[offsets[i] : offsets[i + 1]]``."""

    def __init__(self, dataset: Dataset[Any], partition: Partition | PartitionFunction, labels: Any) -> None:
        check_map_style(dataset, "train")
        check_partition(partition)
        num_examples = size_of(dataset)
        shift = partition if isinstance(partition, FeatureShift) else None
        partition = partition if shift is None else shift.partition
        if isinstance(partition, ByKey) and isinstance(partition.keys, str):
            partition = ByKey(column_of(dataset, partition.keys, repr(partition)))
        self._source, self.source = dataset, dataset if shift is None else None
        self._labels: Tensor | None = None
        needs_labels = getattr(partition, "needs_labels", True)
        if labels is not None:
            given = labels if not callable(labels) else [labels(dataset[index]) for index in range(num_examples)]
            self._labels = as_labels(given, num_examples, "labels")
        elif needs_labels and isinstance(partition, Partition):
            self._labels = labels_of(dataset)
        self._is_by_function = needs_labels and not isinstance(partition, Partition)
        dealt = self._labels
        if dealt is None or not needs_labels:
            dealt = torch.zeros(1, dtype=torch.int64).expand(num_examples)  # n labels that share the memory of one
        if self._labels is None and needs_labels:  # a callable may use classes, real numbers, or only n
            dealt = self._labels_at_hand()
            if dealt is None:
                dealt = lazy = torch.empty(num_examples, dtype=torch.int64, device="meta").as_subclass(_LazyLabels)
                lazy.look_up = cache(lambda: self._look_up().clone())
        if dealt is self._labels:
            dealt = dealt.clone()  # a partition may modify labels in place, and the user may own these
        try:
            parts = partition(dealt)
        except (TypeError, NotImplementedError) as error:
            is_unread = re.search(r"\bmeta\b", str(error)) is not None  # PyTorch's error names the device
            if isinstance(dealt, _LazyLabels) and is_unread:
                raise FederatedError(f"{partition!r} {_NOT_READ}") from error
            raise
        self.ids, self._order, self._sizes = _join(parts, num_examples, repr(partition))
        self._positions = None if isinstance(self.ids, range) else {key: i for i, key in enumerate(self.ids)}
        self._offsets = [0, *accumulate(self._sizes)]
        shifts = None if shift is None else {name: v for name, v in vars(shift).items() if name != "partition"}
        self.split = (self._order, repr(shifts))
        self._shifted = None if shift is None else ShiftedClients(dataset, shift, len(self.ids))
        self.source = dataset if shift is None else None

    @property
    def known_sizes(self) -> list[int]:
        return list(self._sizes)

    def size(self, client_id: ClientId) -> int:
        return self._sizes[self._locate(client_id)]

    @property
    def knows_labels(self) -> bool:
        return self._labels is not None

    def indices(self, client_id: ClientId) -> Tensor:
        position = self._locate(client_id)
        return self._order[self._offsets[position] : self._offsets[position + 1]]

    def targets(self) -> list[Tensor]:
        targets = targets_of([self._source])[0] if self._labels is None else self._labels
        return list(targets[self._order].split_with_sizes(self._sizes))

    def dataset(self, client_id: ClientId) -> Dataset[Any]:
        indices = self.indices(client_id)
        if self._shifted is not None:
            return self._shifted.dataset(self._locate(client_id), indices)
        return Subset(self._source, indices.tolist())

    def _labels_at_hand(self) -> Tensor | None:
        """Return the labels if they need no pass over the data, else None."""
        try:
            return self._look_up() if has_labels_at_hand(self._source) else None
        except FederatedError:  # raised again if the callable uses them
            return None

    def _look_up(self) -> Tensor:
        if self._labels is None:
            (self._labels,) = targets_of([self._source])
        return self._labels

    def _locate(self, client_id: ClientId) -> int:
        if self._positions is None:
            return _position(client_id, self.ids)
        try:
            return self._positions[client_id]
        except (KeyError, TypeError) as error:
            raise _unknown(client_id, self.ids) from error

    def _label_skew(self) -> float | None:
        """Return the distance of clients' label distributions to the overall one; None if the labels are unknown."""
        if self._is_by_function:  # a function may not have used the labels
            try:
                self._look_up()
            except FederatedError:
                return None
        labels = self._labels
        if labels is None or labels.is_floating_point() or len(self._order) == 0:
            return None
        return label_distance(class_counts(labels[self._order].split(self._sizes))[1])


def _unknown(client_id: Any, ids: Sequence[ClientId]) -> FederatedError:
    known = ", ".join(repr(known) for known in ids[:3]) + (", ..." if len(ids) > 3 else "")
    return FederatedError(f"There is no client {client_id!r} among the {len(ids):,} clients ({known}).")


def _ids(clients: Sequence[Any] | Mapping[Any, Any]) -> Sequence[ClientId]:
    return [check_client_id(key) for key in clients] if isinstance(clients, Mapping) else range(len(clients))


def _position(client_id: Any, ids: Sequence[ClientId]) -> int:
    """Return a client's position among the ids 0, ..., N - 1; ``client_id`` may be any integer type."""
    try:
        position = operator.index(client_id)
    except TypeError as error:
        raise _unknown(client_id, ids) from error
    if not 0 <= position < len(ids):
        raise _unknown(client_id, ids)
    return position


def _join(parts: Any, num_examples: int, owner: str) -> tuple[Sequence[ClientId], Tensor, list[int]]:
    """Return the clients' ids, all clients' indices in one tensor, and each client's number of examples."""
    ordered = hasattr(parts, "__getitem__") and hasattr(parts, "__len__") and getattr(parts, "ndim", 1) != 0
    if not ordered or isinstance(parts, str | bytes | type):
        raise FederatedError(
            f"{owner} returned {kind_of(parts)}: it must return each client's indices [n_i], in a list, or in a"
            " mapping id -> indices."
        )
    ids, indices = _ids(parts), []
    for client_id, given in zip(ids, parts.values() if isinstance(parts, Mapping) else parts, strict=True):
        try:
            part = torch.as_tensor(given)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise FederatedError(
                f"{owner} gave client {client_id!r} {kind_of(given)} that is not a tensor ({error}). It must give"
                " integer indices [n_i]."
            ) from error
        numbers = not (part.is_floating_point() or part.is_complex() or part.dtype == torch.bool)
        if part.ndim != 1 or (len(part) and not numbers):
            raise FederatedError(
                f"{owner} gave client {client_id!r} a {part.dtype} tensor of shape {list(part.shape)}: it must give"
                " integer indices [n_i]."
            )
        if part.is_meta:
            raise FederatedError(f"{owner} {_NOT_READ}")
        indices.append(part.cpu().long())
    order = torch.cat([torch.empty(0, dtype=torch.int64), *indices])
    if len(order) and not 0 <= int(order.min()) <= int(order.max()) < num_examples:
        raise FederatedError(
            f"{owner} gave indices from {int(order.min())} to {int(order.max())} for {num_examples:,} examples: they"
            f" must lie in 0, ..., {num_examples - 1}."
        )
    sizes = [len(part) for part in indices]
    _warn_of_shared(order, sizes, ids, num_examples, owner)
    return ids, order, sizes


def _warn_of_shared(order: Tensor, sizes: list[int], ids: Sequence[ClientId], num_examples: int, owner: str) -> None:
    """Warn if two clients share an example; one client may repeat an example."""
    clients = torch.repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
    last = torch.empty(num_examples, dtype=torch.int64)
    last[order] = clients
    shared = order[last[order] != clients]
    if len(shared):
        example = int(shared.min())
        first, second = (ids[int(position)] for position in clients[order == example].unique()[:2])
        warnings.warn(
            f"{owner} gave {len(shared.unique()):,} examples to more than one client, example {example} to {first!r}"
            f" and to {second!r}. If that is not meant, give every example to one client.",
            stacklevel=2,
        )
