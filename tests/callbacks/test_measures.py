"""Measures match their definitions, on the requested clients and in the requested rounds."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, hessian
from torch.utils.data import TensorDataset
from torchmetrics import SumMetric

from lightning_fed import FederatedCallback, FederatedDataModule, FederatedError
from lightning_fed.algorithms import FedAvg, FedDyn, Scaffold
from lightning_fed.callbacks import (
    ControlVariateError,
    GradientDissimilarity,
    HessianDissimilarity,
    Inexactness,
    TrainingLoss,
    UpdateCosine,
)
from lightning_fed.data import Quadratics
from lightning_fed.models import Quadratic
from tests.helpers.training import Net, clients, data, fit, parameters, seeded, trainer

# Training loss


class WithDropout(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.5, self.training))


class Remembers(Net):
    """Adds its mode, and the counts of its buffer and metric, to the loss. Draws random numbers in eval mode, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.steps = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) + float(self.training)
        self.count += 1
        self.steps.update(1.0)
        self.train()
        return loss + self.count + self.steps.compute() + torch.rand(())


class LossesInTwoOrders(FederatedCallback):
    """Measures all clients at once, in two orders, and each one alone."""

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        loop, ids = trainer.fit_loop, [0, 1, 2]
        self.all = loop.training_losses(ids)
        self.backwards = loop.training_losses(ids[::-1])
        self.alone = {i: loop.training_loss(i) for i in ids}


def losses(model: nn.Module, datasets: Any) -> list[float]:
    """Return each client's mean loss in eval mode."""
    model.eval()
    with torch.no_grad():
        return [F.cross_entropy(model(d.tensors[0]), d.tensors[1]).item() for d in datasets]


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_training_loss_is_the_weighted_mean_in_eval_mode(weighting: Any) -> None:
    sizes = (3, 11, 30)
    datasets = clients(sizes)
    model = WithDropout()
    run = trainer(callbacks=[TrainingLoss(weighting=weighting)], max_rounds=2, clients_per_round=2)
    run.fit(model, data(sizes))
    f = losses(model, datasets)
    weights = sizes if weighting == "examples" else (1, 1, 1)
    expected = sum(w * v for w, v in zip(weights, f, strict=True)) / sum(weights)
    assert float(run.callback_metrics["population/train_loss"]) == pytest.approx(expected, rel=1e-5)


def test_client_loss_does_not_depend_on_measurement_order() -> None:
    seen = LossesInTwoOrders()
    run = trainer(callbacks=[seen], max_rounds=1)
    run.fit(Remembers(), data((3, 11, 30)))
    assert len(set(seen.all.values())) == 3
    assert seen.all == seen.backwards == seen.alone


class LossOfOne(FederatedCallback):
    """Measures one client. With ``answers``, the client is on a site that returns them."""

    def __init__(self, answers: dict[int, Any] | None = None) -> None:
        self.answers = answers

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        if self.answers is not None:
            trainer.fit_loop.clients.measure_on_sites = lambda *_: self.answers
        self.loss = trainer.fit_loop.training_loss(0)


def test_client_without_examples_raises_and_is_named() -> None:
    with pytest.raises(FederatedError, match="Client 0 has no training examples"):
        trainer(callbacks=[LossOfOne()], max_rounds=1, clients_per_round=2).fit(seeded(), data((0, 11, 30)))


def test_client_with_an_unresponsive_site_raises_and_is_named() -> None:
    answered, silent = LossOfOne({0: {"loss": 2.0}}), LossOfOne({})
    trainer(callbacks=[answered], max_rounds=1).fit(seeded(), data())
    assert answered.loss == 2.0
    with pytest.raises(FederatedError, match="site of client 0 has not answered"):
        trainer(callbacks=[silent], max_rounds=1).fit(seeded(), data())


def test_only_requested_clients_and_rounds_are_measured() -> None:
    callback = TrainingLoss(clients=2, every_n_rounds=3)
    run = trainer(callbacks=[callback], max_rounds=2)
    run.fit(seeded(), data())
    assert len(callback.measured) == 2
    assert "population/train_loss" not in run.callback_metrics


def test_unknown_weighting_is_rejected() -> None:
    with pytest.raises(FederatedError, match="weighting"):
        TrainingLoss(weighting="sizes")  # type: ignore[arg-type]


# Control variates


A, G = (3.0, 1.0), 10.0


def control_errors(server_lr: float = 1.0, model: Any = None, datamodule: Any = None, **kwargs: Any) -> Any:
    """Return a callback after a run, and the last logged values."""
    callback = ControlVariateError(clients=kwargs.pop("clients", None))
    who = {} if "sampler" in kwargs else {"clients_per_round": 1.0}
    options = {"max_rounds": 1, "local_steps": 1, **who, "algorithm": Scaffold(option="i"), **kwargs}
    run = trainer(callbacks=callback, server_optimizer=partial(torch.optim.SGD, lr=server_lr), **options)
    run.fit(model or Quadratic(x0=2.0, lr=0.1), datamodule or Quadratics(a=A, G=G))
    return callback, {k: float(v) for k, v in run.callback_metrics.items() if k.startswith("control/")}


@pytest.mark.parametrize("option", ["i", "ii"])
def test_control_variates_at_the_same_point_are_exact(option: Any) -> None:
    # the server does not move, and with one step, option ii's c_i is also the gradient at x
    callback, found = control_errors(server_lr=0.0, algorithm=Scaffold(option=option))
    assert list(callback.errors.values()) == pytest.approx([0, 0], abs=1e-12)
    assert found == {
        "control/error": pytest.approx(0, abs=1e-12),
        "control/relative_error": pytest.approx(0, abs=1e-12),
        "control/server_error": pytest.approx(0, abs=1e-12),
    }


def test_exact_control_variates_of_a_network_have_zero_error() -> None:
    callback, found = control_errors(0.0, seeded(dropout=0.0), data())
    assert set(callback.errors.values()) == {0.0}
    assert found["control/server_error"] < 1e-6


def test_control_error_equals_the_gradient_change() -> None:
    model = Quadratic(x0=2.0, lr=0.1)
    callback, found = control_errors(model=model)
    x = model.x.item()
    moved = abs(x - 2.0)
    assert callback.errors == {0: pytest.approx(3 * moved), 1: pytest.approx(moved)}
    assert found["control/error"] == pytest.approx(2 * moved)
    assert found["control/server_error"] == pytest.approx(2 * moved)
    squares = (3 * x + 10) ** 2 + (x - 10) ** 2
    assert found["control/relative_error"] == pytest.approx((10 * moved**2 / squares) ** 0.5)


def test_control_error_of_an_unsampled_client_is_its_whole_gradient() -> None:
    callback, found = control_errors(0.0, sampler=lambda seed, round, population: [0])
    assert callback.errors == {0: 0.0, 1: pytest.approx(abs(2.0 - 10))}
    mean = (16 - 8) / 2
    assert found["control/server_error"] == pytest.approx(abs(16 / 2 - mean))


def test_sampled_clients_log_no_server_control_error() -> None:
    _, found = control_errors(clients=1)
    assert set(found) == {"control/error", "control/relative_error"}


@pytest.mark.parametrize("method", [FedAvg(), FedDyn(alpha=0.1)], ids=repr)
def test_methods_without_control_variates_are_rejected(method: Any) -> None:
    with pytest.raises(FederatedError, match=f"Scaffold; found {type(method).__name__}"):
        fit(algorithm=method, callbacks=ControlVariateError())


# Dissimilarity


def measured(callback: Any, model: Any, datamodule: Any, **kwargs: Any) -> dict[str, float]:
    """Return the values logged after one round, by default with full participation."""
    run = trainer(callbacks=callback, **{"max_rounds": 1, "clients_per_round": 1.0, **kwargs})
    run.fit(model, datamodule)
    return {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.mark.parametrize(("a", "G"), [((2.0, 0.0), 10.0), ((3.0, 1.0), 4.0), ((5.0, 1.0, 2.0, 0.0), 1.0)])
def test_measures_at_the_quadratic_optimum_equal_the_problem_constants(
    a: tuple[float, ...],
    G: float,  # noqa: N803
) -> None:
    problem = Quadratics(a=a, G=G)
    found = measured([GradientDissimilarity(), HessianDissimilarity()], Quadratic(x0=0.0), problem, local_steps=1)
    assert found["gradient/G2"] == pytest.approx(problem.G**2, rel=1e-12)
    assert found["gradient/mean_square"] == pytest.approx(problem.G**2, rel=1e-12)
    assert found["gradient/norm"] == pytest.approx(0, abs=1e-12)
    assert found["hessian/delta"] == pytest.approx(problem.delta, rel=1e-9)
    assert found["hessian/residual"] == pytest.approx(0, abs=1e-9)


def test_gradient_measures_match_the_quadratics_off_the_optimum() -> None:
    model, callback = Quadratic(x0=3.0, lr=0.05), GradientDissimilarity()
    found = measured(callback, model, Quadratics(a=(3.0, 1.0), G=10.0), local_steps=2)
    x = model.x.item()
    g = torch.tensor([3 * x + 10, x - 10], dtype=torch.float64)
    assert found["gradient/G2"] == pytest.approx(float((g - g.mean()).square().mean()))
    assert found["gradient/B"] == pytest.approx(float(g.square().mean().sqrt() / g.mean().abs()))
    assert found["gradient/norm"] == pytest.approx(abs(2 * x))
    assert callback.last is not None
    assert callback.last.norm == pytest.approx(abs(2 * x))


def test_zero_gradient_logs_no_dissimilarity_ratio() -> None:
    assert "gradient/B" not in measured(GradientDissimilarity(), Quadratic(x0=0.0), Quadratics(), local_steps=1)


def test_example_weighting_follows_client_sizes() -> None:
    rows = [torch.tensor([[3.0, 1.0]]).double().repeat(n, 1) * (i + 1) for i, n in enumerate((1, 4))]
    problem = FederatedDataModule(clients=[TensorDataset(r[:, 0], r[:, 1]) for r in rows])
    model = Quadratic(x0=1.0, lr=0.01)
    found = measured(
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
def test_hessian_dissimilarity_of_a_network_matches_exact_hessians() -> None:
    model, sizes = seeded(dropout=0.0), (13, 8, 21)
    callback = HessianDissimilarity(tolerance=1e-4, max_iterations=100)
    found = measured(callback, model, data(sizes, full_batch_size=5), local_epochs=2)
    exact = exact_hessians(model, clients(sizes), decay=0.0)
    mean = torch.stack(exact).mean(0)
    norms = [float(torch.linalg.matrix_norm(h - mean, 2)) for h in exact]
    assert [abs(value) for value in callback.delta.values()] == pytest.approx(norms, rel=1e-3)
    assert found["hessian/delta"] == pytest.approx(max(norms), rel=1e-3)
    assert found["hessian/delta_mean"] == pytest.approx(sum(norms) / 3, rel=1e-3)
    assert found["hessian/residual"] < 1e-3 * max(norms)


@pytest.mark.thorough
def test_hessian_products_match_exact_hessians_with_coupled_decay() -> None:
    model, sizes = seeded(dropout=0.0, weight_decay=0.5), (13, 8)
    products: list[Tensor] = []

    class Multiply(GradientDissimilarity):
        def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
            loop = trainer.fit_loop
            basis = torch.eye(len(loop.state.x))[::9]
            products.extend(torch.stack([loop.hessian_vector(i, loop.state.x, v) for v in basis]) for i in range(2))

    measured(Multiply(), model, data(sizes, full_batch_size=4))
    exact = exact_hessians(model, clients(sizes), decay=0.5)
    for product, h in zip(products, exact, strict=True):
        assert torch.allclose(product.double(), h[::9], atol=1e-5)


def test_hessian_products_match_gradient_differences_with_dropout() -> None:
    errors: list[float] = []

    class Differentiate(GradientDissimilarity):
        def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
            loop = trainer.fit_loop
            x, v = loop.state.x, torch.ones_like(loop.state.x)
            torch.rand(3)  # masks do not depend on the global generators
            product = loop.hessian_vector(1, x, v)
            ahead, behind = (loop.full_gradient(1, x + h * v) for h in (1e-5, -1e-5))
            errors.append(float((product - (ahead - behind) / 2e-5).norm() / product.norm()))

    rows = [TensorDataset(d.tensors[0].double(), d.tensors[1]) for d in clients((13, 8))]
    problem = FederatedDataModule(clients=rows, batch_size=4, full_batch_size=3)
    measured(Differentiate(), seeded(dropout=0.5), problem, precision="64-true")
    assert errors[0] < 1e-8


def test_dropout_masks_are_the_same_for_every_product() -> None:
    found = measured(HessianDissimilarity(max_iterations=60), seeded(dropout=0.5), data((13, 8)))
    assert found["hessian/residual"] <= 1e-2 * found["hessian/delta"]


@pytest.mark.thorough
def test_sampled_clients_are_fixed_by_the_seed() -> None:
    one, other = GradientDissimilarity(clients=3), HessianDissimilarity(clients=3, max_iterations=1)
    rounds: list[list[Any]] = []

    class Watch(FederatedCallback):
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


def test_measure_runs_only_every_n_rounds() -> None:
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
def test_out_of_range_arguments_are_rejected(make: Any, words: str) -> None:
    with pytest.raises(FederatedError, match=words):
        make()


def test_too_many_clients_are_rejected_before_the_first_round() -> None:
    with pytest.raises(FederatedError, match=r"clients=7.*the 6 non-empty"):
        fit(callbacks=GradientDissimilarity(clients=7))


def test_many_hessians_warn() -> None:
    with pytest.warns(UserWarning, match=r"31 clients, which takes up to 961 "):
        fit(datamodule=data([2] * 31), callbacks=HessianDissimilarity(99, max_iterations=1), max_rounds=1)


def test_gradient_scaler_is_rejected() -> None:
    class Scales(HessianDissimilarity):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.precision_plugin.scaler = object()
            super().on_train_start(trainer, pl_module)

    with pytest.raises(FederatedError, match="16-mixed"):
        fit(callbacks=Scales())


def test_model_without_second_derivatives_is_rejected() -> None:
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


def test_linear_loss_has_no_curvature() -> None:
    class Linear(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.head.bias.sum() * batch[0].mean()

    assert measured(HessianDissimilarity(), seeded(Linear), data((5, 6)))["hessian/delta"] == 0


@pytest.mark.parametrize("kind", [Inexactness, UpdateCosine])
def test_round_restart_calls_the_subclass_round_start_hook(kind: Any) -> None:
    started: list[int] = []

    class Noted(kind):
        def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
            started.append(round)

    Noted.on_round_restart(object.__new__(Noted), None, None, 3)
    assert started == [3]
