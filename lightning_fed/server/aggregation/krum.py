"""Robust rules that compare the messages of a cohort pairwise: Krum, Multi-Krum and Bulyan."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pdist

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.arguments import check_count
from lightning_fed.core.devices import accumulation, widened
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import Weighting
from lightning_fed.server.aggregation.mean import Aggregation, Aggregator
from lightning_fed.server.aggregation.robust import RobustAggregator
from lightning_fed.server.sampling import Sampler

_BLOCK = 2**14  # columns compared in one block, which bounds the extra memory


class _PairwiseRule(RobustAggregator):
    """A rule on the squared distances between messages, for f bad clients of a large enough cohort."""

    weighted = False

    def __init__(self, num_bad: int) -> None:
        self.num_bad = check_count(self, "num_bad", num_bad, least=0)

    @property
    @abstractmethod
    def least_clients(self) -> int:
        """The smallest cohort that the rule is defined for."""

    def for_run(self, algorithm: Algorithm, weighting: Weighting | None, sampler: Sampler) -> Aggregator:
        """Return the aggregator; raise if the sampler draws a number of clients that is too small."""
        drawn = getattr(sampler, "clients_per_round", None)
        if isinstance(drawn, int):
            self._check_size(drawn, f"clients_per_round={drawn}")
        return super().for_run(algorithm, weighting, sampler)

    def of_round(self, *arguments: Any, **named: Any) -> Aggregation:
        """Return an object that collects a cohort's messages; raise before the work of a cohort that is too small."""
        aggregation = super().of_round(*arguments, **named)
        if there := aggregation.members:  # in a sum over clients, a client drawn twice is there once
            counts_once = "population" in aggregation.reduces.values()
            size = len(there) if counts_once else sum(member.count for member in there)
            self._check_size(size, f"a round with {size} clients")
        return aggregation

    def _check_size(self, size: int, found: str) -> None:
        if size < self.least_clients:
            raise FederatedError(
                f"{self!r} needs at least {self.least_clients} clients in every round, found {found}. Draw more"
                " clients, or lower num_bad."
            )

    def combine(self, messages: Tensor, weights: Tensor, sum_: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the combined message [P]."""
        self._check_size(len(messages), f"a round in which {len(messages)} clients sent messages")
        return self._chosen(messages, sum_(_squared_distances(messages)))

    @abstractmethod
    def _chosen(self, messages: Tensor, distances: Tensor) -> Tensor:
        """Return the combined message [P], given the squared distances [S, S]."""


class Krum(_PairwiseRule):
    r"""The message that is closest to its neighbors.

    Blanchard et al., *Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent*, NeurIPS 2017
    (https://arxiv.org/abs/1703.02757), Section 4. Of n messages, the one with the smallest score

    .. math::
        s(i) = \sum_{i \to j} \lVert m_i - m_j \rVert^2

    is the result, where the sum is over the :math:`n - f - 2` other messages closest to :math:`m_i`. Of equal scores,
    the client first in stored order wins. All clients have equal weight. It costs :math:`O(n^2 P)` per message.

    Args:
        num_bad: f, the largest number of bad clients in a round. A round needs :math:`n \ge 2f + 3` clients.

    Raises:
        FederatedError: If the number is negative. A run also raises it for a round with too few clients.

    Example:
        >>> import torch
        >>> messages = torch.tensor([[0.0], [1.0], [1.5], [3.0], [100.0]])
        >>> Krum(num_bad=1).combine(
        ...     messages, torch.full((5,), 1 / 5), lambda part: part
        ... )
        tensor([1.], dtype=torch.float64)
    """

    @property
    def least_clients(self) -> int:
        """2f + 3."""
        return 2 * self.num_bad + 3

    def _chosen(self, messages: Tensor, distances: Tensor) -> Tensor:
        return widened(messages[int(_scores(distances, self.num_bad).argmin())])


class MultiKrum(_PairwiseRule):
    r"""The mean of the messages with the smallest Krum scores.

    Blanchard et al., NeurIPS 2017 (https://arxiv.org/abs/1703.02757), Section 5 and Figure 6, which averages
    :math:`m = n - f` messages. ``num_selected=1`` is :class:`Krum`.

    Args:
        num_bad: f, the largest number of bad clients in a round. A round needs :math:`n \ge 2f + 3` clients.
        num_selected: m, the number of messages averaged; by default :math:`n - f`. A round needs
            :math:`n \ge m + f` clients.

    Raises:
        FederatedError: If a number is out of range. A run also raises it for a round with too few clients.

    Example:
        >>> import torch
        >>> messages = torch.tensor([[0.0], [1.0], [1.5], [3.0], [100.0]])
        >>> MultiKrum(num_bad=1, num_selected=2).combine(
        ...     messages, torch.full((5,), 1 / 5), lambda part: part
        ... )
        tensor([1.2500], dtype=torch.float64)
    """

    def __init__(self, num_bad: int, num_selected: int | None = None) -> None:
        super().__init__(num_bad)
        if num_selected is not None:
            num_selected = check_count(self, "num_selected", num_selected)
        self.num_selected = num_selected

    @property
    def least_clients(self) -> int:
        """The larger of 2f + 3 and m + f."""
        return max(2 * self.num_bad + 3, (self.num_selected or 0) + self.num_bad)

    def _chosen(self, messages: Tensor, distances: Tensor) -> Tensor:
        count = self.num_selected or len(messages) - self.num_bad
        best = _scores(distances, self.num_bad).argsort(stable=True)[:count]
        total = torch.zeros_like(messages[0], dtype=distances.dtype)
        for index in sorted(best.tolist()):
            total.add_(messages[index])
        return total / count


class Bulyan(_PairwiseRule):
    r"""A trimmed mean around the median of messages that Krum selects.

    El Mhamdi et al., *The Hidden Vulnerability of Distributed Learning in Byzantium*, ICML 2018
    (https://arxiv.org/abs/1802.07927), Section 4, with Krum as its inner rule:

    1. Krum selects a message, which moves from the received ones to the selection, until
       :math:`\theta = n - 2f` are selected.
    2. Every coordinate of the result is the mean of the :math:`\beta = \theta - 2f` selected values closest to their
       median.

    Krum protects whole vectors. The second step also bounds what a bad client can do to a single coordinate.

    Note:
        The paper leaves some cases open. With r messages left, Krum sums over :math:`\max(1, r - f - 2)` neighbors. The
        median of an even number of values is the mean of the two middle ones.

    Args:
        num_bad: f, the largest number of bad clients in a round. A round needs :math:`n \ge 4f + 3` clients.

    Raises:
        FederatedError: If the number is negative. A run also raises it for a round with too few clients.

    Example:
        >>> import torch
        >>> messages = torch.tensor(
        ...     [[0.0], [1.0], [1.5], [2.0], [3.0], [3.5], [100.0]]
        ... )
        >>> Bulyan(num_bad=1).combine(
        ...     messages, torch.full((7,), 1 / 7), lambda part: part
        ... )
        tensor([1.5000], dtype=torch.float64)
    """

    @property
    def least_clients(self) -> int:
        """4f + 3."""
        return 4 * self.num_bad + 3

    def _chosen(self, messages: Tensor, distances: Tensor) -> Tensor:
        left, selected = list(range(len(messages))), list[int]()
        count = len(messages) - 2 * self.num_bad
        while len(selected) < count:
            best = int(_scores(distances[left][:, left], self.num_bad).argmin())
            selected.append(left.pop(best))
        kept = messages[sorted(selected)]
        return torch.cat([_mean_near_median(b, count - 2 * self.num_bad) for b in kept.split(_BLOCK, dim=1)])


def _squared_distances(messages: Tensor) -> Tensor:
    """Return the squared distances [S, S] between messages [S, P], in float64.

    Differences are squared directly. Inner products would cancel where messages are similar.
    """
    count = len(messages)
    where = accumulation(messages.device)
    pairs = torch.zeros(count * (count - 1) // 2, **where)
    for block in messages.split(_BLOCK, dim=1):
        pairs += pdist(block.to(**where)).square_()
    distances = torch.zeros(count, count, **where)
    i, j = torch.triu_indices(count, count, offset=1, device=distances.device)
    distances[i, j] = distances[j, i] = pairs
    return distances


def _scores(distances: Tensor, num_bad: int) -> Tensor:
    """Return Krum's scores [S] of messages with these squared distances [S, S]."""
    count = len(distances)
    neighbors = min(max(1, count - num_bad - 2), count - 1)
    others = distances + torch.diag(torch.full_like(distances.diagonal(), torch.inf))
    return others.sort(dim=1).values[:, :neighbors].sum(dim=1)


def _mean_near_median(values: Tensor, count: int) -> Tensor:
    """Return the mean of the ``count`` values [S, P] of every column that are closest to its median.

    They are adjacent in sorted order. Their first position is the number of values that are farther from the median
    than the one ``count`` positions above. Of two that are equally far, the lower one counts.
    """
    ordered = widened(values.sort(dim=0).values)
    median = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    above = len(ordered) - count
    first = (median - ordered[:above] > ordered[count:] - median).sum(dim=0, keepdim=True)
    total = torch.zeros_like(median)
    for position in range(count):
        total += ordered.gather(0, first + position)[0]
    return total / count
