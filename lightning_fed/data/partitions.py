"""Partitions split one data set into clients: labels in, each client's indices out."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Sized
from numbers import Integral
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_fed.core.arguments import check_count, check_number, check_one_of, check_seed, kind_of
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.core.unset import NamesUnset

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Parts: TypeAlias = Sequence[Tensor] | Mapping[ClientId, Tensor]
"""Each client's indices [n_i], int64, as a sequence for clients 0, ..., N - 1, or a mapping by id."""

_MAX_DRAWS = 1000
_MAX_PROPORTIONS = 2 * 10**7  # maximum number to draw over all attempts, in a few seconds


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

    Each class draws proportions over the clients from Dir(alpha, ..., alpha), which split its shuffled examples. This
    is the unbalanced recipe of Yurochkin et al., 2019 (arXiv:1905.12022) and Li et al., 2022 (arXiv:2102.02079,
    distribution-based label imbalance). Their code also stops giving examples to a client that has n / N of them; the
    papers do not mention this, and this class does not do it. A small ``alpha`` gives clients with few classes and very
    different sizes; a large one approaches equal shares of every class. If a client has fewer than ``min_size``
    examples, everything is redrawn, with at most 1,000 draws in total. Many clients and classes lower this limit, to no
    less than 10, if 1,000 draws would take minutes.

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
    """A split of the examples, sorted by label, into equal shards; every client gets equally many shards.

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


class BalancedDirichlet(SeededPartition):
    """Label skew with equal sizes: each client draws its mixture of classes from a Dirichlet distribution.

    Every client draws a mixture q_i, then its examples one by one from the classes with examples left, with q_i
    renormalized over these. This is the balanced recipe of FedDyn (Acar et al., 2021, arXiv:2111.04263) and FedCM (Xu
    et al., 2021, arXiv:2106.10874) in their experiments. All clients draw at once. If a class is drawn more often than
    it has examples, a random subset of the draws gets them, the class closes, and the other draws are repeated. So
    there are at most as many passes as classes. Sizes differ by at most one.

    Args:
        num_clients: The number of clients N.
        alpha: The concentration, positive; small values give clients with few classes.
        concentration: ``"per_class"`` draws q_i ~ Dir(alpha, ..., alpha), as FedDyn does. ``"total"`` draws q_i ~
            Dir(alpha p), where p is the label distribution of all examples, as Hsu et al., 2019 (arXiv:1909.06335,
            section 3) do; with C balanced classes, it equals ``"per_class"`` with alpha / C.
        seed: The seed of the partition.

    Example:
        >>> labels = torch.arange(1000) % 10
        >>> [
        ...     len(part)
        ...     for part in BalancedDirichlet(num_clients=3, alpha=0.3)(labels)
        ... ]
        [334, 333, 333]
    """

    def __init__(
        self,
        num_clients: int,
        alpha: float,
        concentration: Literal["per_class", "total"] = "per_class",
        seed: int = 0,
    ) -> None:
        super().__init__(num_clients, seed)
        self.alpha = check_number("BalancedDirichlet", "alpha", alpha, "(0, inf)")
        self.concentration = check_one_of("BalancedDirichlet", "concentration", concentration, ("per_class", "total"))

    def _deal(self, labels: Tensor, random: np.random.RandomState) -> tuple[Ints, Ints]:
        """Draw classes for all unassigned examples at once, until none is left."""
        n = len(labels)
        self._need_examples(n, self.num_clients)
        order, class_sizes = by_class(labels, random)
        shares = np.array(class_sizes) / n if self.concentration == "total" else np.ones(len(class_sizes))
        log_mixtures = log_gamma(self.alpha * shares, (self.num_clients, len(class_sizes)), random)
        ends = np.cumsum(class_sizes)
        next_free = ends - class_sizes  # the first unassigned example of each class, as a position in `order`
        places = random.permutation(n) % self.num_clients  # the clients that need an example, in random order
        clients = np.empty(n, dtype=np.int64)
        while len(places):
            wishes = _draw_classes(log_mixtures, next_free < ends, places, random)
            asked = np.bincount(wishes, minlength=len(ends))
            queue = np.argsort(wishes.astype(np.uint16) if len(ends) <= 2**16 else wishes, kind="stable")
            ranks = np.arange(len(queue)) - np.repeat(np.cumsum(asked) - asked, asked)
            positions = next_free[wishes[queue]] + ranks
            served = positions < ends[wishes[queue]]
            clients[positions[served]] = places[queue[served]]
            next_free = np.minimum(next_free + asked, ends)
            places = places[np.sort(queue[~served])]
        return order, clients


class Similarity(SeededPartition):
    """A random share of the data, the rest sorted by label; every client gets equal parts of both.

    This is the split of SCAFFOLD (Karimireddy et al., 2020, arXiv:1910.06378, section 7), which gives the similarity in
    percent. At 0, most clients have one or two classes; at 1, the partition is IID. The sorted examples go to the
    clients in order. Sizes differ by at most one.

    Args:
        num_clients: The number of clients N.
        similarity: The share of the data split at random, in [0, 1].
        seed: The seed of the partition.

    Example:
        >>> labels = torch.arange(100) % 10
        >>> [
        ...     labels[part].unique().tolist()
        ...     for part in Similarity(num_clients=5, similarity=0.0)(labels)
        ... ]
        [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    """

    def __init__(self, num_clients: int, similarity: float, seed: int = 0) -> None:
        super().__init__(num_clients, seed)
        self.similarity = check_number("Similarity", "similarity", similarity, "[0, 1]")

    def _deal(self, labels: Tensor, random: np.random.RandomState) -> tuple[Ints, Ints]:
        """Cut the sorted examples into one piece per client, and fill up each client with random examples."""
        n = len(labels)
        self._need_examples(n, self.num_clients)
        order, _ = by_class(labels, random)
        at_random = np.zeros(n, dtype=bool)
        at_random[random.permutation(n)[: round(self.similarity * n)]] = True
        everyone = np.arange(self.num_clients)
        cut = equal_shares(n - int(at_random.sum()), self.num_clients)
        clients = np.empty(n, dtype=np.int64)
        clients[~at_random] = np.repeat(everyone, cut)
        clients[at_random] = random.permutation(np.repeat(everyone, equal_shares(n, self.num_clients) - cut))
        return order, clients


class ClassesPerClient(SeededPartition):
    """Each client has exactly k classes; each class is split equally among the clients that have it.

    This is the quantity-based label imbalance #C = k of Li et al., 2022 (arXiv:2102.02079). Classes are dealt like
    cards, from one shuffled deck of all classes after another. So the numbers of clients per class differ by at most
    one, and every example is used.

    Args:
        num_clients: The number of clients N.
        classes_per_client: The number of classes k per client; k N must be at least the number of classes.
        seed: The seed of the partition.

    Example:
        >>> labels = torch.arange(1000) % 10
        >>> parts = ClassesPerClient(num_clients=20, classes_per_client=3)(labels)
        >>> {len(labels[part].unique()) for part in parts}
        {3}
    """

    min_per_class = 1

    def __init__(self, num_clients: int, classes_per_client: int, seed: int = 0) -> None:
        super().__init__(num_clients, seed)
        self.classes_per_client = check_count(self, "classes_per_client", classes_per_client, least=1)

    def _deal(self, labels: Tensor, random: np.random.RandomState) -> tuple[Ints, Ints]:
        """Assign the classes to clients, then split each class."""
        order, class_sizes = by_class(labels, random)
        if self.classes_per_client > len(class_sizes):
            raise FederatedError(
                f"{self!r} for {len(class_sizes):,} classes: classes_per_client is at most that, for any num_clients."
            )
        if self.classes_per_client * self.num_clients < len(class_sizes):
            raise FederatedError(
                f"{self!r} would leave out some of the {len(class_sizes):,} classes. Raise num_clients or"
                " classes_per_client."
            )
        hands = _deal_classes(self.num_clients, len(class_sizes), self.classes_per_client, random)
        num_viewers = np.bincount(hands.ravel(), minlength=len(class_sizes))
        by_hand = np.argsort(hands.ravel(), kind="stable") // self.classes_per_client
        viewers = np.split(by_hand, np.cumsum(num_viewers)[:-1])
        pieces = []
        for size, clients in zip(class_sizes, viewers, strict=True):
            if size < self.min_per_class * len(clients):
                raise FederatedError(
                    f"{self!r} gives one class to {len(clients):,} clients, each at least {self.min_per_class}, and"
                    f" it has {size:,} examples. Lower num_clients or classes_per_client."
                )
            pieces.append(np.repeat(random.permutation(clients), self._cut(size, len(clients), random)))
        return order, np.concatenate(pieces)

    def _cut(self, size: int, num_viewers: int, random: np.random.RandomState) -> Ints:
        """Return the number of a class's examples that each of its clients gets."""
        return equal_shares(size, num_viewers)


class PowerLaw(ClassesPerClient):
    """A few classes per client and very different sizes: each class is split by log-normal weights.

    This is the MNIST split of FedProx (Li et al., 2020, arXiv:1812.06127, section 5.1): 1,000 clients with two digits
    each and power-law sizes. A client gets ``min_per_class`` examples of each of its classes, and the rest of a class
    is split in proportion to exp(sigma z), z normal. Unlike in the paper, a client's classes are random, as in
    :class:`ClassesPerClient`, and every example is used.

    Args:
        num_clients: The number of clients N.
        classes_per_client: The number of classes per client.
        sigma: The standard deviation of a weight's logarithm; 0 gives equal parts.
        min_per_class: The smallest number of examples of each of a client's classes.
        seed: The seed of the partition.

    Example:
        >>> labels = torch.arange(10_000) % 10
        >>> parts = PowerLaw(num_clients=100)(labels)
        >>> min(len(part) for part in parts) >= 10, sum(len(part) for part in parts)
        (True, 10000)
    """

    def __init__(
        self,
        num_clients: int,
        classes_per_client: int = 2,
        sigma: float = 2.0,
        min_per_class: int = 5,
        seed: int = 0,
    ) -> None:
        super().__init__(num_clients, classes_per_client, seed)
        self.sigma = check_number("PowerLaw", "sigma", sigma, "[0, inf)")
        self.min_per_class = check_count("PowerLaw", "min_per_class", min_per_class, least=1)

    def _cut(self, size: int, num_viewers: int, random: np.random.RandomState) -> Ints:
        return cut_by(self.sigma * random.standard_normal(num_viewers), size, self.min_per_class)


class _SizeSkew(SeededPartition):
    """Clients of different sizes that draw from one label distribution."""

    needs_labels = False

    def __init__(self, num_clients: int, min_size: int, seed: int) -> None:
        super().__init__(num_clients, seed)
        self.min_size = check_count(self, "min_size", min_size, least=0)

    @abstractmethod
    def _log_weights(self, random: np.random.RandomState) -> Floats:
        """Return the logarithms [N] of weights proportional to the sizes."""

    def _deal(self, labels: Tensor, random: np.random.RandomState) -> tuple[Ints, Ints]:
        self._need_examples(len(labels), self.num_clients * self.min_size)
        sizes = cut_by(self._log_weights(random), len(labels), self.min_size)
        return random.permutation(len(labels)), np.repeat(np.arange(self.num_clients), sizes)


class LogNormalSizes(_SizeSkew):
    """Quantity skew: log-normal sizes, labels drawn at random.

    The unbalanced setting of FedDyn (Acar et al., 2021, arXiv:2111.04263, experiments). Each client gets ``min_size``
    examples, and the rest is split in proportion to exp(sigma z), z normal.

    Args:
        num_clients: The number of clients N.
        sigma: The standard deviation of a size's logarithm. 0 gives equal sizes.
        min_size: The smallest number of examples of a client; 0 allows empty clients.
        seed: The seed of the partition.

    Example:
        >>> sorted(
        ...     len(part)
        ...     for part in LogNormalSizes(num_clients=4, sigma=0.0)(
        ...         torch.zeros(100)
        ...     )
        ... )
        [25, 25, 25, 25]
    """

    def __init__(self, num_clients: int, sigma: float, min_size: int = 1, seed: int = 0) -> None:
        super().__init__(num_clients, min_size, seed)
        self.sigma = check_number("LogNormalSizes", "sigma", sigma, "[0, inf)")

    def _log_weights(self, random: np.random.RandomState) -> Floats:
        return self.sigma * random.standard_normal(self.num_clients)


class QuantitySkew(_SizeSkew):
    """Quantity skew: sizes from a Dirichlet distribution, labels drawn at random.

    The quantity skew of Li et al., 2022 (arXiv:2102.02079). Each client gets ``min_size`` examples, and one draw from
    Dir(alpha, ..., alpha) over the clients splits the rest. The paper redraws everything while a client has too few.

    Args:
        num_clients: The number of clients N.
        alpha: The concentration, positive. Small values give a few clients nearly everything.
        min_size: The smallest number of examples of a client; 0 allows empty clients.
        seed: The seed of the partition.

    Example:
        >>> sum(
        ...     len(part)
        ...     for part in QuantitySkew(num_clients=5, alpha=0.5)(torch.zeros(100))
        ... )
        100
    """

    def __init__(self, num_clients: int, alpha: float, min_size: int = 1, seed: int = 0) -> None:
        super().__init__(num_clients, min_size, seed)
        self.alpha = check_number("QuantitySkew", "alpha", alpha, "(0, inf)")

    def _log_weights(self, random: np.random.RandomState) -> Floats:
        return log_gamma(np.array(self.alpha), (self.num_clients,), random)


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
    """Return each client's ascending indices as views of one tensor, so that 100,000 clients need one sort."""
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
    """Return words to seed ``RandomState``: 64 or more bits of the seed, then the key's integers and 128-bit hashes."""
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
    """Return logarithms of Gamma(alpha) variables; their softmax over the last axis is a Dirichlet draw.

    Gamma(alpha) is Gamma(alpha + 1) U^(1 / alpha). Its logarithm neither underflows nor ties if alpha is tiny.
    """
    limits = np.finfo(np.float64)
    drawn = np.log(random.standard_gamma(alpha + 1, shape))
    with np.errstate(over="ignore"):
        drawn += np.log1p(-random.random_sample(shape)) / np.maximum(alpha, limits.tiny)
    clamped: Floats = np.maximum(drawn, limits.min)
    return clamped


def _draw_classes(
    log_mixtures: Floats, is_open: npt.NDArray[np.bool_], clients: Ints, random: np.random.RandomState
) -> Ints:
    """Draw a class for each of ``clients`` from its row of ``log_mixtures`` [N, C], among the open classes."""
    classes = np.flatnonzero(is_open)
    waiting = np.bincount(clients, minlength=len(log_mixtures)) > 0
    rows = (np.cumsum(waiting) - 1)[clients]
    weights = log_mixtures[np.ix_(np.flatnonzero(waiting), classes)]
    weights = np.exp(weights - weights.max(axis=1, keepdims=True))
    cumulative = np.cumsum(weights, axis=1)
    cumulative /= cumulative[:, -1:]
    cumulative += np.arange(len(cumulative))[:, None]  # row r ascends from r to r + 1, for one search over all rows
    points = np.minimum(rows + random.random_sample(len(rows)), np.nextafter(rows + 1.0, 0))
    found = np.searchsorted(cumulative.ravel(), points, side="right")
    drawn: Ints = classes[found - rows * len(classes)]
    return drawn


def _deal_classes(num_clients: int, num_classes: int, each: int, random: np.random.RandomState) -> Ints:
    """Deal each client ``each`` different classes [N, each] from one shuffled deck of all classes after another."""
    hands = np.empty((num_clients, each), dtype=np.int64)
    deck = np.empty(0, dtype=np.int64)
    for hand in hands:
        if len(deck) < each:
            fresh = random.permutation(num_classes)
            held = np.isin(fresh, deck)
            deck = np.concatenate([deck, fresh[~held], fresh[held]])  # classes that the client holds go to the end
        hand[:] = deck[:each]
        deck = deck[each:]
    return hands
