"""Lanczos' iteration against exact eigenvalues, and Hessian dissimilarity against exact Hessians."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, hessian

from lightning_fed import FederatedError
from lightning_fed.metrics import extreme_eigenvalue, hessian_dissimilarity


def symmetric(dim: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    m = torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (m + m.T).to(dtype)


def start(dim: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def largest(matrix: Tensor) -> float:
    values = torch.linalg.eigvalsh(matrix.double())
    return float(values[values.abs().argmax()])


@pytest.mark.parametrize(("dtype", "rel"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_eigenvalue_of_largest_absolute_value_is_found(seed: int, dtype: torch.dtype, rel: float) -> None:
    m = symmetric(40, seed, dtype)
    found = extreme_eigenvalue(m.mv, start(40, dtype), tolerance=1e-6, max_iterations=40)
    assert found.value == pytest.approx(largest(m), rel=rel)


def test_lanczos_needs_far_fewer_products_than_dimensions() -> None:
    m = symmetric(500, 0)
    found = extreme_eigenvalue(m.mv, start(500), tolerance=1e-3, max_iterations=500)
    assert found.value == pytest.approx(largest(m), rel=1e-3)
    assert found.iterations < 100


@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 10**6))
def test_eigenvalue_estimate_is_bounded_by_truth_and_residual(dim: int, iterations: int, seed: int) -> None:
    m = symmetric(dim, seed)
    values = torch.linalg.eigvalsh(m)
    found = extreme_eigenvalue(m.mv, start(dim), tolerance=0, max_iterations=iterations)
    assert abs(found.value) <= float(values.abs().max()) * (1 + 1e-9)
    assert float((values - found.value).abs().min()) <= found.residual + 1e-9
    assert found.iterations <= min(dim, iterations)


@pytest.mark.parametrize("scale", [0.0, -3.0])
def test_invariant_subspace_ends_the_iteration(scale: float) -> None:
    found = extreme_eigenvalue(lambda v: scale * v, start(10), tolerance=0)
    assert (found.value, found.iterations) == (pytest.approx(scale), 1)


def test_iterations_equal_the_number_of_distinct_eigenvalues() -> None:
    diagonal = torch.tensor([2.0, 2.0, -7.0, 0.0, 0.0, 2.0], dtype=torch.float64)
    found = extreme_eigenvalue(lambda v: diagonal * v, start(6), tolerance=1e-9)
    assert found.value == pytest.approx(-7)
    assert found.iterations == 3


def test_non_finite_product_is_rejected() -> None:
    with pytest.raises(FederatedError, match="not finite"):
        extreme_eigenvalue(lambda v: v / 0, start(3))


@pytest.mark.parametrize("weights", [None, [1.0, 5.0, 2.0]])
def test_dissimilarity_is_spectral_norm_of_difference_from_mean(weights: list[float] | None) -> None:
    matrices = [symmetric(12, seed) for seed in range(3)]
    share = torch.tensor(weights or [1.0, 1.0, 1.0], dtype=torch.float64)
    mean = sum(w * m for w, m in zip(share / share.sum(), matrices, strict=True))
    found = hessian_dissimilarity([m.mv for m in matrices], start(12), weights, tolerance=1e-9)
    assert [e.value for e in found] == pytest.approx([largest(m - mean) for m in matrices])


@pytest.mark.thorough
def test_dissimilarity_matches_exact_hessians_of_a_small_network() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    names, shapes = list(dict(net.named_parameters())), [p.shape for p in net.parameters()]
    x = torch.cat([p.detach().reshape(-1) for p in net.parameters()])

    def loss(inputs: Tensor, labels: Tensor, flat: Tensor) -> Tensor:
        parts = flat.split([s.numel() for s in shapes])
        named = {n: p.view(s) for n, p, s in zip(names, parts, shapes, strict=True)}
        return nn.functional.cross_entropy(functional_call(net, named, (inputs,)), labels)

    def product(f: partial[Tensor], v: Tensor) -> Tensor:
        at = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(f(at), at, create_graph=True)
        return torch.autograd.grad(g.dot(v), at)[0]

    losses = [partial(loss, 3 * torch.randn(9, 3, dtype=torch.float64), torch.randint(2, (9,))) for _ in range(3)]
    exact = [hessian(f)(x) for f in losses]
    mean = torch.stack(exact).mean(0)
    found = hessian_dissimilarity([partial(product, f) for f in losses], start(len(x)), tolerance=1e-8)
    assert [e.value for e in found] == pytest.approx([largest(h - mean) for h in exact], rel=1e-6)
