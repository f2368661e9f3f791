"""Dissimilarity of gradients and Hessians in a run, against closed forms and exact Hessians."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, hessian
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, FederatedError
from lightning_fed.callbacks import GradientDissimilarity, HessianDissimilarity
from lightning_fed.data import Quadratics
from lightning_fed.models import Quadratic
from tests.helpers.training import Net, clients, data, fit, parameters, seeded, trainer


def measure(callback: Any, model: Any, datamodule: Any, **kwargs: Any) -> dict[str, float]:
    """Return what is logged after one round, with full participation unless told otherwise."""
    run = trainer(callbacks=callback, **{"max_rounds": 1, "clients_per_round": 1.0, **kwargs})
    run.fit(model, datamodule)
    return {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.mark.parametrize(("a", "G"), [((2.0, 0.0), 10.0), ((3.0, 1.0), 4.0), ((5.0, 1.0, 2.0, 0.0), 1.0)])
def test_at_the_optimum_of_quadratics_the_measures_are_the_constants_of_the_problem(
    a: tuple[float, ...],
    G: float,  # noqa: N803
) -> None:
    problem = Quadratics(a=a, G=G)
    found = measure([GradientDissimilarity(), HessianDissimilarity()], Quadratic(x0=0.0), problem, local_steps=1)
    assert found["gradient/G2"] == pytest.approx(problem.G**2, rel=1e-12)
    assert found["gradient/mean_square"] == pytest.approx(problem.G**2, rel=1e-12)
    assert found["gradient/norm"] == pytest.approx(0, abs=1e-12)
    assert found["hessian/delta"] == pytest.approx(problem.delta, rel=1e-9)
    assert found["hessian/residual"] == pytest.approx(0, abs=1e-9)


def test_elsewhere_gradients_are_those_of_the_quadratics() -> None:
    model, callback = Quadratic(x0=3.0, lr=0.05), GradientDissimilarity()
    found = measure(callback, model, Quadratics(a=(3.0, 1.0), G=10.0), local_steps=2)
    x = model.x.item()
    g = torch.tensor([3 * x + 10, x - 10], dtype=torch.float64)
    assert found["gradient/G2"] == pytest.approx(float((g - g.mean()).square().mean()))
    assert found["gradient/B"] == pytest.approx(float(g.square().mean().sqrt() / g.mean().abs()))
    assert found["gradient/norm"] == pytest.approx(abs(2 * x))
    assert callback.last is not None
    assert callback.last.norm == pytest.approx(abs(2 * x))


def test_a_gradient_that_vanishes_has_no_finite_B_to_log() -> None:  # noqa: N802
    assert "gradient/B" not in measure(GradientDissimilarity(), Quadratic(x0=0.0), Quadratics(), local_steps=1)


def test_examples_as_weights_follow_the_sizes() -> None:
    rows = [torch.tensor([[3.0, 1.0]]).double().repeat(n, 1) * (i + 1) for i, n in enumerate((1, 4))]
    problem = FederatedDataModule(clients=[TensorDataset(r[:, 0], r[:, 1]) for r in rows])
    model = Quadratic(x0=1.0, lr=0.01)
    found = measure(
        [GradientDissimilarity(weighting="examples"), HessianDissimilarity(weighting="examples")],
        model, problem, local_steps=1,
    )  # fmt: skip
    g = 3 * model.x.item() + 1  # the clients' gradients are g and 2 g, their Hessians 3 and 6
    assert found["gradient/norm"] == pytest.approx(abs((1 * g + 4 * 2 * g) / 5), rel=1e-6)
    assert found["hessian/delta"] == pytest.approx(4 / 5 * 3, rel=1e-6)
    assert found["hessian/delta_mean"] == pytest.approx((4 / 5 * 3 + 1 / 5 * 3) / 2, rel=1e-6)


def exact_hessians(model: Net, datasets: list[TensorDataset], decay: float) -> list[Tensor]:
    names, x = list(dict(model.named_parameters())), parameters(model).double()
    shapes = [p.shape for p in model.parameters()]
    net = nn.Sequential()
    net.body, net.head = model.body.double(), model.head.double()
    net.forward = lambda inputs: net.head(net.body(inputs))  # type: ignore[method-assign]

    def loss(flat: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        parts = flat.split([s.numel() for s in shapes])
        named = {n: p.view(s) for n, p, s in zip(names, parts, shapes, strict=True)}
        return F.cross_entropy(functional_call(net, named, (inputs,)), labels) + decay / 2 * flat.square().sum()

    return [hessian(loss)(x, d.tensors[0].double(), d.tensors[1]) for d in datasets]


@pytest.mark.thorough
def test_hessian_dissimilarity_of_a_network_is_that_of_its_exact_hessians() -> None:
    model, sizes = seeded(dropout=0.0), (13, 8, 21)
    callback = HessianDissimilarity(tolerance=1e-4, max_iterations=100)
    found = measure(callback, model, data(sizes, full_batch_size=5), local_epochs=2)
    exact = exact_hessians(model, clients(sizes), decay=0.0)
    mean = torch.stack(exact).mean(0)
    norms = [float(torch.linalg.matrix_norm(h - mean, 2)) for h in exact]
    assert [abs(value) for value in callback.delta.values()] == pytest.approx(norms, rel=1e-3)
    assert found["hessian/delta"] == pytest.approx(max(norms), rel=1e-3)
    assert found["hessian/delta_mean"] == pytest.approx(sum(norms) / 3, rel=1e-3)
    assert found["hessian/residual"] < 1e-3 * max(norms)


def test_products_are_those_of_the_exact_hessian_with_coupled_decay() -> None:
    model, sizes = seeded(dropout=0.0, weight_decay=0.5), (13, 8)
    products: list[Tensor] = []

    class Multiply(GradientDissimilarity):
        def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
            loop = trainer.fit_loop
            basis = torch.eye(len(loop.state.x))[::9]
            products.extend(torch.stack([loop.hessian_vector(i, loop.state.x, v) for v in basis]) for i in range(2))

    measure(Multiply(), model, data(sizes, full_batch_size=4))
    exact = exact_hessians(model, clients(sizes), decay=0.5)
    for product, h in zip(products, exact, strict=True):
        assert torch.allclose(product.double(), h[::9], atol=1e-5)


def test_products_are_derivatives_of_the_full_gradient_with_its_dropout_masks() -> None:
    errors: list[float] = []

    class Differentiate(GradientDissimilarity):
        def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
            loop = trainer.fit_loop
            x, v = loop.state.x, torch.ones_like(loop.state.x)
            torch.rand(3)  # the state of the global generators is not the masks'
            product = loop.hessian_vector(1, x, v)
            ahead, behind = (loop.full_gradient(1, x + h * v) for h in (1e-5, -1e-5))
            errors.append(float((product - (ahead - behind) / 2e-5).norm() / product.norm()))

    rows = [TensorDataset(d.tensors[0].double(), d.tensors[1]) for d in clients((13, 8))]
    problem = FederatedDataModule(clients=rows, batch_size=4, full_batch_size=3)
    measure(Differentiate(), seeded(dropout=0.5), problem, precision="64-true")
    assert errors[0] < 1e-8


def test_the_dropout_masks_are_the_same_for_every_product() -> None:
    found = measure(HessianDissimilarity(max_iterations=60), seeded(dropout=0.5), data((13, 8)))
    assert found["hessian/residual"] <= 1e-2 * found["hessian/delta"]


def test_a_sample_is_fixed_by_the_seed_and_its_mean_is_the_samples() -> None:
    one, other = GradientDissimilarity(clients=3), HessianDissimilarity(clients=3, max_iterations=1)
    rounds: list[list[Any]] = []

    class Watch(GradientDissimilarity):
        def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
            rounds.append(list(one.measured))

    fit(callbacks=[one, other, Watch()], max_rounds=2)
    assert rounds[0] == rounds[1] == other.measured
    assert len(set(one.measured)) == 3
    drawn = set()
    for seed in range(3):
        callback = GradientDissimilarity(clients=3)
        fit(callbacks=callback, max_rounds=1, seed=seed)
        drawn.add(tuple(callback.measured))
    assert len(drawn) > 1


def test_it_measures_every_n_rounds_only() -> None:
    seen: list[int] = []

    class Count(GradientDissimilarity):
        def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
            self.last = None
            super().on_round_end(trainer, pl_module, round_report)
            if self.last is not None:
                seen.append(trainer.fit_loop.round)

    fit(callbacks=Count(every_n_rounds=2), max_rounds=4)
    assert seen == [2, 4]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (partial(GradientDissimilarity, every_n_rounds=0), "every_n_rounds"),
        (partial(GradientDissimilarity, every_n_rounds=True), "every_n_rounds"),
        (partial(GradientDissimilarity, clients=0), "clients"),
        (partial(GradientDissimilarity, weighting="sizes"), "weighting"),
        (partial(HessianDissimilarity, tolerance=1.0), "tolerance"),
        (partial(HessianDissimilarity, max_iterations=0), "max_iterations"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(make: Any, words: str) -> None:
    with pytest.raises(FederatedError, match=words):
        make()


def test_more_clients_than_there_are_are_refused_before_the_first_round() -> None:
    with pytest.raises(FederatedError, match=r"clients=7.*the 6 non-empty"):
        fit(callbacks=GradientDissimilarity(clients=7))


def test_many_hessians_are_announced() -> None:
    with pytest.warns(UserWarning, match=r"31 clients, which takes up to 961 "):
        fit(datamodule=data([2] * 31), callbacks=HessianDissimilarity(99, max_iterations=1), max_rounds=1)


def test_a_gradient_scaler_is_refused() -> None:
    class Scales(HessianDissimilarity):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.precision_plugin.scaler = object()
            super().on_train_start(trainer, pl_module)

    with pytest.raises(FederatedError, match="16-mixed"):
        fit(callbacks=Scales())


def test_a_model_without_second_derivatives_is_refused_by_name() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g.clone()

    class Rough(Net):
        def forward(self, x: Tensor) -> Tensor:
            return Once.apply(super().forward(x))

    with pytest.raises(FederatedError, match="Rough cannot be differentiated twice"):
        fit(seeded(Rough), callbacks=HessianDissimilarity())


def test_a_linear_loss_has_no_curvature() -> None:
    class Linear(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.head.bias.sum() * batch[0].mean()

    assert measure(HessianDissimilarity(), seeded(Linear), data((5, 6)))["hessian/delta"] == 0
