"""The server's task as a message, and back: every number and tensor that decides on a site's work is checked here."""

import math
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_fed.callbacks.client_metrics import ClientAccuracy
from lightning_fed.core.arguments import finite
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import State
from lightning_fed.data.partitions.partition import check_client_ids
from lightning_fed.deploy.message import MEASURE, MOST_STEPS, Fields, Message, check_tensors, parts_of, prefixed, quoted
from lightning_fed.rounds.messages import GRADIENTS, LOSS, TRAIN, Task
from lightning_fed.server.aggregation.mean import averaged_points
from lightning_fed.settings.settings import Settings

_FIT = re.compile(r"[0-9a-f]{8}")


def shared_part(task: Task, moved_buffers: set[str], base: State | None = None) -> State:
    """Return the tensors of a task that are the same for all clients, as copies on the CPU.

    Only buffers that have moved are sent, and base weights of adapters: sites have the others from their module.
    """
    buffers = {name: value for name, value in task.buffers.items() if name in moved_buffers}
    parts = {"server": task.server, "cohort_grad": task.cohort_grad, "buffers": buffers, "base": base or {}}
    named = [prefixed(part, state) for part, state in parts.items()]
    return {name: value.detach().cpu().clone() for own in ({"x": task.x}, *named) for name, value in own.items()}


def task_in(message: Message, index: int, x: Tensor, buffers: State, base: State) -> tuple[Task, State, State]:
    """Return the task in a message, what the server still keeps for the client, and the base weights of adapters.

    ``x``, ``buffers`` and ``base`` are those of the site's module, which others must resemble in shape and type. Its
    own buffers stand in for those that are not sent.
    """
    who, header, parts = f"The task for client {message.client!r}", message.header, parts_of(message, x.device)
    if "x" not in message.tensors:
        raise FederatedError(f"{who} has no parameters x.")
    if parts["base"] and parts["base"].keys() != base.keys():
        raise FederatedError(
            f"{who} has {len(parts['base'])} base weights of adapters, and this site's module has {len(base)} that"
            " change."
        )
    sent = {"x": message.tensors["x"], **prefixed("buffers", parts["buffers"]), **prefixed("base", parts["base"])}
    check_tensors(who, sent, {"x": x, **prefixed("buffers", buffers), **prefixed("base", base)})
    steps = header.get("steps")
    task = Task(
        round=header["round"],
        phase=header["phase"],
        clients=(index,),
        steps={} if steps is None else {index: steps},
        x=message.tensors["x"].to(x.device),
        server=parts["server"],
        cohort_grad=parts["cohort_grad"],
        buffers={**buffers, **parts["buffers"]},
        mean_examples=math.nan if header.get("mean_examples") is None else header["mean_examples"],
        first_step=header["first_step"],
    )
    return task, parts["keep"], parts["base"]


def check_registration(message: Message) -> None:
    """Raise if a registration request lacks the run's clients or the server's facts."""
    who = f"The server's registration request to client {message.client!r}"
    for facts in map(message.header.get, ("facts", "optimizer")):
        if not isinstance(facts, Mapping) or not all(isinstance(fact, str) for pair in facts.items() for fact in pair):
            raise FederatedError(
                f"{who} does not contain the server's settings. Use the same version of lightning_fed everywhere."
            )
    check_client_ids(f"{who}: its clients", message.header.get("clients"))


class TaskChecks:
    """Check tasks against the trainer of the site: its method, and the work that it plans for a round."""

    def __init__(self, trainer: Any) -> None:
        settings: Settings = trainer.fit_loop.settings
        self._trainer, self._settings, self._algorithm = trainer, settings, settings.algorithm
        self._is_private = settings.is_private or settings.client_privacy is not None
        self._measured = max((c.steps for c in trainer.callbacks if isinstance(c, ClientAccuracy)), default=0)

    def check_phase(self, message: Message) -> None:
        """Refuse phases that the method does not have, and measures under differential privacy."""
        phase = message.header["phase"]
        if self._is_private and phase == MEASURE:
            name = "client_privacy" if self._settings.client_privacy else "DifferentialPrivacy"
            raise FederatedError(
                f"The server asks for {phase!r}, and this site runs {name}: measures are neither"
                " clipped nor noisy. Leave out callbacks and options that measure clients."
            )
        answered = {
            TRAIN: True,
            GRADIENTS: bool(averaged_points(self._algorithm, message.header["round"])),
            LOSS: self._algorithm.population_loss,
            MEASURE: not self._is_private,
        }
        allowed = [name for name, is_answered in answered.items() if is_answered]
        if phase not in allowed:
            raise FederatedError(
                f"The server asks for {quoted(phase)}, which {type(self._algorithm).__name__} does not need: this site"
                f" answers {', '.join(map(repr, allowed))}."
            )

    def check_numbers(self, message: Message, planned: int) -> None:
        """Refuse numbers out of bounds, given the local steps that the site's trainer plans for the client."""
        header, number = message.header, message.header["round"]
        fields, is_measure = Fields(f"The task for client {message.client!r}", header), header["phase"] == MEASURE
        fields.count("state", most=number + is_measure)
        for name in ("of", "fit"):  # it is part of a file's name
            fields.text(name, _FIT, "a name of 8 hex digits")
        if header.get("steps") is not None:
            fields.count("steps", most=planned)
        if is_measure:
            fields.check("what", header.get("what") in ("loss", "val", "train"), "'loss', 'val' or 'train'")
            fields.check("own", isinstance(header.get("own"), bool), "true or false")
            fields.count("local_steps", most=max(planned, self._measured))
        mean = header.get("mean_examples")
        fields.check("mean_examples", mean is None or finite(mean) >= 0, "a number of examples")
        plateaus: Any = header.get("plateaus")
        configs = [config for config in self._trainer.lr_scheduler_configs if config.reduce_on_plateau]
        keys = [config.scheduler.state_dict().keys() for config in configs]
        is_list = isinstance(plateaus, list) and all(isinstance(state, Mapping) for state in plateaus)
        is_own = is_list and [state.keys() for state in plateaus] == keys
        fields.check("plateaus", is_own, "the state of the schedules of this site's module")
        # A step of the run that it can be at in this round: to get there takes time
        least, most = 0, number * MOST_STEPS
        if self._settings.local_schedule != "total":
            most = 0
        elif self._settings.local_steps is not None:
            least = most = number * self._settings.local_steps
        fields.count("first_step", least, most)
