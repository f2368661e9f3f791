"""Clients that answer from elsewhere, as the rounds of a fit see them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.rounds import ClientReport
from lightning_fed.core.types import ClientId, State
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.deploy.announced import Announced, Announcements
from lightning_fed.deploy.handoff import Handoff
from lightning_fed.deploy.message import MEASURE
from lightning_fed.engines.base import ChunkResult, Engine, RoundInputs, WorkPlan
from lightning_fed.engines.prepared import PreparedModule
from lightning_fed.rounds.client_work import ClientWork, gradients_together
from lightning_fed.rounds.local_plans import LocalPlans, limited
from lightning_fed.rounds.messages import GRADIENTS, Reply, Task
from lightning_fed.server.client_states.state import ClientStates
from lightning_fed.server.participation import Participant, Population
from lightning_fed.server.server import Server

__all__ = ["Asked", "RemoteClients", "RemoteData"]


@dataclass(frozen=True, slots=True)
class Asked:
    """A phase that waits for replies."""

    task: Task
    attempt: int  # how often this round was begun before; of measurements, how many there were before in the round
    what: str = ""  # "loss", "val" or "train" if something is measured ...
    steps: int = 0  # ... after these local steps ...
    own: bool = False  # ... of the clients' own models


class RemoteData(FederatedDataModule):
    """The clients of a server that has none of their data, but may have its own validation set."""

    def __init__(self, announced: Mapping[ClientId, Announced], val: Any = None) -> None:
        sizes = {known.batch_size for known in announced.values() if known.batch_size}
        super().__init__(batch_size=min(sizes, default=1))
        self.client_ids = list(announced)
        self.val = val
        self._announced = announced

    @property
    def known_sizes(self) -> list[int]:
        """Each client's number of examples, in the order of ``client_ids``."""
        return [known.size for known in self._announced.values()]

    def client_size(self, client_id: ClientId) -> int:
        """Return a client's number of examples."""
        return self._announced[client_id].size

    def client_val_dataset(self, client_id: ClientId) -> Any:
        """Return what has the length of a client's validation set, None if it has none."""
        size = self._announced[client_id].val_size
        return range(size) if size else None

    def client_batches(self, client_id: ClientId) -> NoReturn:
        """Refuse: the data is not here."""
        raise FederatedError(
            f"The data of client {client_id!r} are on its site. What looks at clients' data from the server, such as a"
            " callback that measures gradients, works in a simulation only: leave it out of callbacks."
        )


class _NoEngine(Engine):
    """Stands where a simulation has its engine."""

    name = "elsewhere"

    def chunks(self, plans: Sequence[WorkPlan]) -> Iterator[Sequence[WorkPlan]]:
        """Yield nothing: nobody is trained here."""
        yield from ()

    def run(
        self, inputs: RoundInputs, plans: Sequence[WorkPlan], clients: Sequence[State], solvers: Sequence[State]
    ) -> ChunkResult:
        """Refuse to train."""
        raise FederatedError("The clients of this run are trained on their sites.")


class RemoteClients(ClientWork):
    """Hand tasks to whoever drives the run, and yield the replies that it is given."""

    def __init__(
        self, prepared: PreparedModule, population: Population, sites: Announcements, handoff: Handoff
    ) -> None:
        plans = LocalPlans(prepared.trainer, prepared.settings, population)
        super().__init__([_NoEngine(prepared)], plans, prepared.settings)
        self._sites, self._handoff, self._attempt = sites, handoff, -1
        self._measured_in, self._measured = -1, 0  # the round, and the measurements in it
        self._replied: dict[ClientId, tuple[ClientReport, int]] = {}  # with the examples that each went through

    def hello(
        self, drawn: Mapping[ClientId, int], round: int, failed: Callable[[ClientError], None] | None = None
    ) -> list[Participant]:
        """Return those of the clients drawn that are there and have examples; see :meth:`ClientWork.hello`."""
        trainer, members = self.trainer, []
        self._attempt = -1
        for client_id, count in drawn.items():
            known = self._sites.known[client_id]
            if client_id in self._sites.absent:
                error = ClientError(f"Client {client_id!r} has not said hello.", client_id)
                if failed is None:
                    raise error
                failed(error)
            elif known.size:
                batches = limited(known.batches, trainer.limit_train_batches) * self.algorithm.steps_per_batch
                steps = self.settings.steps(batches, trainer.accumulate_grad_batches)
                index = self.plans.population.index_of(client_id)
                members.append(Participant(client_id, index, known.size, count, steps))
        return members

    def begin(self, round: int, members: Sequence[Participant], reads_later: bool = False) -> None:
        """Begin a round, or begin it again; reports arrive complete."""
        self._attempt += 1
        self._replied = {}

    def end(self) -> None:
        """Let go of the round."""

    def chunks(self, task: Task, clients: Sequence[int]) -> list[Sequence[int]]:
        """Return all clients: they are asked at once."""
        return [clients] if clients else []

    def answer(self, task: Task, clients: Sequence[int], states: ClientStates) -> Iterator[Reply]:
        """Yield the replies that the driver hands in, until it closes the phase.

        Gradients of small models are put together as a simulation puts them together: their sum has its bits.
        """
        most = gradients_together(task.x) if task.phase == GRADIENTS else 1
        waiting: dict[int, Reply] = {}
        while (reply := self._handoff.pause(Asked(task, self._attempt))) is not None:
            if most > 1:
                waiting[reply.clients[0]] = reply
                continue
            yield reply
            for report, examples in zip(reply.reports, reply.examples, strict=True):
                self._replied[report.client_id] = report, examples
        group: list[Reply] = []
        for index in clients:
            reply = waiting.get(index)
            if group and (reply is None or reply.failed or len(group) == most):
                yield _joined(group)
                group = []
            if reply is not None and reply.failed:
                yield reply
            elif reply is not None:
                group.append(reply)
        if group:
            yield _joined(group)

    def measure_on_sites(
        self, what: str, steps: int, client_ids: Sequence[ClientId], own: bool
    ) -> dict[ClientId, dict[str, float]]:
        """Return what sites measure of the clients that are there and answer; see :class:`Asked`."""
        loop: Any = self.trainer.fit_loop
        server: Server = loop.state
        if self._measured_in != server.round:
            self._measured_in, self._measured = server.round, 0
        self._measured += 1
        client_ids = [client_id for client_id in client_ids if client_id not in self._sites.absent]
        if not client_ids:
            return {}
        indices = tuple(map(self.plans.population.index_of, client_ids))
        x, state = (server.x, server.state) if own else (server.shown(), State())
        task = Task(server.round, MEASURE, indices, {}, x, state, buffers=server.buffers)
        found: dict[ClientId, dict[str, float]] = {}
        while (reply := self._handoff.pause(Asked(task, self._measured - 1, what, steps, own))) is not None:
            found |= {report.client_id: dict(report.metrics) for report in reply.reports}
        return {client_id: found[client_id] for client_id in client_ids if client_id in found}

    def end_training(self) -> None:
        """Log what the clients have logged, as the engine of a simulation does while they work."""
        results = self.trainer.fit_loop.epoch_loop._results
        for client_id in sorted(self._replied, key=self.plans.population.index_of):
            report, examples = self._replied[client_id]
            for name, value in report.metrics.items():
                flags = {"on_step": False, "on_epoch": True, "batch_size": examples}
                results.log("training_step", name, torch.tensor(value), **flags)

    def call_end_hooks(self, clients: Sequence[ClientId]) -> None:
        """Call no hook: a client's model is not here."""


def _joined(replies: Sequence[Reply]) -> Reply:
    """Return the gradients of several clients as one reply."""
    if len(replies) == 1:
        return replies[0]
    first = replies[0]
    points = {point for reply in replies for point in reply.norms}
    return replace(
        first,
        clients=[reply.clients[0] for reply in replies],
        send={name: torch.cat([reply.send[name] for reply in replies]) for name in first.send},
        norms={point: {i: n for reply in replies for i, n in reply.norms.get(point, {}).items()} for point in points},
        server_read=frozenset().union(*(reply.server_read for reply in replies)),
        cohort_grad_read=frozenset().union(*(reply.cohort_grad_read for reply in replies)),
    )
