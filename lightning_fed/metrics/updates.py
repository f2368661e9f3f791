"""How far clients pull in different directions."""

import math

import torch

from lightning_fed.core.types import Vector

__all__ = ["PairwiseCosine"]


class PairwiseCosine:
    r"""The mean cosine over all pairs of different vectors, in the memory of one vector.

    With the unit vectors :math:`u_1, \dots, u_S` it is

    .. math:: \frac{\|\sum_i u_i\|^2 - S}{S (S - 1)}

    which lies between :math:`-1 / (S - 1)` and 1. A vector of length 0 has no direction and is left out.

    Example:
        >>> cosine = PairwiseCosine()
        >>> for vector in (torch.tensor([2.0, 0.0]), torch.tensor([0.0, 5.0]), torch.tensor([-1.0, 0.0])):
        ...     cosine.add(vector)
        >>> round(cosine.value(), 6)  # 0, 0 and -1
        -0.333333
    """

    def __init__(self) -> None:
        self.count = 0
        self._sum: Vector | None = None

    def add(self, vector: Vector) -> None:
        """Add one vector [P]."""
        norm = torch.linalg.vector_norm(vector)
        if norm == 0:
            return
        unit = (vector / norm).to(torch.float64 if vector.device.type != "mps" else torch.float32)
        self._sum = unit if self._sum is None else self._sum + unit
        self.count += 1

    def merge(self, other: "PairwiseCosine") -> None:
        """Add all vectors that were added to another one."""
        if other._sum is not None:
            self._sum = other._sum if self._sum is None else self._sum + other._sum.to(self._sum.device)
            self.count += other.count

    def value(self) -> float:
        """Return the mean; nan for fewer than two vectors."""
        if self._sum is None or self.count < 2:
            return math.nan
        return (float(self._sum.dot(self._sum)) - self.count) / (self.count * (self.count - 1))
