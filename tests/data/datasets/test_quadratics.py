"""Quadratics and least squares: the optimum and the dissimilarities are as documented."""

import pytest
import torch

from lightning_fed.algorithms import FedAvg, Scaffold
from lightning_fed.core.errors import FederatedError
from lightning_fed.data import LeastSquares, Quadratics
from lightning_fed.models import LinearRegression, Quadratic
from tests.helpers.training import fit


def tensors(data):
    return [data.client_dataset(i).tensors for i in data.client_ids]


def gradient(data, w):
    """Return the gradient of the mean of a least-squares problem's client losses."""
    return torch.stack([x.T @ (x @ w - y[:, 0]) / len(y) for x, y in tensors(data)]).mean(0)


@pytest.mark.parametrize(("a", "delta"), [((2.0, 0.0), 1.0), ((3.0, 1.0), 1.0), ((4.0, 1.0, 0.0, -1.0), 3.0)])
def test_optimum_and_dissimilarities_match_their_definitions(a, delta):
    data = Quadratics(a=a, G=10.0, rows=4, noise=3.0)
    means = torch.stack([torch.stack(rows).mean(1) for rows in tensors(data)])
    assert means[:, 0].tolist() == list(a)
    gradients = means[:, 0] * data.optimum + means[:, 1]
    assert gradients.mean() == 0
    assert gradients.square().mean().sqrt() == data.G == 10
    assert (means[:, 0] - means[:, 0].mean()).abs().max() == data.delta == delta


def test_rows_are_float64_and_exact_without_noise():
    rows = tensors(Quadratics(rows=3))
    assert [[t.tolist() for t in client] for client in rows] == [[[2.0] * 3, [10.0] * 3], [[0.0] * 3, [-10.0] * 3]]
    assert {t.dtype for client in rows for t in client} == {torch.float64}


def test_several_dimensions_keep_the_same_dissimilarities():
    data = Quadratics(a=[[1.0, 0.3], [1.0, -0.1]], G=2.0, rows=2, noise=1.0)
    assert data.delta == pytest.approx(0.2)
    for (a, b), row, mean in zip(tensors(data), ([1.0, 0.3], [1.0, -0.1]), (2.0, -2.0), strict=True):
        assert a.tolist() == [row, row]
        assert b.mean(0).norm() == pytest.approx(data.G)
        assert torch.allclose(b.mean(0) * 2**0.5, torch.tensor(mean, dtype=torch.float64))
        assert (b - b.mean(0)).norm(dim=1).tolist() == pytest.approx([data.noise] * 2)


def test_each_dimension_is_an_independent_quadratic():
    options = {"algorithm": Scaffold(), "local_steps": 3, "max_rounds": 4, "clients_per_round": 2}
    both = fit(Quadratic(x0=[1.0, -2.0], lr=0.1), Quadratics(a=[[2.0, 3.0], [0.0, 1.0]], G=2.0), **options)
    for x, x0, a in zip(both, (1.0, -2.0), ((2.0, 0.0), (3.0, 1.0)), strict=True):
        assert x.item() == pytest.approx(fit(Quadratic(x0=x0, lr=0.1), Quadratics(a, G=2**0.5), **options).item())


def test_noise_is_the_standard_deviation_of_a_row_gradient():
    for (_, b), mean in zip(tensors(Quadratics(G=5.0, rows=6, noise=2.0)), (5.0, -5.0), strict=True):
        assert (b.mean(), b.std(correction=0)) == (mean, 2)


def test_batches_hold_all_rows_by_default():
    assert Quadratics(rows=6).client_batches(0).num_batches() == 1
    assert Quadratics(rows=6, batch_size=2).client_batches(0).num_batches() == 3
    assert LeastSquares(samples=7).client_batches(0).num_batches() == 1
    assert LeastSquares(samples=7, batch_size=2).client_batches(0).num_batches() == 4


def test_round_matches_a_hand_computation():
    # 1 -> 1 - 0.1 (2 + 10) = -0.2 -> -0.2 - 0.1 (-0.4 + 10) = -1.16, and 1 -> 2 -> 3: the mean is 0.92
    options = {"local_steps": 2, "max_rounds": 1, "clients_per_round": 2}
    x = fit(Quadratic(x0=1.0, lr=0.1), Quadratics(), algorithm=FedAvg(), **options)
    assert x.dtype == torch.float64
    assert x.item() == pytest.approx(0.92, rel=1e-14)


@pytest.mark.thorough
def test_only_scaffold_reaches_the_optimum_at_zero():
    options = {"local_steps": 5, "max_rounds": 60, "clients_per_round": 2}
    ours, theirs = (
        fit(Quadratic(lr=0.1), Quadratics(a=(3.0, 1.0)), algorithm=algorithm, **options).item()
        for algorithm in (Scaffold(), FedAvg())
    )
    assert abs(ours) < 1e-10
    # The fixed point of the mean of two maps x -> q x - (1 - q) b / a, where q = (1 - 0.1 a)^5.
    q = [(1 - 0.1 * a) ** 5 for a in (3.0, 1.0)]
    assert theirs == pytest.approx((-(1 - q[0]) * 10 / 3 + (1 - q[1]) * 10) / (2 - q[0] - q[1]), rel=1e-10)


@pytest.mark.parametrize("options", [{}, {"num_clients": 3, "dim": 8, "samples": 4, "dissimilarity": 5.0}])
def test_gradient_vanishes_at_the_least_squares_optimum(options):
    data = LeastSquares(**options)
    assert data.optimum.dtype == torch.float64
    assert gradient(data, data.optimum).abs().max() < 1e-12
    assert gradient(data, torch.zeros_like(data.optimum)).abs().max() > 0.1


def test_dissimilar_clients_have_their_own_optima_and_hessians():
    spreads = []
    for d in (0.0, 1.0, 4.0):
        own = LeastSquares(num_clients=20, samples=200, dissimilarity=d, noise=0.0)
        optima = torch.stack([torch.linalg.lstsq(x, y).solution[:, 0] for x, y in tensors(own)])
        scales = torch.stack([x.square().mean(0).sqrt() for x, _ in tensors(own)])
        spreads.append((optima.std(0).mean().item(), scales.std(0).mean().item()))
    optimum, scale = zip(*spreads, strict=True)
    assert optimum == pytest.approx((0, 1, 4), rel=0.2, abs=1e-12)
    # sampling alone gives 1 / sqrt(2 * 200) = 0.05; a uniform law on [1 / (1 + d), 1] has d / (1 + d) / sqrt(12)
    assert scale[0] == pytest.approx(0.05, abs=0.015)
    assert scale[1:] == pytest.approx((0.5 / 12**0.5, 0.8 / 12**0.5), rel=0.25)


def test_noise_is_added_to_the_targets():
    clean, noisy = (torch.cat([y for _, y in tensors(LeastSquares(samples=100, noise=s))]) for s in (0.0, 0.5))
    assert (noisy - clean).std().item() == pytest.approx(0.5, rel=0.1)


def test_client_depends_only_on_the_seed_and_its_number():
    first = tensors(LeastSquares(num_clients=4))
    for other, same in ((LeastSquares(num_clients=2), True), (LeastSquares(num_clients=2, seed=1), False)):
        for ours, theirs in zip(first[:2], tensors(other), strict=True):
            assert [torch.equal(*pair) for pair in zip(ours, theirs, strict=True)] == [same, same]


def test_validation_and_test_use_all_clients_together():
    for data in (Quadratics(rows=2, noise=1.0), LeastSquares()):
        for dataset in (data.val, data.test):
            for i, column in enumerate(dataset.tensors):
                assert torch.equal(column, torch.cat([client[i] for client in tensors(data)]))


@pytest.mark.thorough
def test_only_scaffold_reaches_the_least_squares_optimum():
    data = LeastSquares(num_clients=3, dim=2)
    distances = []
    for algorithm, max_rounds in ((Scaffold(), 34), (FedAvg(), 10)):
        model = LinearRegression(2, lr=0.5, bias=False)
        options = {"local_steps": 4, "max_rounds": max_rounds, "clients_per_round": 3, "precision": "64-true"}
        distances.append((fit(model, data, algorithm=algorithm, **options) - data.optimum).norm().item())
    assert distances[0] < 1e-10
    assert distances[1] > 0.01


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Quadratics, {"a": (1.0, 2.0, 3.0)}, "even number of second derivatives"),
        (Quadratics, {"a": ()}, "even number of second derivatives"),
        (Quadratics, {"a": (1.0, -1.0)}, "must be positive"),
        (Quadratics, {"a": ((1.0, 2.0), (1.0, -2.0))}, "must be positive, in each coordinate"),
        (Quadratics, {"a": ((1.0, 2.0), (1.0,))}, "equally many for each client"),
        (Quadratics, {"a": ((1.0, 2.0), 1.0)}, "a must be a finite number"),
        (Quadratics, {"a": (float("inf"), 1.0)}, "a=inf"),
        (Quadratics, {"G": -1.0}, "G=-1.0"),
        (Quadratics, {"noise": 1.0}, "noise needs an even number of rows"),
        (Quadratics, {"rows": 0}, "rows=0"),
        (LeastSquares, {"num_clients": 2, "dim": 9, "samples": 4}, "8 examples leave the optimum open"),
        (LeastSquares, {"dissimilarity": -0.5}, "dissimilarity=-0.5"),
        (LeastSquares, {"noise": "much"}, "noise='much'"),
        (LeastSquares, {"batch_size": 0}, "batch_size=0"),
    ],
)
def test_invalid_options_are_rejected(make, options, message):
    with pytest.raises(FederatedError, match=message):
        make(**options)
