"""Partitions split one data set into clients: labels in, each client's indices out."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Sized
from numbers import Integral
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_fed.core.arguments import check_count, check_number, check_seed, kind_of
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.core.unset import NamesUnset

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Parts: TypeAlias = Sequence[Tensor] | Mapping[ClientId, Tensor]
"""Each client's indices [n_i], int64, as a sequence for clients 0, ..., N - 1, or a mapping by id."""

_MAX_DRAWS = 1000
_MAX_PROPORTIONS = 2 * 10**7  # drawn over all attempts together: a few seconds


class Partition(NamesUnset, ABC):
    """Splits a data set into clients: a function from its labels to each client's indices.

    Subclasses define ``__call__``; any callable from labels to :data:`Parts` works too. A partition has its own seed,
    so the clients stay the same when the trainer's seed changes.

    Example:
        >>> class Halves(Partition):
        ...     needs_labels = False
        ...     def __call__(self, labels):
        ...         return torch.arange(len(labels)).chunk(2)
        >>> Halves()(torch.zeros(4))
        (tensor([0, 1]), tensor([2, 3]))
    """

    needs_labels: bool = True
    """Whether the values of the labels matter. If not, any labels [n] will do."""

    @abstractmethod
    def __call__(self, labels: Tensor) -> Parts:
        """Return each client's indices.

        Args:
            labels: The class of each example [n], integers.
        """

    def __repr__(self) -> str:
        """Return the partition as Python code."""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class SeededPartition(Partition):
    """A random partition into N clients 0, ..., N - 1; every example belongs to exactly one client.

    The random numbers come from NumPy's ``RandomState``, whose streams are frozen: a seed gives the same clients on
    every machine and with every version.
    """

    def __init__(self, num_clients: int, seed: int = 0) -> None:
        self.num_clients = check_count(self, "num_clients", num_clients, least=1)
        self.seed = check_seed(self, seed)

    @abstractmethod
    def _deal(self, labels: Tensor, random: np.random.RandomState) -> tuple[Ints, Ints]:
        """Return the examples [n] in some order, and the client of each [n]."""

    def __call__(self, labels: Tensor) -> Parts:
        """Return each client's indices, in ascending order."""
        try:
            labels = torch.as_tensor(labels)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise FederatedError(f"{self!r} needs one label per example [n]; found {type(labels).__name__}.") from error
        if labels.ndim != 1 or len(labels) == 0:
            raise FederatedError(f"{self!r} needs one label per example [n], n > 0; found shape {list(labels.shape)}.")
        if self.needs_labels and (labels.is_floating_point() or labels.is_complex()):
            raise FederatedError(f"{self!r} needs integer labels, not {labels.dtype}. Pass class numbers, or use Iid.")
        order, clients = self._deal(labels, random_state(self.seed))
        owners = torch.empty(len(labels), dtype=torch.int64)
        owners[torch.from_numpy(order)] = torch.from_numpy(clients)
        return _group(owners, self.num_clients)

    def _need_examples(self, found: int, needed: int) -> None:
        if found < needed:
            raise FederatedError(
                f"{self!r} needs at least {needed:,} examples and the data set has {found:,}. Lower num_clients."
            )


class Iid(SeededPartition):
    """Random shares of equal size; sizes differ by at most one.

    Args:
        num_clients: The number of clients N.
        seed: The seed of the partition.

    Example:
        >>> [len(part) for part in Iid(num_clients=3)(torch.zeros(10, dtype=torch.int64))]
        [4, 3, 3]
    """

    needs_labels = False

    def _deal(self, labels: Tensor, random: np.random.RandomState) -> tuple[Ints, Ints]:
        self._need_examples(len(labels), self.num_clients)
        return random.permutation(len(labels)), np.arange(len(labels)) % self.num_clients


class Dirichlet(SeededPartition):
    """Label skew: each class is split by its own draw from a symmetric Dirichlet distribution.

    For every class, proportions over the clients are drawn from Dir(alpha, ..., alpha), and split the shuffled examples
    of the class: the unbalanced recipe of Yurochkin et al., 2019 (arXiv:1905.12022) and Li et al., 2022
    (arXiv:2102.02079, distribution-based label imbalance). Their code also gives no more examples to a client that has
    n / N of them, which the papers do not mention and this class does not do. A small ``alpha`` gives clients with few
    classes and very different sizes; a large one approaches equal shares of every class. If a client has fewer than
    ``min_size`` examples, everything is redrawn, up to 1,000 times (but at least 10 times; fewer than 1,000 if the
    clients and classes are so many that it would take minutes).

    Args:
        num_clients: The number of clients N.
        alpha: The concentration, positive.
        min_size: The smallest number of examples of a client; 0 allows empty clients.
        seed: The seed of the partition.

    Example:
        >>> labels = torch.arange(1000) % 10
        >>> parts = Dirichlet(num_clients=4, alpha=0.5)(labels)
        >>> sum(len(part) for part in parts)
        1000
    """

    def __init__(self, num_clients: int, alpha: float, min_size: int = 1, seed: int = 0) -> None:
        super().__init__(num_clients, seed)
        self.alpha: float = check_number("Dirichlet", "alpha", alpha, "(0, inf)")
        self.min_size: int = check_count("Dirichlet", "min_size", min_size, least=0)

    def _deal(self, labels: Tensor, random: np.random.RandomState) -> tuple[Ints, Ints]:
        self._need_examples(len(labels), self.num_clients * self.min_size)
        order, class_sizes = by_class(labels, random)
        draws = max(10, min(_MAX_DRAWS, _MAX_PROPORTIONS // (self.num_clients * len(class_sizes))))
        for draw in range(draws):
            random = random_state(self.seed, draw)
            log_weights = (log_gamma(np.array(self.alpha), (self.num_clients,), random) for _ in class_sizes)
            shares = [cut_by(weights, size, least=0) for weights, size in zip(log_weights, class_sizes, strict=True)]
            sizes = np.sum(shares, axis=0)
            if sizes.min() >= self.min_size:
                return order, np.repeat(np.tile(np.arange(self.num_clients), len(shares)), np.concatenate(shares))
        raise FederatedError(
            f"{self!r} found no partition of {len(labels):,} examples in {draws:,} draws: the last one left"
            f" {(sizes < self.min_size).sum():,} clients with fewer than min_size={self.min_size}. Raise alpha, lower"
            " num_clients, or lower min_size (0 allows empty clients)."
        )


class Shards(SeededPartition):
    """Sort the examples by label, cut them into equal shards, and give each client equally many shards.

    The pathological split of McMahan et al., 2017 (arXiv:1602.05629), section 3: with two shards, most clients have two
    classes. Examples of one class are shuffled before the cut; shard sizes differ by at most one.

    Args:
        num_clients: The number of clients N.
        shards_per_client: The number of shards per client.
        seed: The seed of the partition.

    Example:
        >>> labels = torch.arange(100) % 10
        >>> parts = Shards(num_clients=10, shards_per_client=1)(labels)
        >>> [len(labels[part].unique()) for part in parts]
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    """

    def __init__(self, num_clients: int, shards_per_client: int = 2, seed: int = 0) -> None:
        super().__init__(num_clients, seed)
        self.shards_per_client = check_count("Shards", "shards_per_client", shards_per_client, least=1)

    def _deal(self, labels: Tensor, random: np.random.RandomState) -> tuple[Ints, Ints]:
        num_shards = self.num_clients * self.shards_per_client
        self._need_examples(len(labels), num_shards)
        order, _ = by_class(labels, random)
        shard_owners = random.permutation(num_shards) // self.shards_per_client
        return order, np.repeat(shard_owners, np.diff(np.arange(num_shards + 1) * len(labels) // num_shards))


class ByKey(Partition):
    """One client per key: the natural partition of data with an owner per example.

    The keys become the client ids, in the order of their first occurrence.

    Args:
        keys: The client id of each example [n], or the name of the data set's attribute that contains them.

    Example:
        >>> ByKey(["ann", "bob", "ann"])(torch.zeros(3))
        {'ann': tensor([0, 2]), 'bob': tensor([1])}
    """

    needs_labels = False

    def __init__(self, keys: Sequence[ClientId] | Tensor | str) -> None:
        if not isinstance(keys, Sequence | Tensor | np.ndarray) or isinstance(keys, bytes) or not len(keys):
            raise FederatedError(
                f"ByKey(keys={keys!r}): keys must be a list with each example's client id, or an attribute's name."
            )
        self.keys = keys

    def __call__(self, labels: Tensor) -> Parts:
        """Return each key's indices, in ascending order.

        Args:
            labels: Anything of length n; only the length is used.

        Raises:
            FederatedError: If there is not one key per example, or a key cannot be a client id.
        """
        if isinstance(self.keys, str):
            raise FederatedError(
                f"{self!r} names an attribute of a data set: give it to FederatedDataModule(train=..., partition=...),"
                " or pass the keys themselves."
            )
        if not isinstance(labels, Sized) or (isinstance(labels, Tensor) and labels.ndim == 0):
            raise FederatedError(f"{self!r} needs something of length n, found {type(labels).__name__}.")
        keys = self.keys.tolist() if hasattr(self.keys, "tolist") else self.keys
        if len(keys) != len(labels):
            raise FederatedError(f"{self!r} for {len(labels):,} examples: give one key per example.")
        positions: dict[ClientId, int] = {}
        try:
            owners = [positions.setdefault(key, len(positions)) for key in keys]
        except TypeError as error:
            raise FederatedError(f"{self!r}: each key must be an int or a str ({error}).") from error
        ids = [check_client_id(key) for key in positions]
        return dict(zip(ids, _group(torch.tensor(owners, dtype=torch.int64), len(ids)), strict=True))

    def __repr__(self) -> str:
        """Return the attribute's name, or the number of keys."""
        return f"ByKey({self.keys!r})" if isinstance(self.keys, str) else f"ByKey(<{len(self.keys):,} keys>)"


PartitionFunction: TypeAlias = Callable[[Tensor], Parts]
"""Any callable from labels [n] to each client's indices, instead of a :class:`Partition`."""


def check_partition(partition: Any) -> None:
    """Raise if the argument is not a partition."""
    if isinstance(partition, type):
        raise FederatedError(
            f"partition={partition.__name__} is a class: instantiate it, as in {partition.__name__}(num_clients=10)."
        )
    if not callable(partition):
        raise FederatedError(
            f"partition={partition!r} must be a Partition, such as Dirichlet(num_clients=10, alpha=0.3), or a callable"
            " from labels to each client's indices."
        )


def check_client_id(client_id: Any) -> ClientId:
    """Return a client id as a plain int or str, which a checkpoint can store."""
    if isinstance(client_id, str):
        return str(client_id)
    if isinstance(client_id, Integral) and not isinstance(client_id, bool):
        return int(client_id)
    raise FederatedError(
        f"A client id must be an int or a str; found {client_id!r} ({type(client_id).__name__}). Use str(...) of it."
    )


def check_client_ids(owner: str, ids: Any) -> Sequence[ClientId]:
    """Return a checked sequence of client ids; a ``range`` is not iterated."""
    ordered = hasattr(ids, "__len__") and hasattr(ids, "__getitem__")
    if not ordered or isinstance(ids, str | bytes | Mapping | Tensor | type):
        raise FederatedError(
            f"{owner}.client_ids is {kind_of(ids)}: give a sequence of ints or strs, such as list(ids), or"
            " ids.tolist() of a tensor."
        )
    if not isinstance(ids, range):
        for client_id in ids:
            check_client_id(client_id)
    return cast("Sequence[ClientId]", ids)


def _group(owners: Tensor, num_clients: int) -> list[Tensor]:
    """Return each owner's ascending indices in one storage, so that 100,000 clients need one sort."""
    sizes = torch.bincount(owners, minlength=num_clients)
    return list(torch.argsort(owners, stable=True).split_with_sizes(sizes.tolist()))


def by_class(labels: Tensor, random: np.random.RandomState) -> tuple[Ints, list[int]]:
    """Return the indices sorted by label, shuffled within each class, and the class sizes."""
    _, codes, sizes = np.unique(labels.cpu().numpy(), return_inverse=True, return_counts=True)
    if len(sizes) <= 2**16:
        codes = codes.astype(np.uint16)  # NumPy sorts 16-bit integers by radix, ten times faster
    shuffled = random.permutation(len(codes))
    return shuffled[np.argsort(codes[shuffled], kind="stable")], sizes.tolist()


# Random draws of clients and partitions, vectorized over clients, classes and examples


def seed_words(seed: int, *key: int | str) -> list[int]:
    """Return seed words for ``RandomState``: 64 or more bits of a seed, integers, and 128 bits of a name's hash."""
    words = [seed >> bits & 0xFFFFFFFF for bits in range(0, max(64, seed.bit_length()), 32)]
    for part in key:
        if isinstance(part, str):
            digest = hashlib.blake2b(part.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            words += np.frombuffer(digest, dtype="<u4").tolist()
        else:
            words.append(part)
    return words


def random_state(seed: int, *key: int | str) -> np.random.RandomState:
    """Return the random stream of a seed and a key, the same with every version of NumPy."""
    return np.random.RandomState(seed_words(seed, *key))


def equal_shares(size: int, parts: int) -> Ints:
    """Return the sizes of equal parts; the first parts get one more if the size is not divisible."""
    return size // parts + (np.arange(parts) < size % parts).astype(np.int64)


def cut_by(log_weights: Floats, size: int, least: int) -> Ints:
    """Return shares that sum to ``size``: ``least`` for each, and the rest in proportion to the weights."""
    cumulative = np.cumsum(np.exp(log_weights - log_weights.max()))
    cuts = np.rint(cumulative / cumulative[-1] * (size - least * len(log_weights))).astype(np.int64)
    shares: Ints = least + np.diff(cuts, prepend=0)
    return shares


def log_gamma(alpha: Floats, shape: tuple[int, ...], random: np.random.RandomState) -> Floats:
    """Return logarithms of Gamma(alpha) variables; normalized over the last axis, they are a Dirichlet draw.

    Gamma(alpha) is Gamma(alpha + 1) U^(1 / alpha). Its logarithm neither underflows nor ties if alpha is tiny.
    """
    limits = np.finfo(np.float64)
    drawn = np.log(random.standard_gamma(alpha + 1, shape))
    with np.errstate(over="ignore"):
        drawn += np.log1p(-random.random_sample(shape)) / np.maximum(alpha, limits.tiny)
    clamped: Floats = np.maximum(drawn, limits.min)
    return clamped
