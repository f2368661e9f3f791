"""Check a server's task: every number of it has its bounds here, which limit the site's work."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_fed.callbacks.client_metrics import ClientAccuracy
from lightning_fed.core.arguments import check_number, finite
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId, State
from lightning_fed.data.partitions import check_client_ids
from lightning_fed.deploy.message import MEASURE, MOST_STEPS, Message, is_count, quoted
from lightning_fed.rounds.messages import GRADIENTS, LOSS, TRAIN, Task
from lightning_fed.server.aggregation.mean import averaged_points
from lightning_fed.server.privacy import ClientPrivacy
from lightning_fed.settings.settings import Settings

_RUN, _FIT = re.compile(r"[0-9a-f]{16}"), re.compile(r"[0-9a-f]{8}")


def check_header(message: Message) -> None:
    """Refuse a run whose name cannot be a folder's, and rounds that cannot be."""
    header = message.header
    if not _RUN.fullmatch(header["run"]):
        raise FederatedError(
            f"A site has received a task of run {quoted(header['run'])}: a run's name is 16 hex digits."
        )
    for name in ("round", "attempt"):
        _check_int("A task", name, header[name], 0, MOST_STEPS)


def check_registration(message: Message) -> None:
    """Raise if a registration request lacks the run's clients or the server's facts."""
    who = f"The server's registration request to client {message.client!r}"
    for facts in map(message.header.get, ("facts", "optimizer")):
        if not isinstance(facts, Mapping) or not all(isinstance(fact, str) for pair in facts.items() for fact in pair):
            raise FederatedError(
                f"{who} does not contain the server's settings. Use the same version of lightning_fed everywhere."
            )
    check_client_ids(f"{who}: its clients", message.header.get("clients"))


def check_budget(max_epsilon: Any, delta: Any, privacy: ClientPrivacy | None) -> None:
    """Raise for a budget of privacy that is not one, or that nothing is accounted for."""
    for name, value, interval in (("max_epsilon", max_epsilon, "(0, inf)"), ("delta", delta, "(0, 1)")):
        if value is None:
            continue
        check_number("FederatedSite", name, value, interval)
        if privacy is None:
            raise FederatedError(
                f"FederatedSite({name}={value!r}): the trainer has no client_privacy, so nothing would bound what"
                " answers reveal of an example. Set client_privacy=ClientPrivacy(...) for the server and all sites."
            )


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
        header, client = message.header, message.client
        who, number = f"The task for client {client!r}", header["round"]
        is_measure = header["phase"] == MEASURE
        _check_int(who, "state", header.get("state"), 0, number + is_measure)
        for name in ("of", "fit"):
            if not isinstance(fit := header.get(name), str) or not _FIT.fullmatch(fit):  # it is part of a file's name
                raise FederatedError(f"{who} has {name} = {quoted(fit)}: this site takes 8 hex digits.")
        if header.get("steps") is not None:
            _check_int(who, "steps", header["steps"], 0, planned)
        if is_measure:
            if header.get("what") not in ("loss", "val", "train") or not isinstance(header.get("own"), bool):
                raise FederatedError(f"{who} asks to measure {quoted(header.get('what'))}, which no site measures.")
            _check_int(who, "local_steps", header.get("local_steps"), 0, max(planned, self._measured))
        mean = header.get("mean_examples")
        if mean is not None and not finite(mean) >= 0:
            raise FederatedError(f"{who} has mean_examples = {quoted(mean)}, which must be a number of examples.")
        self._check_plateaus(who, header.get("plateaus"))
        # A step of the run that it can be at in this round: to get there takes time
        least, most = 0, number * MOST_STEPS
        if self._settings.local_schedule != "total":
            most = 0
        elif self._settings.local_steps is not None:
            least = most = number * self._settings.local_steps
        _check_int(who, "first_step", header.get("first_step", 0), least, most)

    def _check_plateaus(self, who: str, found: Any) -> None:
        configs = [config for config in self._trainer.lr_scheduler_configs if config.reduce_on_plateau]
        own = [config.scheduler.state_dict().keys() for config in configs]
        if not isinstance(found, list) or [isinstance(state, Mapping) and state.keys() for state in found] != own:
            raise FederatedError(f"{who} has schedules that this site's module does not have: use the same module.")

    def check_tensors(
        self, task: Task, client: ClientId, x: Tensor, buffers: State, base: State, own_base: State
    ) -> None:
        """Refuse parameters, buffers and base weights of adapters that are not the module's in shape and type."""
        if base and base.keys() != own_base.keys():
            raise FederatedError(
                f"The task for client {client!r} has {len(base)} base weights of adapters, and this site's module has"
                f" {len(own_base)} that change."
            )
        for name, value, like in [
            ("x", task.x, x),
            *((f"buffer {name!r}", value, buffers.get(name)) for name, value in task.buffers.items()),
            *((f"base weight {name}", value, own_base[name]) for name, value in base.items()),
        ]:
            if like is None or value.shape != like.shape or value.dtype != like.dtype:
                wanted = "no such buffer" if like is None else f"{list(like.shape)} of {like.dtype}"
                raise FederatedError(
                    f"The task for client {client!r} has the {name} of shape {list(value.shape)} and type"
                    f" {value.dtype}; this site's module has {wanted}."
                )


def _check_int(who: str, name: str, value: Any, least: int, most: int) -> None:
    if not is_count(value, least, most):
        raise FederatedError(
            f"{who} has {name} = {quoted(value)}: this site takes a whole number from {least} to {most}."
        )
