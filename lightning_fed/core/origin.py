"""Messages about the source that a run continues from, and changed options of optimizers and schedules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

from torch.optim import Optimizer

_PLAIN = (int, float, str, bool, list, tuple, Mapping, type(None))  # values that can be compared and shown


@dataclass(frozen=True, slots=True)
class Origin:
    """The wording for the source that a run continues from: a checkpoint or an earlier fit."""

    name: str  # the source, at the start of a sentence
    has: str  # the verb for its contents
    ran: str  # the text between the name and its settings
    this: str  # the run or fit that continues from it
    template: str  # the remedy, with a placeholder for the required equality

    def remedy(self, what: str) -> str:
        """Return the remedy for a difference in ``what``, such as "the settings"."""
        return self.template.format(what=what)


CHECKPOINT = Origin(
    "The checkpoint",
    "holds",
    "was written with",
    "this run",
    "Resume with {what} it was written with, or start from its weights alone: Model.load_from_checkpoint(path), then"
    " fit without ckpt_path.",
)
EARLIER_FIT = Origin(
    "The earlier fit",
    "had",
    "ran with",
    "this fit",
    "Call fit() with {what} of the earlier fit to continue it, or make a new FederatedTrainer to start a new run.",
)


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of every parameter group, without the parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def schedule_options(schedule: Any) -> dict[str, Any]:
    """Return the plain arguments in a schedule's state; its steps do not change them."""
    given = signature(type(schedule)).parameters.keys() - {"last_epoch"}
    return {name: v for name, v in schedule.state_dict().items() if name in given and isinstance(v, _PLAIN)}


def differing_options(
    built: Sequence[Mapping[str, Any]],
    loaded: Sequence[Mapping[str, Any]],
    is_scheduled: bool,
    origin: Origin = CHECKPOINT,
) -> list[str]:
    """Return the optimizer's options that loading a state changed, as text.

    Args:
        built: The options of every group before loading.
        loaded: The options of every group after loading.
        is_scheduled: Whether a schedule changes the rates, and perhaps momentum. These then always differ, so initial
            rates, if recorded, are compared instead.
        origin: The source that the run continues from.
    """
    moving = {"lr", "momentum", "betas"} if is_scheduled else {"initial_lr"}
    found: dict[str, None] = {}
    for mine, saved in zip(built, loaded, strict=False):
        for name in mine.keys() & saved.keys() - moving:
            if mine[name] != saved[name]:
                shown = "lr" if name == "initial_lr" else name
                found[f"{shown}={saved[name]!r} ({origin.this} has {mine[name]!r})"] = None
    return sorted(found)
