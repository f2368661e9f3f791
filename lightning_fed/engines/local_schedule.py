"""The options of the local optimizer at the start of every client, and at each step of its schedules."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import LocalScheduleMode, State
from lightning_fed.server.client_states.state import LOCAL_STEPS
from lightning_fed.server.server import steps_not_counted


class LocalOptions:
    """The local optimizer's options and its schedules' steps, saved before local work.

    Every client has a new local optimizer, as if ``configure_optimizers`` were called for it. A rate that
    ``training_step`` or a per-batch hook sets must therefore not reach the next client.
    ``schedules`` are the configurations of its schedules, as Lightning stores them.
    """

    def __init__(self, optimizer: Optimizer, schedules: Sequence[Any]) -> None:
        self._groups, self._schedules = optimizer.param_groups, schedules
        self._options, self._steps = list[dict[str, Any]](), list[Any]()
        for group in self._groups:
            options = group.copy()
            del options["params"]
            for name, value in options.items():
                if isinstance(value, Tensor):
                    options[name] = value.clone()
            self._options.append(options)
        for config in schedules:
            self._steps.append(getattr(config.scheduler, "last_epoch", None))

    def take_back(self) -> tuple[str | None, str | None]:
        """Restore the options; return the name of a changed one, and of a schedule that has stepped, if any."""
        option, schedule = None, None
        for group, before in zip(self._groups, self._options, strict=True):
            for name in [*group] if len(group) > len(before) + 1 else ():
                if name != "params" and name not in before:
                    option = name
                    del group[name]  # a new option, such as a count of steps
            for name, was in before.items():
                value = group[name]
                if isinstance(was, Tensor) and isinstance(value, Tensor):
                    if not was.equal(value):
                        option = name
                        value.copy_(was)
                elif value is not was and value != was:
                    option, group[name] = name, was
        for config, step in zip(self._schedules, self._steps, strict=True):
            if getattr(config.scheduler, "last_epoch", None) != step:
                schedule = type(config.scheduler).__name__
        return option, schedule


def stepped_schedule(module: Any, schedule: str) -> FederatedError:
    """Return the error for a module that steps a schedule while clients train."""
    remedy = (
        "Remove the call of step(), return {'scheduler': ..., 'interval': 'step'} from configure_optimizers(), and"
        " choose what it counts: local_schedule='restart', 'continue' or 'total'."
        if module.automatic_optimization
        else "Call step() in on_train_epoch_end, once a round."
    )
    return FederatedError(
        f"{type(module).__name__} steps its schedule {schedule} while a client trains: the next client would"
        f" start with the changed rate. {remedy}"
    )


MOVED = ("lr", "momentum", "betas")
"""The options of optimizers that schedules move."""

_Row: TypeAlias = list[dict[str, Any]]  # the moved options of each parameter group at one step


class LocalSchedule:
    """The options of the local optimizer at each step of its schedules with ``interval="step"``.

    Before step t, the schedules have stepped t times since the start, one by one as in a plain loop. The options are
    thus a function of t alone, with the same bits for every client, engine and process. Schedules, and optimizer states
    in checkpoints, always have their state at the start; only ``get_last_lr`` returns the current rates. The run keeps
    the numbers of steps.
    ``step`` steps the schedules after step t.
    """

    def __init__(
        self, mode: LocalScheduleMode, base: Optimizer, schedules: Sequence[Any], step: Callable[[int], None]
    ) -> None:
        self.mode, self._base, self._schedules, self._step = mode, base, schedules, step
        self._start: _Row | None = None  # None before the first round; until then, hooks may change the options
        self._start_states: list[Any] = []
        self._first, self._rows = 0, list[_Row]()  # the options at consecutive steps
        self._states: list[Any] = []  # the schedules' states at the last of these steps
        self._shown: _Row | None = None  # the optimizer's current options
        self._of_round = 0  # the step that is shown between clients
        self._at = self._end = 0  # the current step, and the step after the client's last

    def begin_round(self, step: int) -> None:
        """Show the options of a round's first step, between clients.

        With ``mode="total"``, this is the run's step. In the other modes, clients begin at step 0 or at their own step.
        """
        self._of_round = step if self.mode == "total" else 0
        self._show(self._of_round)
        if self.mode == "total":  # no client needs earlier steps
            del self._rows[: step - self._first]
            self._first = step

    def start_of(self, client: State) -> int:
        """Return a client's first step, given its state."""
        if self.mode != "continue" or LOCAL_STEPS not in client:
            return self._of_round
        if (step := int(client[LOCAL_STEPS])) < 0:
            raise FederatedError(f"A client's state says that it has taken {step} local steps: it is damaged.")
        return step

    def begin(self, step: int, count: int) -> None:
        """Begin the work of clients at a step, for at most ``count`` steps."""
        self._check_untouched()
        self._at, self._end = step, step + count
        self._show(step)

    def advance(self) -> None:
        """Go to the next step; after a client's last one, wait for :meth:`rest`."""
        self._check_untouched()
        self._at += 1
        if self._at < self._end:
            self._show(self._at)

    def rest(self) -> None:
        """End or abandon the work of clients."""
        if self._start is not None:
            self._show(self._of_round)

    def release(self) -> None:
        """Restore the optimizer's options at the start."""
        if self._start is not None:
            self._write(self._start)

    def at_start(self, groups: Sequence[dict[str, Any]]) -> None:
        """Replace the options in a state dict's parameter groups by their values at the start."""
        for group, options in zip(groups, self._start or [], strict=bool(self._start)):
            for name, value in options.items():
                group[name] = torch.full_like(group[name], value) if isinstance(group[name], Tensor) else value

    # ------------------------------------------------------------------ the options by step

    def _show(self, step: int) -> None:
        if self._start is None:
            self._start, self._start_states = self._read(), self._states_now()
            self._rewind()
        self._extend(step)
        self._shown = self._rows[step - self._first]
        self._write(self._shown)

    def _extend(self, step: int) -> None:
        """Compute the options up to a step."""
        if step < self._first:
            self._rewind()
        last = self._first + len(self._rows) - 1
        if step <= last:
            return
        shown, fixed, number = self._read(), self._fixed(), last
        try:
            self._load(self._states)
            self._write(self._rows[-1])
            with steps_not_counted():
                for number in range(last, step):
                    self._step(number)
                    row = self._read()
                    self._rows.append(self._rows[-1] if row == self._rows[-1] else row)
            if (moved := self._fixed()) != fixed:
                raise FederatedError(
                    f"local_schedule={self.mode!r}: {self._named()} changes other options of the local optimizer than"
                    f" {', '.join(MOVED)}: {_first_difference(fixed, moved)}. Use a schedule of these."
                )
            self._states = self._states_now()
        except Exception as error:
            self._rewind()
            if isinstance(error, FederatedError):
                raise
            raise FederatedError(
                f"local_schedule={self.mode!r}: {self._named()} has no options for step {number + 1}, counted from 0:"
                f" {type(error).__name__}: {str(error).rstrip('.')}. Let it last for all steps that clients take:"
                f" {_LENGTHS[self.mode]}."
            ) from error
        finally:
            self._load(self._start_states)
            self._write(shown)

    def _rewind(self) -> None:
        assert self._start is not None
        self._first, self._rows, self._states = 0, [self._start], self._start_states

    def _check_untouched(self) -> None:
        """Raise if something other than the schedules has changed an option that they move."""
        for number, (group, options) in enumerate(zip(self._base.param_groups, self._shown or [], strict=False)):
            for name, value in options.items():
                if not isinstance(group[name], Tensor) and group[name] != value:
                    raise FederatedError(
                        f"local_schedule={self.mode!r}: a hook has set {name}={group[name]!r} in group {number} of the"
                        f" local optimizer, and {self._named()} sets it before every local step (now to {value!r})."
                        " Put the change into the schedule, or leave local_schedule unset and step the schedule once a"
                        " round, with interval='epoch'."
                    )

    def _named(self) -> str:
        return ", ".join(type(schedule).__name__ for schedule in self._schedules)

    def _read(self) -> _Row:
        return [{k: _plain(group[k]) for k in MOVED if k in group} for group in self._base.param_groups]

    def _fixed(self) -> list[dict[str, Any]]:
        """Return the options that schedules must not move."""
        left_out = {*MOVED, "params"}
        return [{k: _plain(v) for k, v in group.items() if k not in left_out} for group in self._base.param_groups]

    def _write(self, row: _Row) -> None:
        for group, options in zip(self._base.param_groups, row, strict=True):
            for name, value in options.items():
                if isinstance(group[name], Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = value
        rates = [options["lr"] for options in row]
        for schedule in self._schedules:
            if hasattr(schedule, "_last_lr"):
                schedule._last_lr = list(rates)  # get_last_lr returns it

    def _states_now(self) -> list[Any]:
        return copy.deepcopy([schedule.state_dict() for schedule in self._schedules])

    def _load(self, states: Sequence[Any]) -> None:
        for schedule, state in zip(self._schedules, states, strict=True):
            schedule.load_state_dict(copy.deepcopy(state))


_LENGTHS: Mapping[str, str] = {
    "restart": "those of one client in one round",
    "continue": "those of one client in all its rounds",
    "total": "those of all rounds",
}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _first_difference(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> str:
    for mine, its in zip(one, other, strict=True):
        for name in (*its, *mine):
            if mine.get(name) != its.get(name):
                return f"{name} from {mine.get(name)!r} to {its.get(name)!r}"
    return ""
