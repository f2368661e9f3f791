"""Dissimilarity of the clients' gradients and Hessians at one point, and the alignment of their updates."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_fed.core.arguments import check_count, check_number, check_numbers
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

        If all gradients are 0, it is 1: the exception in Definition 3.
        """
        if self.mean_square == 0:
            return 1.0
        return math.sqrt(self.mean_square) / self.norm if self.norm else math.inf


def gradient_dissimilarity(gradients: Iterable[tuple[Vector, float]]) -> GradientDissimilarities:
    r"""Measure the dissimilarity of the clients' gradients at one point, in one pass and the memory of two vectors.

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

    which lies between :math:`-1 / (S - 1)` and 1. Zero vectors have no direction and are skipped.

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


Product: TypeAlias = Callable[[Vector], Vector]
"""A symmetric operator: from v [P] to H v [P]."""


@dataclass(frozen=True, slots=True)
class Eigenvalue:
    r"""An estimate of the eigenvalue of largest absolute value.

    Attributes:
        value: The Ritz value, with its sign. Up to rounding, its absolute value does not exceed the true one.
        residual: :math:`\|H u - \text{value} \cdot u\|` for the unit Ritz vector u: an eigenvalue lies this close.
        iterations: The number of products.
    """

    value: float
    residual: float
    iterations: int


def extreme_eigenvalue(
    product: Product, start: Vector, tolerance: float = 1e-3, max_iterations: int = 50
) -> Eigenvalue:
    r"""Estimate the eigenvalue of largest absolute value of a symmetric operator by Lanczos iteration.

    Every new basis vector is orthogonalized twice against all earlier ones (Golub & Van Loan, *Matrix Computations*,
    section 10.3), which avoids spurious copies of an eigenvalue; this stores at most ``max_iterations`` vectors.

    Args:
        product: The operator.
        start: The first basis vector [P], not 0; a random one has a component along every eigenvector.
        tolerance: Stop when the residual is at most this share of the value.
        max_iterations: The largest number of products.

    Raises:
        FederatedError: If an argument is not allowed, or a product is not finite.

    Example:
        >>> diagonal = torch.tensor([1.0, -5.0, 3.0])
        >>> round(
        ...     extreme_eigenvalue(
        ...         lambda v: diagonal * v, start=torch.ones(3)
        ...     ).value,
        ...     4,
        ... )
        -5.0
    """
    _check("extreme_eigenvalue", [product], start, tolerance, max_iterations)
    basis = [start / torch.linalg.vector_norm(start)]
    alphas: list[float] = []
    betas: list[float] = []
    while True:
        w = product(basis[-1])
        scale = float(torch.linalg.vector_norm(w))
        if not scale < float("inf"):
            raise FederatedError("A Hessian-vector product is not finite: the model has diverged, or is not smooth.")
        alphas.append(float(w.dot(basis[-1])))
        for _ in range(2):
            for q in basis:
                w = w - w.dot(q) * q
        beta = float(torch.linalg.vector_norm(w))
        off = torch.tensor(betas, dtype=torch.float64)
        tridiagonal = torch.diag(torch.tensor(alphas, dtype=torch.float64)) + torch.diag(off, 1) + torch.diag(off, -1)
        values, vectors = torch.linalg.eigh(tridiagonal)
        k = int(values.abs().argmax())
        value, residual = float(values[k]), abs(beta * float(vectors[-1, k]))
        spent = len(alphas) >= min(max_iterations, len(start))
        if spent or residual <= tolerance * abs(value) or beta <= scale * torch.finfo(w.dtype).eps:
            return Eigenvalue(value, residual, len(alphas))
        betas.append(beta)
        basis.append(w / beta)


def hessian_dissimilarity(
    products: Sequence[Product],
    start: Vector,
    weights: Sequence[float] | None = None,
    tolerance: float = 1e-3,
    max_iterations: int = 50,
) -> list[Eigenvalue]:
    r"""Measure the distance of each client's Hessian from the weighted mean, in the spectral norm.

    The largest of the values, in absolute value, is the :math:`\delta` of assumption (A2) of SCAFFOLD (Karimireddy et
    al., 2020, https://arxiv.org/abs/1910.06378) at this point: :math:`\|\nabla^2 f_i(x) - \nabla^2 f(x)\| \le \delta`.
    Mime (https://arxiv.org/abs/2008.03606) assumes the same of the loss of every single example.

    Each iteration for each client needs the products of all N clients: :math:`N^2` times the iterations in total.

    Args:
        products: Each client's Hessian as an operator.
        start: The first vector of every iteration [P].
        weights: The clients' shares of the mean, up to a factor; uniform by default.
        tolerance: As for :func:`extreme_eigenvalue`.
        max_iterations: As for :func:`extreme_eigenvalue`.

    Returns:
        For each client, the eigenvalue of largest absolute value of its difference from the mean.

    Raises:
        FederatedError: If an argument is not allowed, or a product is not finite.

    Example:
        >>> [
        ...     e.value
        ...     for e in hessian_dissimilarity(
        ...         [lambda v: 3 * v, lambda v: 1 * v], start=torch.ones(1)
        ...     )
        ... ]
        [1.0, -1.0]
    """
    _check("hessian_dissimilarity", products, start, tolerance, max_iterations)
    given = [1.0] * len(products) if weights is None else check_numbers("hessian_dissimilarity", "weights", weights)
    if len(given) != len(products) or min(given) < 0 or not any(given):
        raise FederatedError(
            f"hessian_dissimilarity(weights={weights!r}): weights must be {len(products)} numbers, one for each client,"
            " none of them negative and not all zero."
        )
    shares = torch.tensor(given, dtype=torch.float64)
    shares = shares / shares.sum()

    def difference(i: int, v: Vector) -> Tensor:
        out = torch.zeros_like(v)
        for j, (product, share) in enumerate(zip(products, shares.tolist(), strict=True)):
            out.add_(product(v), alpha=float(i == j) - share)
        return out

    return [
        extreme_eigenvalue(lambda v, i=i: difference(i, v), start, tolerance, max_iterations)  # type: ignore[misc]
        for i in range(len(products))
    ]


def _check(owner: str, products: Sequence[Product], start: Vector, tolerance: float, max_iterations: int) -> None:
    """Raise if the arguments do not allow a first iteration."""
    what = "product" if owner == "extreme_eigenvalue" else "products"
    if not isinstance(products, Sequence) or not products or not all(callable(product) for product in products):
        raise FederatedError(f"{owner}({what}=...) got {products!r}: {what} must map a vector [P] to a vector [P].")
    if not isinstance(start, Tensor) or start.ndim != 1 or not start.is_floating_point() or not bool(start.any()):
        raise FederatedError(
            f"{owner}(start=...) got {start!r}: start must be a vector [P] of real numbers, not all 0."
        )
    check_number(owner, "tolerance", tolerance, "[0, 1)")
    check_count(owner, "max_iterations", max_iterations)
