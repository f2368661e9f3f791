"""Aggregation that tolerates a share of bad clients: norm clipping, medians, the trimmed mean, Krum and Bulyan."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pdist

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.arguments import check_count, check_number, kind_of
from lightning_fed.core.devices import accumulation, narrowed, widened
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.plain import place_of
from lightning_fed.core.types import State, Vector, Weighting
from lightning_fed.server.aggregation.mean import FULL_GRAD, Aggregation, Aggregator, Collectives, averaged_points
from lightning_fed.server.participation import Participant, no_weight
from lightning_fed.server.sampling import Sampler

_BLOCK = 2**14  # columns sorted or compared in one block, which bounds the extra memory


class NormClipping(Aggregator):
    r"""The weighted mean of messages whose norms are bounded.

    Sun et al., *Can You Really Backdoor Federated Learning?*, 2019 (https://arxiv.org/abs/1911.07963), norm
    thresholding:

    .. math::
        m \leftarrow \sum_i p_i \frac{m_i}{\max(1, \lVert m_i \rVert / M)}

    A bad client can still move the mean, by at most :math:`p_i M`. Messages are summed as they arrive, as in the plain
    mean.

    Args:
        max_norm: :math:`M > 0`. One number for methods that send a single message, else a number per message. The
            names are those in ``reduces``, and ``full_grad_x`` for full-batch gradients at x.

    Raises:
        FederatedError: If a number is not positive and finite.

    Example:
        >>> NormClipping(max_norm={"delta": 1.0, "delta_c": 10.0})
        NormClipping(max_norm={'delta': 1.0, 'delta_c': 10.0})
    """

    def __init__(self, max_norm: float | dict[str, float]) -> None:
        self.max_norm: float | dict[str, float]
        if isinstance(max_norm, Mapping):
            self.max_norm = {
                name: check_number(self, f"max_norm[{name!r}]", value, "(0, inf)") for name, value in max_norm.items()
            }
        else:
            self.max_norm = check_number(self, "max_norm", max_norm, "(0, inf)")

    def for_run(self, algorithm: Algorithm, weighting: Weighting | None, sampler: Sampler) -> Aggregator:
        """Return the aggregator; raise unless its bounds are for exactly the messages of the method."""
        names = [*algorithm.reduces, *(FULL_GRAD + point for point in averaged_points(algorithm))]
        given = {names[0]: self.max_norm} if not isinstance(self.max_norm, dict) else self.max_norm
        if set(given) != set(names):
            raise FederatedError(
                f"NormClipping(max_norm={self.max_norm!r}) must have a bound for each of {names}, which the clients of"
                f" {type(algorithm).__name__} send. Pass"
                f" max_norm={{{', '.join(f'{name!r}: ...' for name in names)}}}."
            )
        return super().for_run(algorithm, weighting, sampler)

    def of_round(self, *arguments: Any, **named: Any) -> Aggregation:
        """Return an object that clips and sums the messages of a cohort."""
        return ClippedAggregation(self.max_norm, *arguments, **named)


class ClippedAggregation(Aggregation):
    """Weighted sums of messages clipped to their bounds."""

    is_one_by_one = True

    def __init__(self, bounds: float | Mapping[str, float], *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.bounds = bounds if isinstance(bounds, Mapping) else dict.fromkeys(self.reduces, bounds)

    def update(self, steps: Mapping[int, int], send: State, models: Tensor | None = None) -> None:
        """Clip and add clients' messages; raise a :class:`ClientError` for a non-finite message."""
        self._check_names(send)
        clipped = {
            name: torch.stack([self._clipped(name, value, index) for value, index in zip(values, steps, strict=True)])
            for name, values in send.items()
        }
        super().update(steps, clipped)

    def _clipped(self, name: str, value: Tensor, index: int) -> Tensor:
        value = widened(value.detach())
        norm = float(torch.linalg.vector_norm(value))
        if not math.isfinite(norm):
            raise not_finite(self._members[index], name)
        return value if norm <= self.bounds[name] else value * (self.bounds[name] / norm)


class CollectedAggregation(Aggregation):
    """Collects the messages of a cohort and applies a rule once all have arrived."""

    is_one_by_one = True

    def __init__(self, rule: Aggregator, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._rule = rule
        self._collected: dict[int, State] = {}
        self._by_rank: list[list[int]] = []
        self._shapes: dict[str, torch.Size] = {}
        self._ranks: Collectives | None = None

    def update(self, steps: Mapping[int, int], send: State, models: Tensor | None = None) -> None:
        """Collect clients' messages; raise a :class:`ClientError` for a non-finite message."""
        self._check_names(send)
        for row, index in enumerate(steps):
            copies: dict[tuple[Any, ...], Tensor] = {}  # a tensor sent under two names is stored once
            own: State = {}
            for name, values in send.items():
                value = values[row]
                if not bool(torch.isfinite(value).all()):
                    raise not_finite(self._members[index], name)
                self._shapes[name] = value.shape
                key = place_of(value)
                if key not in copies:
                    copies[key] = value.detach().clone()
                own[name] = copies[key]
            self._collected[index] = own
        self._note_steps(steps)

    def partial(self) -> dict[str, Any]:
        """Return the steps and shapes that other processes need before messages are exchanged."""
        steps = {index: self._steps[index] for index in sorted(self._collected)}
        return {"steps": steps, "shapes": {name: tuple(shape) for name, shape in self._shapes.items()}}

    def merge(self, partials: Sequence[Mapping[str, Any]], ranks: Collectives, x: Vector) -> None:
        """Record which process has which messages; :meth:`compute` exchanges them."""
        self._ranks = ranks
        self._by_rank = [list(partial["steps"]) for partial in partials]
        for partial in partials:
            self._note_steps(partial["steps"])
            self._shapes.update({name: torch.Size(shape) for name, shape in partial["shapes"].items()})

    def compute(self, x: Vector) -> tuple[State, Vector | None]:
        """Apply the rule to the messages; all processes must call it."""
        by_rank = self._by_rank or [sorted(self._collected)]
        there = [index for indices in by_rank for index in indices]
        if not there:
            return {}, None
        counts = [len(indices) for indices in by_rank]
        return {name: self._combined(name, there, counts, x) for name in self.reduces}, None

    def _combined(self, name: str, there: Sequence[int], counts: Sequence[int], x: Vector) -> Tensor:
        """Return the combined message of the clients ``there``, ordered by process, with ``counts`` in each."""
        shape, ranks = self._shapes[name], self._ranks
        mine = [self._collected[index].pop(name).reshape(-1) for index in sorted(self._collected)]
        rows = torch.stack(mine).to(x.dtype) if mine else x.new_empty(0, shape.numel())
        rows = rows.to(accumulation(x.device)["device"])
        del mine
        columns = rows if ranks is None else ranks.columns(rows, counts)
        del rows
        order = sorted(range(len(there)), key=there.__getitem__)
        if order != list(range(len(there))):
            columns = columns[order]
        weights, repeats = self._weights(self.reduces[name], sorted(there))
        if max(repeats) > 1:
            columns = columns.repeat_interleave(torch.tensor(repeats, device=columns.device), dim=0)
        whole = torch.zeros(shape.numel(), **accumulation(x.device))
        own = whole if ranks is None else whole.tensor_split(ranks.size)[ranks.rank]
        assert isinstance(self._rule, RobustAggregator)
        found: Any = self._rule.combine(columns, weights.to(columns.device), self._sum)
        if not isinstance(found, Tensor) or found.shape != own.shape:
            what = f"the shape {list(found.shape)}" if isinstance(found, Tensor) else kind_of(found)
            raise FederatedError(
                f"{type(self._rule).__name__}.combine must return one number for each of the {len(own)} columns of"
                f" {name!r}, as a tensor, found {what}."
            )
        own.copy_(found)
        self._sum(whole)
        scale = len(there) / self.population if self.reduces[name] == "population" else 1.0
        return narrowed(whole * scale, x).view(shape)

    def _sum(self, part: Tensor) -> Tensor:
        if self._ranks is not None:
            self._ranks.sum([part])
        return part

    def _weights(self, rule: str, there: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Return the messages' weights, and the number of repeats of each one, 1 unless weights are equal."""
        members = [self._members[index] for index in there]
        if rule == "population":  # in a sum over clients, each counts once
            return torch.full((len(there),), 1 / len(there), dtype=torch.float64), [1] * len(there)
        if not self._rule.weighted:  # a client drawn twice counts twice
            repeats = [member.count for member in members]
            return torch.full((sum(repeats),), 1 / sum(repeats), dtype=torch.float64), repeats
        raw = torch.tensor([self._raw[rule][index] for index in there], dtype=torch.float64)
        if not raw.sum() > 0:
            raise no_weight([member.client_id for member in members])
        return raw / raw.sum(), [1] * len(there)


def not_finite(member: Participant, name: str) -> ClientError:
    """Return the error for a message that is not finite."""
    return ClientError(
        f"Client {member.client_id!r} sent a message {name!r} that is not finite. Lower the learning rate, clip"
        " gradients, or look at its data.",
        member.client_id,
    )


class RobustAggregator(Aggregator):
    """An aggregator that needs all messages of a cohort at once.

    A subclass defines :meth:`combine`, and sets :attr:`weighted` if clients may have unequal weights. All messages stay
    in memory until the end of the round. With several processes, each combines a part of the columns.
    """

    @abstractmethod
    def combine(self, messages: Tensor, weights: Tensor, sum_: Callable[[Tensor], Tensor]) -> Tensor:
        """Return one message [P] for the messages of a cohort.

        Args:
            messages: The clients' messages [S, P] in their stored order, possibly only some columns.
            weights: The clients' weights [S], which sum to one.
            sum_: Returns the sum of a tensor over the processes, which have different columns.
        """

    def of_round(self, *arguments: Any, **named: Any) -> Aggregation:
        """Return an object that collects and combines the messages of a cohort."""
        return CollectedAggregation(self, *arguments, **named)


class CoordinateMedian(RobustAggregator):
    """The median of every coordinate.

    Yin et al., *Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates*, ICML 2018
    (https://arxiv.org/abs/1803.01498), Definition 1. It tolerates bad clients while they are less than half of the
    cohort. All clients have equal weight. For an even number of values, it is the mean of the two middle ones.

    Example:
        >>> import torch
        >>> messages = torch.tensor([[1.0, 0.0], [2.0, 5.0], [99.0, 6.0]])
        >>> CoordinateMedian().combine(
        ...     messages, torch.full((3,), 1 / 3), lambda part: part
        ... )
        tensor([2., 5.])
    """

    weighted = False

    def combine(self, messages: Tensor, weights: Tensor, sum_: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the median [P]."""
        low, high = (len(messages) - 1) // 2, len(messages) // 2
        return _by_columns(messages, lambda ordered: (ordered[low] + ordered[high]) / 2)


class TrimmedMean(RobustAggregator):
    r"""The mean of every coordinate after removing its largest and smallest values.

    Yin et al., ICML 2018 (https://arxiv.org/abs/1803.01498), Definition 2. Of the S values of a coordinate, it removes
    the :math:`\lfloor \beta S \rfloor` largest and smallest, which tolerates that number of bad clients. All clients
    have equal weight.

    Args:
        beta: The share removed at either end, in [0, 1/2). Choose it above the share of bad clients, since a cohort may
            contain more of them than the population does. 0 is the mean.

    Raises:
        FederatedError: If the share is out of range.

    Example:
        >>> import torch
        >>> messages = torch.tensor([[0.0], [1.0], [3.0], [1e6]])
        >>> TrimmedMean(beta=0.25).combine(
        ...     messages, torch.full((4,), 1 / 4), lambda part: part
        ... )
        tensor([2.], dtype=torch.float64)
    """

    weighted = False

    def __init__(self, beta: float) -> None:
        self.beta = check_number(self, "beta", beta, "[0, 0.5)")

    def combine(self, messages: Tensor, weights: Tensor, sum_: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the trimmed mean [P]."""
        count = len(messages)
        out = math.floor(self.beta * count + 1e-9)  # floor(0.29 * 100) would be 28
        return _by_columns(messages, lambda ordered: widened(ordered[out : count - out]).mean(dim=0))


class GeometricMedian(RobustAggregator):
    r"""The point with the smallest weighted sum of distances to the messages (RFA).

    Pillutla et al., *Robust Aggregation for Federated Learning*, IEEE Transactions on Signal Processing 2022
    (https://arxiv.org/abs/1912.13445), by the smoothed Weiszfeld algorithm (Algorithm 2) from the weighted mean:

    .. math::
        \beta_i \leftarrow \frac{p_i}{\max(\nu, \lVert z - m_i \rVert)}, \qquad
        z \leftarrow \frac{\sum_i \beta_i m_i}{\sum_i \beta_i}

    It tolerates bad clients while they have less than half of the weight, under the run's ``weighting``. Clients report
    their own numbers of examples; ``weighting="uniform"`` ignores these.

    Args:
        iterations: The number of iterations after the weighted mean. The authors' code counts that mean as the first of
            its 3 averages, so it has 2 iterations. With b the weight share of bad messages, each multiplies their
            effect by about b / (1 - b). Use 10 to 20 if they may be thousands of times longer than good ones.
        nu: The smoothing :math:`\nu > 0`.

    Raises:
        FederatedError: If a number is not positive.

    Example:
        >>> import torch
        >>> messages = torch.tensor(
        ...     [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [100.0, 100.0]]
        ... )
        >>> z = GeometricMedian(iterations=20).combine(
        ...     messages, torch.full((5,), 1 / 5), lambda part: part
        ... )
        >>> bool((z < 1.1).all())
        True
    """

    def __init__(self, iterations: int = 3, nu: float = 1e-6) -> None:
        self.iterations = check_count(self, "iterations", iterations)
        self.nu = check_number(self, "nu", nu, "(0, inf)")

    def combine(self, messages: Tensor, weights: Tensor, sum_: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the geometric median [P]."""
        where = accumulation(messages.device)
        messages, weights = messages.to(where["device"]), weights.to(**where)
        z = _weighted_mean(messages, weights)
        for _ in range(self.iterations):
            squares = torch.stack([((z - message) ** 2).sum() for message in messages])
            z = _weighted_mean(messages, weights / sum_(squares).sqrt().clamp(min=self.nu))
        return z


def _by_columns(messages: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function to the sorted values [S, p] of every coordinate, in blocks of columns."""
    return torch.cat([reduce(block.sort(dim=0).values) for block in messages.split(_BLOCK, dim=1)])


def _weighted_mean(messages: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean [P] of messages [S, P], row by row, to avoid a float64 copy of all messages."""
    total = torch.zeros_like(messages[0], dtype=weights.dtype)
    for message, weight in zip(messages, weights.tolist(), strict=True):
        total.add_(message, alpha=weight)
    return total / float(weights.sum())


class _PairwiseRule(RobustAggregator):
    """A rule on squared distances between messages, for at most f bad clients in a large enough cohort."""

    weighted = False

    def __init__(self, num_bad: int) -> None:
        self.num_bad = check_count(self, "num_bad", num_bad, least=0)

    @property
    @abstractmethod
    def least_clients(self) -> int:
        """The smallest cohort that the rule is defined for."""

    def for_run(self, algorithm: Algorithm, weighting: Weighting | None, sampler: Sampler) -> Aggregator:
        """Return the aggregator; raise if the sampler draws too few clients."""
        drawn = getattr(sampler, "clients_per_round", None)
        if isinstance(drawn, int):
            self._check_size(drawn, f"clients_per_round={drawn}")
        return super().for_run(algorithm, weighting, sampler)

    def of_round(self, *arguments: Any, **named: Any) -> Aggregation:
        """Return an object that collects a cohort's messages; raise before training if the cohort is too small."""
        aggregation = super().of_round(*arguments, **named)
        if there := aggregation.members:  # in a sum over clients, a client drawn twice counts once
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
        self.num_selected = None if num_selected is None else check_count(self, "num_selected", num_selected)

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


class Krum(MultiKrum):
    r"""The message that is closest to its neighbors.

    Blanchard et al., *Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent*, NeurIPS 2017
    (https://arxiv.org/abs/1703.02757), Section 4. The result is the one of n messages with the smallest score

    .. math::
        s(i) = \sum_{i \to j} \lVert m_i - m_j \rVert^2

    The sum is over the :math:`n - f - 2` other messages closest to :math:`m_i`. Among equal scores, the client first in
    stored order wins. All clients have equal weight. It costs :math:`O(n^2 P)` per message.

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

    def __init__(self, num_bad: int) -> None:
        super().__init__(num_bad, num_selected=1)


class Bulyan(_PairwiseRule):
    r"""A trimmed mean around the median of messages that Krum selects.

    El Mhamdi et al., *The Hidden Vulnerability of Distributed Learning in Byzantium*, ICML 2018
    (https://arxiv.org/abs/1802.07927), Section 4, with Krum as its inner rule:

    1. Krum repeatedly moves a message from the received ones to the selection, until
       :math:`\theta = n - 2f` are selected.
    2. Every coordinate of the result is the mean of the :math:`\beta = \theta - 2f` selected values closest to their
       median.

    Krum protects whole vectors. The second step also bounds what a bad client can do to a single coordinate.

    Note:
        The paper leaves some cases open. With r messages left, Krum sums over :math:`\max(1, r - f - 2)` neighbors.
        Among equal scores, the client first in stored order wins. The median of an even number of values is the mean
        of the two middle ones. Of two values equally far from it, the lower one counts.

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
