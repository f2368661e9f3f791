"""More partitions of the federated literature: skewed labels, skewed sizes, or both."""

from abc import abstractmethod
from typing import Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lightning_fed.core.arguments import check_count, check_number, check_one_of
from lightning_fed.core.errors import FederatedError
from lightning_fed.data.partitions.partition import (
    Floats,
    Ints,
    SeededPartition,
    by_class,
    cut_by,
    equal_shares,
    log_gamma,
)


class BalancedDirichlet(SeededPartition):
    """Label skew with equal sizes: each client draws its mixture of classes from a Dirichlet distribution.

    Every client draws a mixture q_i, and then its examples one by one from the classes with examples left, with q_i
    renormalized over these: the balanced recipe of FedDyn (Acar et al., 2021, arXiv:2111.04263) and FedCM (Xu et al.,
    2021, arXiv:2106.10874) in their experiments. All clients draw at once. If a class is drawn more often than it has
    examples, they go to random drawing clients, the class closes, and the others draw again. So there are at most as
    many rounds as classes. Sizes differ by at most one.

    Args:
        num_clients: The number of clients N.
        alpha: The concentration, positive; small values give clients with few classes.
        concentration: ``"per_class"`` draws q_i ~ Dir(alpha, ..., alpha), as FedDyn does. ``"total"`` draws q_i ~
            Dir(alpha p), where p is the label distribution of all examples, as Hsu et al., 2019 (arXiv:1909.06335,
            section 3) do; with C balanced classes, it equals ``"per_class"`` with alpha / C.
        seed: The seed of the partition.

    Example:
        >>> import torch
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

    The split of SCAFFOLD (Karimireddy et al., 2020, arXiv:1910.06378, section 7), given there in percent. At similarity
    0 most clients have one or two classes, at 1 the partition is IID. The sorted examples go to the clients in order.
    Sizes differ by at most one.

    Args:
        num_clients: The number of clients N.
        similarity: The share of the data split at random, in [0, 1].
        seed: The seed of the partition.

    Example:
        >>> import torch
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
        """Cut the sorted examples into one piece per client, and fill up with the others."""
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

    The quantity-based label imbalance #C = k of Li et al., 2022 (arXiv:2102.02079). Classes are dealt like cards, from
    one shuffled deck of all classes after another, so the numbers of clients per class differ by at most one, and every
    example is used.

    Args:
        num_clients: The number of clients N.
        classes_per_client: The number of classes k per client; k N must be at least the number of classes.
        seed: The seed of the partition.

    Example:
        >>> import torch
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

    The MNIST split of FedProx (Li et al., 2020, arXiv:1812.06127, section 5.1), whose 1,000 clients have two digits
    each and power-law sizes: a client gets ``min_per_class`` examples of each of its classes, and the rest of a class
    is split in proportion to exp(sigma z), z normal. Unlike in the paper, a client's classes are random, as in
    :class:`ClassesPerClient`, and every example is used.

    Args:
        num_clients: The number of clients N.
        classes_per_client: The number of classes per client.
        sigma: The standard deviation of a weight's logarithm; 0 gives equal parts.
        min_per_class: The smallest number of examples of each of a client's classes.
        seed: The seed of the partition.

    Example:
        >>> import torch
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
        >>> import torch
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
        >>> import torch
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
            deck = np.concatenate([deck, fresh[~held], fresh[held]])  # the client's classes go to the end
        hand[:] = deck[:each]
        deck = deck[each:]
    return hands
