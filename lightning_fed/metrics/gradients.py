"""Dissimilarity of the clients' gradients at one point, and the alignment of their updates."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from lightning_fed.core.devices import widened
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import Vector


@dataclass(frozen=True, slots=True)
class GradientDissimilarities:
    r"""The dissimilarity of gradients :math:`g_i` from their weighted mean :math:`g`.

    Attributes:
        G2: :math:`\mathbb{E}_i \|g_i - g\|^2`: the :math:`G^2` of Mime's assumption (A1) at this point, and FedProx's
            variance of local gradients.
        mean_square: :math:`\mathbb{E}_i \|g_i\|^2`, which SCAFFOLD's assumption (A1) bounds by
            :math:`G^2 + B^2 \|g\|^2`.
        norm: :math:`\|g\|`.
    """

    G2: float
    mean_square: float
    norm: float

    @property
    def B(self) -> float:  # noqa: N802
        r"""FedProx's B, :math:`\sqrt{\mathbb{E}_i \|g_i\|^2 / \|g\|^2}`; 1 if all agree, infinite if g is 0.

        If all gradients are 0 it is 1, the exception in Definition 3.
        """
        if self.mean_square == 0:
            return 1.0
        return math.sqrt(self.mean_square) / self.norm if self.norm else math.inf


def gradient_dissimilarity(gradients: Iterable[tuple[Vector, float]]) -> GradientDissimilarities:
    r"""Measure the dissimilarity of the clients' gradients at one point, in one pass and two vectors' memory.

    - Karimireddy et al., *Mime* (https://arxiv.org/abs/2008.03606), assumption (A1):
      :math:`\mathbb{E}_i \|\nabla f_i(x) - \nabla f(x)\|^2 \le G^2`.
    - Karimireddy et al., *SCAFFOLD* (https://arxiv.org/abs/1910.06378), assumption (A1):
      :math:`\frac1N \sum_i \|\nabla f_i(x)\|^2 \le G^2 + B^2 \|\nabla f(x)\|^2`.
    - Li et al., *FedProx* (https://arxiv.org/abs/1812.06127), Definition 3:
      :math:`B(x) = \sqrt{\mathbb{E}_i \|\nabla F_i(x)\|^2 / \|\nabla f(x)\|^2}`.

    The mean is updated client by client (West, 1979), which avoids cancellation if gradients nearly agree.

    Args:
        gradients: Pairs of a client's gradient [P] and its weight; the weights need not sum to one.

    Raises:
        FederatedError: If there is no gradient with positive weight.

    Example:
        >>> measured = gradient_dissimilarity(
        ...     [(torch.tensor([3.0, 0.0]), 1), (torch.tensor([1.0, 2.0]), 1)]
        ... )
        >>> measured.G2, measured.mean_square, round(measured.B ** 2, 6)
        (2.0, 7.0, 1.4)
    """
    mean, total, spread, squares = torch.zeros(()), 0.0, 0.0, 0.0
    if not isinstance(gradients, Iterable):
        raise FederatedError(
            f"gradient_dissimilarity(gradients={gradients!r}): gradients must be an iterable of pairs."
        )
    for pair in gradients:
        known = isinstance(pair, tuple | list) and len(pair) == 2
        if not known or not isinstance(pair[0], Tensor) or pair[0].ndim != 1 or not isinstance(pair[1], Real):
            raise FederatedError(
                f"gradient_dissimilarity(gradients=...) got {pair!r}: gradients must be pairs of a vector [P] and a"
                " weight."
            )
        gradient, weight = pair[0], float(pair[1])
        if weight <= 0:
            continue
        wide = widened(gradient)
        change = wide - mean
        total += weight
        spread += weight * (1 - weight / total) * float(change.dot(change))
        squares += weight * float(wide.dot(wide))
        mean = mean + change * (weight / total)
    if total == 0:
        raise FederatedError(
            "gradient_dissimilarity(gradients=...) got no gradient of positive weight: there is nothing to compare."
        )
    return GradientDissimilarities(spread / total, squares / total, float(torch.linalg.vector_norm(mean)))


class PairwiseCosine:
    r"""The mean cosine over all pairs of different vectors, in the memory of one vector.

    With the unit vectors :math:`u_1, \dots, u_S` it is

    .. math:: \frac{\|\sum_i u_i\|^2 - S}{S (S - 1)}

    which lies between :math:`-1 / (S - 1)` and 1. Vectors of length 0 have no direction and are left out.

    Example:
        >>> cosine = PairwiseCosine()
        >>> for entries in ([2.0, 0.0], [0.0, 5.0], [-1.0, 0.0]):
        ...     cosine.add(torch.tensor(entries))
        >>> round(cosine.value(), 6)  # 0, 0 and -1
        -0.333333
    """

    def __init__(self) -> None:
        self.count = 0
        self._sum: Vector = torch.zeros(())

    def add(self, vector: Vector) -> None:
        """Add one vector [P]."""
        norm = torch.linalg.vector_norm(vector)
        if norm != 0:
            unit = widened(vector / norm)
            self._sum = self._sum + unit
            self.count += 1

    def merge(self, other: "PairwiseCosine") -> None:
        """Add all vectors of another instance."""
        self._sum = self._sum + other._sum.to(self._sum.device) if self.count else other._sum
        self.count += other.count

    def value(self) -> float:
        """Return the mean; nan for fewer than two vectors."""
        if self.count < 2:
            return math.nan
        return (float(self._sum.dot(self._sum)) - self.count) / (self.count * (self.count - 1))
