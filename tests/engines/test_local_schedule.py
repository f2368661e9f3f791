"""The options of a local optimizer by the step of its schedules."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from lightning_fed.core.errors import FederatedError
from lightning_fed.engines.local_schedule import LocalSchedule


def scheduled(mode: Any, lr: Any = 0.4) -> tuple[LocalSchedule, Optimizer, Any]:
    """Return a schedule whose rates depend on the rates before."""
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


def state_of(scheduler: Any) -> dict[str, Any]:
    return {name: value for name, value in scheduler.state_dict().items() if name != "_last_lr"}


def test_steps_in_any_order_have_the_bits_of_a_plain_loop(rates: list[float]) -> None:
    schedule, optimizer, scheduler = scheduled("total")
    state = state_of(scheduler)
    for first in (3, 9, 4, 0, 16):  # a round that is measured again is an earlier one
        schedule.begin_round(first)
        assert rate(optimizer) == rates[first]
        schedule.begin(schedule.start_of({}), 3)
        for k in range(3):
            assert rate(optimizer) == rates[first + k]
            schedule.advance()
        assert rate(optimizer) == rates[first + 2]  # the step after the last may be beyond the schedule's end
        assert scheduler.get_last_lr() == [rate(optimizer)]
        schedule.rest()
        assert rate(optimizer) == rates[first]
        assert scheduler.get_last_lr() == [rates[first]]
        assert state_of(scheduler) == state
    schedule.release()
    assert rate(optimizer) == rates[0]
    assert scheduler.get_last_lr() == [rates[0]]


class InPlace(LRScheduler):
    """Its rates follow from a list that it changes in place, also when it is loaded."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.past = [0.4]
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        self.past += [0.9 * self.past[-1]] * (self.last_epoch > 0)
        return [self.past[-1]]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.past[:] = state_dict.pop("past")
        super().load_state_dict(state_dict)


def test_a_schedule_may_change_its_state_in_place() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.4)
    scheduler = InPlace(optimizer)
    schedule = LocalSchedule("total", optimizer, [scheduler], stepping(scheduler))
    for step in (3, 5, 8, 2):
        schedule.begin_round(step)
        assert rate(optimizer) == pytest.approx(0.4 * 0.9**step)
        assert scheduler.past == [0.4]


def test_a_client_begins_at_its_own_step(rates: list[float]) -> None:
    schedule, optimizer, _ = scheduled("continue")
    schedule.begin_round(12)
    assert (rate(optimizer), schedule.start_of({})) == (rates[0], 0)
    schedule.begin(schedule.start_of({"schedule.steps": torch.tensor(5)}), 1)
    assert rate(optimizer) == rates[5]
    with pytest.raises(FederatedError, match="has taken -1 local steps: it is damaged"):
        schedule.start_of({"schedule.steps": torch.tensor(-1)})
    assert scheduled("restart")[0].start_of({"schedule.steps": torch.tensor(5)}) == 0


def test_a_checkpoint_has_the_options_of_the_start(rates: list[float]) -> None:
    for lr in (0.4, torch.tensor(0.4, dtype=torch.float64)):
        schedule, optimizer, _ = scheduled("total", lr)
        schedule.begin_round(4)
        assert rate(optimizer) == pytest.approx(rates[4], rel=1e-12)
        groups = optimizer.state_dict()["param_groups"]
        schedule.at_start(groups)
        assert float(groups[0]["lr"]) == 0.4
        assert rate(optimizer) == pytest.approx(rates[4], rel=1e-12)  # the optimizer has its own


def test_a_failed_step_leaves_the_schedule_as_it_was(rates: list[float]) -> None:
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
