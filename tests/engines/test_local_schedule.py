"""Optimizer options in local steps, set by schedules or by the steps themselves, never leak to another client."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from lightning_fed import FederatedDataModule, FederatedError
from lightning_fed.algorithms import FedAvg, Mime, Scaffold
from lightning_fed.engines.local_schedule import LocalSchedule
from tests.helpers.engines import Ordinary, Record, run, state_of
from tests.helpers.training import clients


def scheduled(mode: Any, lr: Any = 0.4) -> tuple[LocalSchedule, Optimizer, Any]:
    """Return a schedule whose rates depend on earlier rates."""
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=lr)
    scheduler = CosineAnnealingLR(optimizer, T_max=7, eta_min=0.01)
    return LocalSchedule(mode, optimizer, [scheduler], stepping(scheduler)), optimizer, scheduler


def stepping(scheduler: Any) -> Callable[[int], None]:
    return lambda step: scheduler.step()


@pytest.fixture
def rates() -> list[float]:
    _, optimizer, scheduler = scheduled("total")
    found = []
    for _ in range(20):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return found


def rate(optimizer: Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])


def without_rate(scheduler: Any) -> dict[str, Any]:
    return {name: value for name, value in scheduler.state_dict().items() if name != "_last_lr"}


def test_steps_in_any_order_match_a_plain_loop_with_identical_bits(rates: list[float]) -> None:
    schedule, optimizer, scheduler = scheduled("total")
    state = without_rate(scheduler)
    for first in (3, 9, 4, 0, 16):  # a repeated measurement returns to an earlier round
        schedule.begin_round(first)
        assert rate(optimizer) == rates[first]
        schedule.begin(schedule.start_of({}), 3)
        for k in range(3):
            assert rate(optimizer) == rates[first + k]
            schedule.advance()
        assert rate(optimizer) == rates[first + 2]  # the next step may be beyond the schedule's end
        assert scheduler.get_last_lr() == [rate(optimizer)]
        schedule.rest()
        assert rate(optimizer) == rates[first]
        assert scheduler.get_last_lr() == [rates[first]]
        assert without_rate(scheduler) == state
    schedule.release()
    assert rate(optimizer) == rates[0]
    assert scheduler.get_last_lr() == [rates[0]]


class InPlace(LRScheduler):
    """Derives its rates from a list that it changes in place, also when loading."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.past = [0.4]
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        self.past += [0.9 * self.past[-1]] * (self.last_epoch > 0)
        return [self.past[-1]]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.past[:] = state_dict.pop("past")
        super().load_state_dict(state_dict)


def test_schedule_can_change_its_state_in_place() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.4)
    scheduler = InPlace(optimizer)
    schedule = LocalSchedule("total", optimizer, [scheduler], stepping(scheduler))
    for step in (3, 5, 8, 2):
        schedule.begin_round(step)
        assert rate(optimizer) == pytest.approx(0.4 * 0.9**step)
        assert scheduler.past == [0.4]


def test_client_starts_at_its_own_step(rates: list[float]) -> None:
    schedule, optimizer, _ = scheduled("continue")
    schedule.begin_round(12)
    assert (rate(optimizer), schedule.start_of({})) == (rates[0], 0)
    schedule.begin(schedule.start_of({"schedule.steps": torch.tensor(5)}), 1)
    assert rate(optimizer) == rates[5]
    with pytest.raises(FederatedError, match="has taken -1 local steps: it is damaged"):
        schedule.start_of({"schedule.steps": torch.tensor(-1)})
    assert scheduled("restart")[0].start_of({"schedule.steps": torch.tensor(5)}) == 0


def test_checkpoint_has_the_initial_options(rates: list[float]) -> None:
    for lr in (0.4, torch.tensor(0.4, dtype=torch.float64)):
        schedule, optimizer, _ = scheduled("total", lr)
        schedule.begin_round(4)
        assert rate(optimizer) == pytest.approx(rates[4], rel=1e-12)
        groups = optimizer.state_dict()["param_groups"]
        schedule.at_start(groups)
        assert float(groups[0]["lr"]) == 0.4
        assert rate(optimizer) == pytest.approx(rates[4], rel=1e-12)  # the optimizer keeps its own rate


def test_failed_step_leaves_the_schedule_unchanged(rates: list[float]) -> None:
    schedule, optimizer, scheduler = scheduled("restart")

    def ends(step: int) -> None:
        if step == 2:
            raise ValueError("it is over.")
        scheduler.step()

    schedule._step = ends
    schedule.begin_round(0)
    with pytest.raises(
        FederatedError, match=r"no options for step 3, .*ValueError: it is over.*one client in one round"
    ):
        schedule.begin(3, 1)
    assert rate(optimizer) == rates[0]
    schedule.begin(2, 1)
    assert rate(optimizer) == rates[2]


ENGINES = ("sequential", "auto")


class Cools(Ordinary):
    """Lowers its rate in every step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for group in self.optimizers().param_groups:
            group["lr"] *= 0.5
        return super().training_step(batch, batch_idx)


class CoolsTensor(Cools):
    """The same, with a rate that is a tensor."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=torch.tensor(0.1), foreach=False)


def alike() -> FederatedDataModule:
    """Return three clients with the same examples."""
    return FederatedDataModule(clients=clients((12,)) * 3, batch_size=4, shuffle=False)


@pytest.mark.parametrize("make", [Cools, CoolsTensor])
def test_every_client_starts_with_the_rates_of_the_round(make: Any) -> None:
    ends = []
    for engine in ENGINES:
        seen = Record()
        t = run(engine, make, alike, clients_per_round=3, max_rounds=2, callbacks=[seen])
        assert len({report.update_norm for report in seen.reports[:3]}) == 1
        assert len({report.update_norm for report in seen.reports[3:]}) == 1
        ends.append(state_of(t)["x"])
    assert torch.equal(*ends)


class CoolsLater(Ordinary):
    """Lowers its rate from the second round on, which the trial step does not show."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.current_epoch > 0:
            for group in self.optimizers().param_groups:
                group["lr"] *= 0.5
        return super().training_step(batch, batch_idx)


def test_rates_set_in_a_later_step_are_detected_by_vectorized() -> None:
    ends = [state_of(run(engine, CoolsLater, alike, clients_per_round=3, max_rounds=3))["x"] for engine in ENGINES]
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-7)  # the first round runs in another engine
    with pytest.raises(FederatedError, match="it changes 'lr' of the local optimizer, and did not in its trial step"):
        run("vectorized", CoolsLater, alike, clients_per_round=3, max_rounds=3)


class Counts(torch.optim.Optimizer):
    """Adds a count of its steps to the parameter group in its first step, and takes shorter and shorter steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / group["step"])


class Averages(torch.optim.Optimizer):
    """Wraps an optimizer and shares its groups. Its own values are in the inner state, as in timm's Lookahead."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.param_groups = inner, inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for p in self.param_groups[0]["params"]:
            state = self.inner.state[p]
            p.copy_(state.setdefault("slow", p.clone()).lerp_(p, 0.5))


class CountsSteps(Counts):
    """Counts its steps in an attribute, too."""

    taken = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.taken += 1
        super().step(closure)


class Copies(torch.optim.SGD):
    """Has copies of the parameters from the start."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]


class Prepares(torch.optim.SGD):
    """Makes its state when it is created."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr, momentum=0.9)
        for p in self.param_groups[0]["params"]:
            self.state[p]["momentum_buffer"] = torch.ones_like(p)


class Nests(torch.optim.SGD):
    """Has its own form of a state dict, as wrappers do."""

    def state_dict(self) -> Any:
        return {"inner": super().state_dict()}


class Lists(torch.optim.SGD):
    """Has a list of tensors in its state."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("past", []).append(p.grad)


class Shares(Lists):
    """Has a number for all parameters in its state."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        SGD.step(self)
        self.state["k"] = 1


def averaging(params: Any) -> Averages:
    return Averages(torch.optim.Adam(params, lr=0.1))


@pytest.mark.parametrize("make", [lambda params: Counts(params, {"lr": 0.1}), averaging])
def test_every_client_gets_a_new_optimizer_of_any_kind(make: Any) -> None:
    seen = Record()
    run("sequential", partial(Ordinary, make), alike, clients_per_round=3, max_rounds=2, callbacks=[seen])
    assert len({report.update_norm for report in seen.reports[:3]}) == 1
    assert len({report.update_norm for report in seen.reports[3:]}) == 1


KEEP = {"local_optimizer_state": "keep"}


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (lambda params: CountsSteps(params, {"lr": 0.1}), {}, "changes its attribute CountsSteps.taken as it steps"),
        (partial(Copies, lr=0.1), {}, "whose attribute 'slow' holds copies of the parameters"),
        (averaging, KEEP, "Averages, which wraps Adam.* return Adam alone"),
        (averaging, {"algorithm": Mime()}, "Averages, which wraps Adam. Mime keeps the state of one optimizer"),
        (partial(Prepares, lr=0.1), {}, "Prepares, whose state is not empty when it is created"),
        (partial(Nests, lr=0.1), {}, "Nests, whose state_dict.. has 'inner' instead of 'param_groups'"),
        (lambda params: Counts(params, {}), {}, "Counts, whose parameter group has lr=None"),
        (lambda params: Counts(params, {"lr": 0.1}), KEEP, "Counts changes the option 'step' of a parameter group"),
        (lambda params: Counts(params, {"lr": 0.1}), {"algorithm": Mime()}, "Counts changes .*, but Mime keeps"),
        (partial(Lists, lr=0.1), KEEP, "Lists changes 'past' in its state"),
        (partial(Shares, lr=0.1), KEEP, "Shares changes 'k' in its state"),
    ],
)
def test_optimizer_state_carried_across_clients_is_rejected(make: Any, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(FederatedError, match=reason):
        run("sequential", partial(Ordinary, make), alike, clients_per_round=3, max_rounds=1, **options)


class DecaysOnSchedule(Ordinary):
    """Raises its weight decay in every step, and has a schedule of its rate by local step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for group in self.optimizers().param_groups:
            group["weight_decay"] += 1.0
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize("mode", ["restart", "continue"])
def test_options_not_set_by_a_schedule_are_restored(mode: str) -> None:
    seen = Record()
    run("sequential", DecaysOnSchedule, alike, clients_per_round=3, max_rounds=1, local_schedule=mode, callbacks=[seen])
    assert len({report.update_norm for report in seen.reports}) == 1


class DecaysLater(DecaysOnSchedule):
    """Raises its weight decay from the client's third step on, which the trial step does not show."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) if batch_idx > 1 else Ordinary.training_step(self, batch, 0)


@pytest.mark.parametrize("mode", ["restart", "continue", "total"])
def test_weight_decay_set_in_a_later_step_with_a_schedule_is_detected(mode: str) -> None:
    options: Any = {"clients_per_round": 3, "max_rounds": 2, "local_schedule": mode}
    with pytest.raises(FederatedError, match="it changes 'weight_decay' of the local optimizer, and did not in its"):
        run("vectorized", DecaysLater, alike, **options)
    ends = [state_of(run(engine, DecaysLater, alike, **options))["x"] for engine in ENGINES]
    assert torch.equal(*ends)


class Steps(Ordinary):
    """Steps its schedule in every step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.lr_schedulers().step()
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


@pytest.mark.parametrize("engine", ["sequential", "auto"])
def test_stepping_a_schedule_during_local_training_is_rejected(engine: str) -> None:
    with pytest.raises(FederatedError, match="Steps steps its schedule ExponentialLR.*local_schedule='restart'"):
        run(engine, Steps)


class StepsItsOwn(Ordinary):
    """Keeps its schedule in an attribute instead of returning it, and steps it after every step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
        return optimizer


class InOptimizerStep(StepsItsOwn):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.schedules[0].step()


class InTrainingStep(StepsItsOwn):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.schedules[0].step()
        return super().training_step(batch, batch_idx)


class OnceARound(StepsItsOwn):
    def on_train_epoch_end(self) -> None:
        self.schedules[0].step()


@pytest.mark.parametrize("engine", ["sequential", "auto"])
@pytest.mark.parametrize("module", [InOptimizerStep, InTrainingStep])
def test_stepping_a_schedule_in_an_attribute_during_local_training_is_rejected(module: Any, engine: str) -> None:
    with pytest.raises(FederatedError, match=f"{module.__name__} steps its schedule ExponentialLR.*'restart'"):
        run(engine, module)


class OfAnotherOptimizer(InTrainingStep):
    def configure_optimizers(self) -> Any:
        unused = super().configure_optimizers()
        return type(unused)(self.parameters(), unused.defaults["lr"])


def test_schedule_of_an_optimizer_that_does_not_train_may_step() -> None:
    assert run("sequential", OfAnotherOptimizer).current_epoch > 0


@pytest.mark.parametrize("engine", ["sequential", "auto"])
def test_schedule_in_an_attribute_may_step_once_a_round(engine: str) -> None:
    rate = run(engine, OnceARound, max_rounds=2).optimizers[0].param_groups[0]["lr"]
    assert rate == pytest.approx(0.81 * Ordinary().configure_optimizers().param_groups[0]["lr"])


class Decays(Ordinary):
    """Raises its coupled weight decay from batch to batch."""

    def __init__(self) -> None:
        super().__init__(partial(torch.optim.SGD, lr=0.1))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for group in self.optimizers().param_groups:
            group["weight_decay"] = 0.2 * (batch_idx + 1)


def test_weight_decay_set_by_a_hook_applies_to_corrected_steps() -> None:
    first = {"max_rounds": 1, "clients_per_round": 3}  # SCAFFOLD's corrections are zero in this round
    plain = run("sequential", Decays, alike, algorithm=FedAvg(), **first)
    corrected = run("sequential", Decays, alike, algorithm=Scaffold(), **first)
    torch.testing.assert_close(state_of(corrected)["x"], state_of(plain)["x"], rtol=1e-12, atol=1e-12)
