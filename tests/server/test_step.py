"""The server's step: any torch optimizer on the direction, exact replacement, schedules counted in rounds."""

import io
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR

from lightning_fed.algorithms import Scaffold
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.flat import Layout
from lightning_fed.server.server import ServerStep, plain_sgd
from tests.helpers.training import data, parameters, seeded, trainer

LAYOUT = Layout([torch.Size([2, 2]), torch.Size([1])])
SGD = torch.optim.SGD


def vector(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def server(build: Any = plain_sgd, schedule: Any = None, x: Tensor | None = None) -> ServerStep:
    x = vector(0.0) if x is None else x
    return ServerStep(build, x, LAYOUT if x.numel() == 5 else Layout([x.shape]), schedule)


# ------------------------------------------------------------------ one step


def test_plain_sgd_uses_the_mean_model_without_rounding() -> None:
    x, mean = vector(1e8, -3.0, dtype=torch.float32), vector(0.1, 7.7, dtype=torch.float32)
    direction = mean - x
    assert not torch.equal(x + direction, mean)
    step = server(x=x)
    step.step(direction, mean)
    assert torch.equal(step.x, mean)
    assert x.tolist() == [1e8, -3.0]  # the step does not change the given vector


def test_plain_sgd_adds_the_direction_without_a_mean_model() -> None:
    step = server(x=vector(1.0, 2.0))
    step.step(vector(0.5, -4.0), None)
    assert step.x.tolist() == [1.5, -2.0]


@pytest.mark.parametrize(
    ("build", "want"),
    [
        (partial(SGD, lr=0.5), 2.0),  # 1 + 0.5 * 2
        (partial(SGD, lr=1.0, momentum=0.9), 3.0),  # 1 + 2
        (partial(SGD, lr=1.0, weight_decay=0.5), 2.5),  # 1 - (-2 + 0.5 * 1)
        (lambda params: SGD([{"params": [p]} for p in params], lr=0.25), 1.5),
        (partial(torch.optim.Adam, lr=0.125, eps=0.0), 1.125),  # the sign of the direction
        (type("Mine", (SGD,), {}), 1.002),
    ],
    ids=["rate", "momentum", "decay", "groups", "Adam", "subclass"],
)
def test_other_optimizers_ignore_the_mean_model(build: Any, want: float) -> None:
    step = server(build, x=torch.ones(5, dtype=torch.float64))
    step.step(torch.full((5,), 2.0, dtype=torch.float64), torch.full((5,), 77.0, dtype=torch.float64))
    torch.testing.assert_close(step.x, torch.full((5,), want, dtype=torch.float64), rtol=1e-10, atol=0.0)


def test_optimizer_gets_model_shapes_and_the_negative_direction() -> None:
    seen: list[Tensor] = []

    class Look(SGD):
        def step(self, closure: Any = None) -> None:
            seen.extend(p.grad.clone() for group in self.param_groups for p in group["params"])
            super().step(closure)

    step = server(partial(Look, lr=1.0), x=torch.zeros(5))
    step.step(torch.arange(5.0), None)
    assert seen[0].tolist() == [[0.0, -1.0], [-2.0, -3.0]]
    assert seen[1].tolist() == [-4.0]
    assert step.x.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert all(p.grad is None for p in step.params)


def test_momentum_persists_across_rounds() -> None:
    step = server(partial(SGD, lr=1.0, momentum=0.5))
    for want in (1.0, 2.5, 4.25):  # buffers 1, 1.5, 1.75
        step.step(vector(1.0), None)
        assert step.x.tolist() == [want]


# ------------------------------------------------------------------ schedules


def walk(step: ServerStep, rounds: int, models: bool = False, empty: tuple[int, ...] = ()) -> list[float]:
    """Take rounds with direction 1, and return x after each."""
    out = []
    for r in range(rounds):
        if r not in empty:
            step.step(vector(1.0), step.x + 1.0 if models else None)
        if step.scheduler is not None:
            step.end_round()
        out.append(float(step.x))
    return out


@pytest.mark.parametrize("models", [False, True])
def test_learning_rate_follows_its_schedule_per_round(models: bool) -> None:
    step = server(schedule=partial(StepLR, step_size=2, gamma=0.5))
    assert walk(step, 5, models) == [1.0, 2.0, 2.5, 3.0, 3.25]


def test_mean_model_is_used_only_while_the_rate_is_one() -> None:
    step = server(partial(SGD, lr=0.5), partial(LambdaLR, lr_lambda=lambda r: 1.0 + r))
    step.step(vector(1.0), vector(99.0))
    step.end_round()
    assert step.x.tolist() == [0.5]
    step.step(vector(1.0), vector(99.0))
    assert step.x.tolist() == [99.0]


def test_empty_rounds_advance_the_schedule_without_warnings() -> None:
    step = server(schedule=partial(StepLR, step_size=2, gamma=0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert walk(step, 5, empty=(0, 3)) == [0.0, 1.0, 1.5, 1.5, 1.75]


def sequence(optimizer: torch.optim.Optimizer) -> SequentialLR:
    warmup = LambdaLR(optimizer, lambda r: (r + 1) / 4)
    return SequentialLR(optimizer, [warmup, CosineAnnealingLR(optimizer, T_max=6)], milestones=[3])


@pytest.mark.parametrize("stop", [0, 1, 3, 4, 7])
@pytest.mark.parametrize(
    "schedule",
    [
        partial(StepLR, step_size=3, gamma=0.5),
        partial(CosineAnnealingLR, T_max=8),
        partial(OneCycleLR, max_lr=2.0, total_steps=20, cycle_momentum=False),
        sequence,
    ],
    ids=["StepLR", "CosineAnnealingLR", "OneCycleLR", "SequentialLR"],
)
@pytest.mark.filterwarnings("ignore:.*epoch parameter in `scheduler.step.*")
def test_schedule_resumes_exactly(schedule: Any, stop: int) -> None:
    build = partial(SGD, lr=1.0, momentum=0.5)
    whole, first, second = (server(build, schedule) for _ in range(3))
    straight = walk(whole, 10)
    walk(first, stop)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    walk(second, 2)  # loading discards these rounds
    second.load_state_dict(torch.load(file, weights_only=True))
    assert walk(second, 10 - stop) == straight[stop:]


def test_saved_state_does_not_alias_x() -> None:
    step = server()
    saved = step.state_dict()
    walk(step, 1)
    assert saved["x"].tolist() == [0.0]
    assert saved["schedule"] is None
    held = step.x
    step.load_state_dict(saved)
    assert step.x is held  # the optimizer's parameters are views of it
    assert step.params[0].tolist() == [0.0]


@pytest.mark.thorough
def test_run_follows_the_server_schedule_and_resumes_exactly(tmp_path: Any) -> None:
    common: dict[str, Any] = {
        "algorithm": Scaffold(),
        "server_optimizer": partial(SGD, lr=1.0, momentum=0.5),
        "server_lr_scheduler": partial(StepLR, step_size=2, gamma=0.1),
    }

    def fit(rounds: int, **kwargs: Any) -> Any:
        model, run = seeded(), trainer(max_rounds=rounds, **common)
        run.fit(model, data(), **kwargs)
        return model, run

    straight, run = fit(6)
    assert run.fit_loop.state.step.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)
    _, half = fit(3)
    assert half.fit_loop.state.step.optimizer.param_groups[0]["lr"] == pytest.approx(1e-1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = fit(6, ckpt_path=tmp_path / "half.ckpt")
    assert torch.equal(parameters(resumed), parameters(straight))
    common["server_lr_scheduler"] = None
    assert not torch.equal(parameters(fit(6)[0]), parameters(straight))


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("schedule", "found"),
    [(ReduceLROnPlateau, "ReduceLROnPlateau"), (lambda o: o, "SGD")],
    ids=["plateau", "optimizer"],
)
def test_schedules_that_require_a_metric_are_rejected(schedule: Callable[..., Any], found: str) -> None:
    with pytest.raises(FederatedError, match=f"server_lr_scheduler must return .* without a metric, found {found}"):
        server(schedule=schedule)


def test_schedule_function_that_returns_none_is_rejected() -> None:
    with pytest.raises(FederatedError, match="server_lr_scheduler must return .* found None"):
        server(schedule=lambda optimizer: None)


@pytest.mark.parametrize(
    "build",
    [
        lambda params: SGD([nn.Parameter(torch.zeros(5))], lr=1.0),
        lambda params: SGD(list(params)[:1], lr=1.0),
        lambda params: SGD([*params, nn.Parameter(torch.zeros(1))], lr=1.0),
    ],
    ids=["others", "some", "more"],
)
def test_optimizer_over_other_parameters_is_rejected(build: Any) -> None:
    with pytest.raises(FederatedError, match="must be built from the parameters that it is handed, all of them"):
        server(build, x=torch.zeros(5))


@pytest.mark.parametrize("build", [lambda params: None, lambda params: SGD, lambda params: params])
def test_result_that_is_not_an_optimizer_is_rejected(build: Any) -> None:
    with pytest.raises(FederatedError, match="server_optimizer must return a torch optimizer, found"):
        server(build)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (torch.optim.LBFGS, "server_optimizer LBFGS is not supported"),
        (partial(torch.optim.Rprop, lr=0.1), "server_optimizer Rprop is not supported"),
        (partial(SGD, lr=1.0, maximize=True), r"server_optimizer SGD\(maximize=True\) is not supported"),
    ],
)
def test_unsupported_server_optimizers_are_rejected(build: Any, message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        server(build)
