"""Aggregation that a share of bad clients cannot carry off: norm clipping, medians, the trimmed mean."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.arguments import check_count, check_number
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import State, Vector, Weighting
from lightning_fed.server.aggregation.base import Aggregator, names_of
from lightning_fed.server.aggregation.collected import HeldAggregation, not_finite
from lightning_fed.server.aggregation.mean import Aggregation, accumulation_dtype
from lightning_fed.server.participation import Participant
from lightning_fed.server.sampling import Sampler

__all__ = ["CoordinateMedian", "GeometricMedian", "NormClipping", "RobustAggregator", "TrimmedMean"]

_BLOCK = 2**14  # columns that are sorted at once: copies of them are all that a coordinate-wise rule needs besides


class NormClipping(Aggregator):
    r"""The weighted mean of messages whose norms are bounded.

    Sun et al., *Can You Really Backdoor Federated Learning?*, 2019 (https://arxiv.org/abs/1911.07963), Section 4.1:

    .. math::
        m \leftarrow \sum_i p_i \frac{m_i}{\max(1, \lVert m_i \rVert / M)}

    A bad client still moves the mean, by :math:`p_i M` at most. Messages are added up as they arrive, as for the plain
    mean.

    Args:
        max_norm: :math:`M > 0`. One number for methods that send a single message; for others a mapping with a number
            for each: the messages of ``reduces``, and ``full_grad_x`` for full-batch gradients at x.

    Raises:
        FederatedError: If a number is not positive and finite.

    Example:
        >>> NormClipping(max_norm={"delta": 1.0, "delta_c": 10.0})
        NormClipping(max_norm={'delta': 1.0, 'delta_c': 10.0})
    """

    def __init__(self, max_norm: float | dict[str, float]) -> None:
        owner = type(self).__name__
        self.max_norm: float | dict[str, float]
        if isinstance(max_norm, Mapping):
            self.max_norm = {
                name: check_number(owner, f"max_norm[{name!r}]", value, positive=True)
                for name, value in max_norm.items()
            }
        else:
            self.max_norm = check_number(owner, "max_norm", max_norm, positive=True)

    def for_run(self, algorithm: Algorithm, weighting: Weighting | None, sampler: Sampler) -> Aggregator:
        """Return the aggregator with a bound for every message of the method.

        Raises:
            FederatedError: If bounds are missing, or there are bounds for messages that the method does not send.
        """
        names = names_of(algorithm)
        given = {names[0]: self.max_norm} if not isinstance(self.max_norm, dict) else self.max_norm
        if set(given) != set(names):
            raise FederatedError(
                f"NormClipping(max_norm={self.max_norm!r}) must have a bound for each of {names}, which the clients of"
                f" {type(algorithm).__name__} send. Pass"
                f" max_norm={{{', '.join(f'{name!r}: ...' for name in names)}}}."
            )
        return super().for_run(algorithm, weighting, sampler)

    def of_round(
        self,
        reduces: Mapping[str, str],
        weighting: Weighting,
        cohort: Sequence[Participant],
        population: int,
        local_work: bool = True,
    ) -> Aggregation:
        """Return what clips the messages of a cohort and adds them up."""
        bounds = self.max_norm if isinstance(self.max_norm, dict) else dict.fromkeys(reduces, self.max_norm)
        return ClippedAggregation(bounds, reduces, weighting, cohort, population, local_work)


class ClippedAggregation(Aggregation):
    """Weighted sums of clipped messages.

    Args:
        bounds: The largest norm of each message.
        arguments: Those of :class:`Aggregation`.
    """

    sums_models = False

    def __init__(self, bounds: Mapping[str, float], *arguments: Any) -> None:
        super().__init__(*arguments)
        self.bounds = bounds

    def add(self, index: int, steps: int, send: State, model: Vector | None = None) -> None:
        """Add one client's messages, clipped; see :meth:`Aggregation.add`.

        Raises:
            ClientError: If a message is not finite.
        """
        self._check_names(send)
        super().add(index, steps, {name: self._clipped(name, value, index) for name, value in send.items()})

    def _clipped(self, name: str, value: Tensor, index: int) -> Tensor:
        value = value.detach().to(accumulation_dtype(value.device))
        norm = float(torch.linalg.vector_norm(value))
        if not math.isfinite(norm):
            raise not_finite(self._members[index], name)
        return value if norm <= self.bounds[name] else value * (self.bounds[name] / norm)


class RobustAggregator(Aggregator):
    """An aggregator that looks at all messages of a cohort at once.

    A subclass gives :meth:`combine`, and sets :attr:`weighted` if clients may count unequally. All messages are held
    until the end of the round, whatever the chunk. With several processes, each combines some of the columns.
    """

    @abstractmethod
    def combine(self, messages: Tensor, weights: Tensor, sum_: Callable[[Tensor], Tensor]) -> Tensor:
        """Return one message [P] for those of a cohort.

        Args:
            messages: The clients' messages [S, P] in their stored order; a process may see some of the columns only.
            weights: The clients' weights [S], which sum to one.
            sum_: Returns the sum of a tensor over the processes, which see different columns.
        """

    def of_round(
        self,
        reduces: Mapping[str, str],
        weighting: Weighting,
        cohort: Sequence[Participant],
        population: int,
        local_work: bool = True,
    ) -> Aggregation:
        """Return what holds the messages of a cohort and combines them."""
        return HeldAggregation(self.combine, self.weighted, reduces, weighting, cohort, population, local_work)


class CoordinateMedian(RobustAggregator):
    """The median of every coordinate.

    Yin et al., *Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates*, ICML 2018
    (https://arxiv.org/abs/1803.01498), Definition 1. It tolerates bad clients as long as they are fewer than half of
    the cohort. Clients count alike. Of an even number of values it is the mean of the two in the middle.

    Example:
        >>> import torch
        >>> messages = torch.tensor([[1.0, 0.0], [2.0, 5.0], [99.0, 6.0]])
        >>> CoordinateMedian().combine(messages, torch.full((3,), 1 / 3), lambda part: part)
        tensor([2., 5.])
    """

    weighted = False

    def combine(self, messages: Tensor, weights: Tensor, sum_: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the median [P]."""
        low, high = (len(messages) - 1) // 2, len(messages) // 2
        return _by_columns(messages, lambda ordered: (ordered[low] + ordered[high]) / 2)


class TrimmedMean(RobustAggregator):
    r"""The mean of every coordinate without its largest and smallest values.

    Yin et al., ICML 2018 (https://arxiv.org/abs/1803.01498), Definition 2. Of S values of a coordinate the
    :math:`\lfloor \beta S \rfloor` largest and as many of the smallest are left out, so as many bad clients do no harm.
    Clients count alike.

    Args:
        beta: The share left out at either end, in [0, 1/2). Choose it above the share of bad clients: among those drawn
            for a round there may be more than in the population. 0 is the mean.

    Raises:
        FederatedError: If the share is out of range.

    Example:
        >>> import torch
        >>> messages = torch.tensor([[0.0], [1.0], [3.0], [1e6]])
        >>> TrimmedMean(beta=0.25).combine(messages, torch.full((4,), 1 / 4), lambda part: part)
        tensor([2.], dtype=torch.float64)
    """

    weighted = False

    def __init__(self, beta: float) -> None:
        self.beta = check_number(type(self).__name__, "beta", beta, least=0.0)
        if self.beta >= 0.5:
            raise FederatedError(f"TrimmedMean(beta={beta!r}): beta must lie in [0, 0.5), such as 0.2.")

    def combine(self, messages: Tensor, weights: Tensor, sum_: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the trimmed mean [P]."""
        count, dtype = len(messages), accumulation_dtype(messages.device)
        out = math.floor(self.beta * count + 1e-9)  # 0.29 * 100 is a little less than 29
        return _by_columns(messages, lambda ordered: ordered[out : count - out].to(dtype).mean(dim=0))


class GeometricMedian(RobustAggregator):
    r"""The point with the smallest weighted sum of distances to the messages (RFA).

    Pillutla et al., *Robust Aggregation for Federated Learning*, IEEE Transactions on Signal Processing 2022
    (https://arxiv.org/abs/1912.13445), by the smoothed Weiszfeld algorithm (Algorithm 2) from the weighted mean:

    .. math::
        \beta_i \leftarrow \frac{p_i}{\max(\nu, \lVert z - m_i \rVert)}, \qquad
        z \leftarrow \frac{\sum_i \beta_i m_i}{\sum_i \beta_i}

    It tolerates bad clients as long as they have less than half of the weight. Clients are weighted by the run's
    ``weighting``. Clients report their own numbers of examples; ``weighting="uniform"`` does not depend on them.

    Args:
        iterations: The iterations, 3 in the paper. Each takes a part of the way: where bad messages are thousands of
            times as long as good ones, take 10 to 20.
        nu: The smoothing :math:`\nu > 0`.

    Raises:
        FederatedError: If a number is not positive.

    Example:
        >>> import torch
        >>> messages = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [100.0, 100.0]])
        >>> z = GeometricMedian(iterations=20).combine(messages, torch.full((5,), 1 / 5), lambda part: part)
        >>> bool((z < 1.1).all())
        True
    """

    def __init__(self, iterations: int = 3, nu: float = 1e-6) -> None:
        self.iterations = check_count(type(self).__name__, "iterations", iterations)
        self.nu = check_number(type(self).__name__, "nu", nu, positive=True)

    def combine(self, messages: Tensor, weights: Tensor, sum_: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the geometric median [P]."""
        weights = weights.to(device=messages.device, dtype=accumulation_dtype(messages.device))
        z = _weighted_mean(messages, weights)
        for _ in range(self.iterations):
            squares = torch.stack([((z - message) ** 2).sum() for message in messages])
            z = _weighted_mean(messages, weights / sum_(squares).sqrt().clamp(min=self.nu))
        return z


def _by_columns(messages: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what a function makes of the sorted values [S, p] of every coordinate, for blocks of columns."""
    return torch.cat([reduce(block.sort(dim=0).values) for block in messages.split(_BLOCK, dim=1)])


def _weighted_mean(messages: Tensor, weights: Tensor) -> Tensor:
    """Return the mean [P] of messages [S, P] by weights [S], row by row, so that there is no wider copy of them all."""
    total = torch.zeros_like(messages[0], dtype=weights.dtype)
    for message, weight in zip(messages, weights.tolist(), strict=True):
        total.add_(message, alpha=weight)
    return total / float(weights.sum())
