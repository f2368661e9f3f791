"""Dissimilarity of the clients' Hessians at one point, from Hessian-vector products."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_fed.core.arguments import check_count, check_number, check_numbers
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import Vector

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
    r"""Estimate the eigenvalue of largest absolute value of a symmetric operator by Lanczos' iteration.

    Every new basis vector is orthogonalized twice against all earlier ones (Golub & Van Loan, *Matrix Computations*,
    section 10.3), which avoids spurious copies of an eigenvalue; this stores at most ``max_iterations`` vectors.

    Args:
        product: The operator.
        start: The first basis vector [P], not 0; a random one has a part along every eigenvector.
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
        Each client's eigenvalue of largest absolute value of the difference from the mean.

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
