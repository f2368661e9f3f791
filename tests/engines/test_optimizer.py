"""The optimizer wrapper acts as one optimizer, and applies corrections between backward and step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fed.algorithms import Algorithm, FedAvg, Scaffold
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.flat import FlatParameters
from lightning_fed.core.rounds import Step
from lightning_fed.engines.optimizer import FederatedOptimizer, LocalWork

LR, DECAY = 0.1, 0.01
SGD = torch.optim.SGD


class Shift(Algorithm):
    """Adds one to every gradient; needs the path."""

    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        return g + 1.0

    def finish(self, y: Tensor, run: Any) -> Any:
        raise AssertionError


def make(
    build: Callable[[Any], torch.optim.Optimizer], method: Algorithm | None = None
) -> tuple[nn.Linear, FederatedOptimizer, LocalWork]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    flat = FlatParameters(list(model.named_parameters()))
    optimizer = FederatedOptimizer(build(model), flat)
    steps = [Step(v.clone(), {}, {}, {}, None, {}, {}, 1.0, 1.0, LR) for v in flat.views]
    work = LocalWork(method or Shift(), steps)
    optimizer.begin(work)
    return model, optimizer, work


def closure(model: nn.Module, optimizer: FederatedOptimizer) -> Callable[[], Tensor]:
    def run() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3).double()).sum()
        loss.backward()
        return loss

    return run


def grads(model: nn.Module) -> list[Tensor]:
    """Return the gradient of the loss above, which is all ones."""
    return [torch.ones_like(p) for p in model.parameters()]


def test_correction_is_applied_between_closure_and_step() -> None:
    model, optimizer, work = make(lambda m: SGD(m.parameters(), lr=LR))
    before = [p.detach().clone() for p in model.parameters()]
    loss = optimizer.step(closure(model, optimizer))
    assert loss is not None
    for p, x, g in zip(model.parameters(), before, grads(model), strict=True):
        torch.testing.assert_close(p.detach(), x - LR * (g + 1))
    assert work.num_steps == 1


def test_step_without_a_closure_uses_existing_gradients() -> None:
    with_closure, bare = (make(lambda m: SGD(m.parameters(), lr=LR)) for _ in range(2))
    with_closure[1].step(closure(*with_closure[:2]))
    closure(*bare[:2])()
    bare[1].step()
    assert torch.equal(with_closure[1].flat.y, bare[1].flat.y)


def test_step_without_a_gradient_has_no_effect() -> None:
    _, optimizer, work = make(lambda m: SGD(m.parameters(), lr=LR))
    before = optimizer.flat.y.clone()
    optimizer.step(lambda: None)
    assert work.num_steps == 0
    assert torch.equal(optimizer.flat.y, before)


BUILDERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda m: SGD(m.parameters(), lr=LR, weight_decay=DECAY),
    "SGD with momentum": lambda m: SGD(m.parameters(), lr=LR, momentum=0.9, nesterov=True, weight_decay=DECAY),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=LR, weight_decay=DECAY),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=LR, weight_decay=DECAY),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=LR, weight_decay=DECAY),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=LR, weight_decay=DECAY),
    "two groups": lambda m: SGD([{"params": [m.bias], "lr": 0.5, "weight_decay": 0.1}, {"params": [m.weight]}], lr=LR),
}


class Nothing(Algorithm):
    """Leaves the gradient unchanged, and needs the path."""

    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        return g

    def finish(self, y: Tensor, run: Any) -> Any:
        raise AssertionError


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
@pytest.mark.parametrize("method", [Nothing(), FedAvg()], ids=repr)
def test_neutral_correction_keeps_identical_bits_for_any_optimizer(build: Any, method: Algorithm) -> None:
    model, optimizer, _ = make(build, method)
    torch.manual_seed(0)
    plain = nn.Linear(3, 2).double()
    alone = build(plain)
    for _ in range(4):
        optimizer.step(closure(model, optimizer))
        alone.zero_grad()
        plain(torch.ones(1, 3).double()).sum().backward()
        alone.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


def test_coupled_decay_is_part_of_the_gradient_that_a_method_sees() -> None:
    seen: list[Tensor] = []

    class Look(Algorithm):
        def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
            seen.append(g - torch.ones_like(g) - DECAY * y)
            return torch.zeros_like(g)

    for name, coupled in (("SGD", True), ("Adam", True), ("RMSprop", True), ("AdamW", False)):
        seen.clear()
        model, optimizer, _ = make(BUILDERS[name], Look())
        assert optimizer.decay == [DECAY if coupled else 0.0] * 2
        before = optimizer.flat.y.clone()
        optimizer.step(closure(model, optimizer))
        assert all(bool((d.abs() < 1e-15).all()) for d in seen) == coupled
        if coupled:  # a zero direction moves nothing, but AdamW still decays
            assert torch.equal(optimizer.flat.y, before)
        else:
            torch.testing.assert_close(optimizer.flat.y, before * (1 - LR * DECAY))
        assert optimizer.param_groups[0]["weight_decay"] == DECAY


@pytest.mark.parametrize("name", ["SGD", "SGD with momentum", "Adam", "two groups"])
def test_path_gradient_is_the_rate_weighted_mean_direction(name: str) -> None:
    rates, directions = [0.1, 0.3, 0.2], []

    class Record(Nothing):
        def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
            directions.append((g + y).flatten().clone())
            return g + y

    model, optimizer, work = make(BUILDERS[name], Record())
    x = optimizer.flat.y.clone()
    for k, rate in enumerate(rates):
        for i, group in enumerate(optimizer.param_groups):
            group["lr"] = rate if i == 0 else 0.1 * (k + 1)
        optimizer.step(closure(model, optimizer))
    per_step = [torch.cat(directions[2 * k : 2 * k + 2]) for k in range(3)]
    weights = torch.tensor(rates).double()[:, None].expand(3, 8).clone()
    if name == "two groups":  # the first group holds the bias, which comes last in the vector
        weights[:, :6] = torch.tensor([0.1, 0.2, 0.3])[:, None]
    expected = (weights * torch.stack(per_step)).sum(0) / weights.sum(0)
    torch.testing.assert_close(optimizer.path_gradient(work, x), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_path_gradient_with_zero_rates_is_the_plain_mean(name: str) -> None:
    model, optimizer, work = make(BUILDERS[name])
    x = optimizer.flat.y.clone()
    optimizer.param_groups[0]["lr"] = 0.0
    for _ in range(3):
        optimizer.step(closure(model, optimizer))
    assert torch.equal(optimizer.flat.y, x)
    decayed = DECAY * x
    torch.testing.assert_close(optimizer.path_gradient(work, x), torch.full_like(x, 2.0) + decayed)


def test_schedulers_monitors_and_reload_see_one_optimizer() -> None:
    model, optimizer, _ = make(lambda m: SGD(m.parameters(), lr=LR, momentum=0.9))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.base, 1, gamma=0.5)
    optimizer.step(closure(model, optimizer))
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == LR / 2
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    scheduler.step()
    assert optimizer.param_groups is optimizer.base.param_groups
    assert optimizer.param_groups[0]["lr"] == LR / 4
    assert len(optimizer.state) == 2
    assert type(optimizer).__name__ == "SGD"
    assert optimizer.defaults is optimizer.base.defaults
    assert "FederatedOptimizer(SGD" in repr(optimizer)


def test_step_hooks_run_once_and_see_the_corrected_gradient() -> None:
    model, optimizer, _ = make(lambda m: SGD(m.parameters(), lr=LR))
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(next(model.parameters()).grad.clone()))
    optimizer.register_step_post_hook(lambda *_: seen.append(None))
    optimizer.step(closure(model, optimizer))
    assert len(seen) == 2
    torch.testing.assert_close(seen[0], torch.full_like(seen[0], 2.0))


def test_new_client_starts_with_fresh_optimizer_state() -> None:
    model, optimizer, _ = make(BUILDERS["Adam"])
    optimizer.step(closure(model, optimizer))
    assert optimizer.state
    optimizer.end()
    assert not optimizer.state
    with pytest.raises(FederatedError, match="outside a client's local work"):
        optimizer.step()


def test_groups_cannot_be_added_during_training() -> None:
    _, optimizer, _ = make(BUILDERS["SGD"])
    with pytest.raises(FederatedError, match="parameter group was added during training"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


@pytest.mark.parametrize("name", ["SGD with momentum", "Adam", "RMSprop", "AdamW"])
def test_advance_solver_moves_no_parameters(name: str) -> None:
    model, optimizer, _ = make(BUILDERS[name], Scaffold())
    x, g = optimizer.flat.y.clone(), torch.arange(8.0).double()
    state = optimizer.advance_solver({}, g, x)
    state = optimizer.advance_solver(state, 2 * g, x)
    assert torch.equal(optimizer.flat.y, x)
    torch.manual_seed(0)
    plain = nn.Linear(3, 2).double()
    alone = BUILDERS[name](plain)
    for group in alone.param_groups:  # the gradient already includes coupled decay
        group["weight_decay"] = 0.0
    for scale in (1.0, 2.0):
        plain.weight.grad, plain.bias.grad = (scale * g[:6]).view(2, 3), scale * g[6:]
        alone.step()
    for i, p in enumerate(plain.parameters()):
        for key, value in alone.state[p].items():
            torch.testing.assert_close(state[f"solver.{i}.{key}"], torch.as_tensor(value))
    assert all(p.grad is None for p in model.parameters())


class Polyak(torch.optim.Optimizer):
    """Takes longer steps at larger losses, which it gets from the closure, as optimizers of other packages do."""

    evaluations = 1

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        loss = None
        for _ in range(self.evaluations if closure is not None else 0):
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * float(1.0 if loss is None else loss))
                state = self.state[p]
                state["step"], state["scale"] = state.get("step", 0) + 1, 0.1
                state["mean"] = state.get("mean", p.grad.clone()) / 2
        return loss

    def train(self) -> str:
        return "in train mode"


class Searches(Polyak):
    """Evaluates the loss twice in a step."""

    evaluations = 2


@pytest.mark.parametrize("method", [FedAvg(), Shift()], ids=["FedAvg", "Shift"])
def test_optimizer_of_another_package_reads_the_loss(method: Algorithm) -> None:
    model, optimizer, _ = make(lambda m: Polyak(m.parameters(), {"lr": LR}), method)
    before, factor = [p.detach().clone() for p in model.parameters()], 1.0 if isinstance(method, FedAvg) else 2.0
    loss = optimizer.step(closure(model, optimizer))
    for p, was, g in zip(model.parameters(), before, grads(model), strict=True):
        torch.testing.assert_close(p.detach(), was - LR * float(loss) * factor * g)


def test_second_evaluation_of_the_loss_in_a_step_is_rejected() -> None:
    model, optimizer, _ = make(lambda m: Searches(m.parameters(), {"lr": LR}), FedAvg())
    with pytest.raises(FederatedError, match="Searches evaluates the loss twice in a step"):
        optimizer.step(closure(model, optimizer))


def test_numbers_and_tensors_of_a_kept_state_keep_their_types() -> None:
    model, optimizer, work = make(lambda m: Polyak(m.parameters(), {"lr": LR}), FedAvg())
    optimizer.step(closure(model, optimizer))
    kept = optimizer.solver_state()
    means = [optimizer.state[p]["mean"].clone() for p in model.parameters()]
    optimizer.end()
    optimizer.begin(work, kept)
    for p, mean in zip(model.parameters(), means, strict=True):
        state = optimizer.state[p]
        assert (state["step"], state["scale"]) == (1, 0.1)  # a tensor would round 0.1, and powers with the step
        assert type(state["step"]) is int
        assert torch.equal(state["mean"], mean)


def test_public_attributes_are_those_of_the_wrapped_optimizer() -> None:
    _, optimizer, _ = make(lambda m: Polyak(m.parameters(), {"lr": LR}))
    assert optimizer.train() == "in train mode"
    optimizer.base._step_supports_amp_scaling = True  # the wrapper itself needs gradients that are unscaled
    for name in ("missing", "_step_supports_amp_scaling"):
        with pytest.raises(AttributeError, match=f"'Polyak' object has no attribute '{name}'"):
            getattr(optimizer, name)
