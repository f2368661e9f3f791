"""The clients' half of a round: what is asked of clients is answered with an engine and their data."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lightning_fed.callbacks.base import call_round_hook, hears
from lightning_fed.core.errors import ClientError
from lightning_fed.core.types import ClientId, State, Vector
from lightning_fed.core.watched import Watched
from lightning_fed.engines.base import ChunkResult, Engine, RoundInputs, WorkPlan
from lightning_fed.engines.client_errors import NamesClient
from lightning_fed.rounds.chunks import ChunkReplies, SoundClients
from lightning_fed.rounds.client_gradients import ClientGradients
from lightning_fed.rounds.local_plans import LocalPlans, RoundPlans
from lightning_fed.rounds.messages import GRADIENTS, LOSS, TRAIN, Reply, Task
from lightning_fed.rounds.own_solve import OwnSolve
from lightning_fed.server.aggregation import Participant
from lightning_fed.server.client_state import ClientStates
from lightning_fed.settings import Settings

__all__ = ["ClientWork", "gradients_together"]

_TOGETHER = 2**16  # numbers in the gradients of clients that answer at once


class ClientWork:
    """Answers for clients, one or several at a time.

    It knows their data, an engine, and what they keep; neither the server nor its optimizer. A round is::

        members = work.hello(drawn, round)
        work.begin(round, members)
        for task in ...:  # of each phase, from the server
            for clients in work.chunks(task, [member.index for member in members]):
                for reply in work.answer(task, clients, states):
                    ...  # its tensors are valid until the next one
        work.end()

    A client that is asked to train before it was asked for the gradients that it needs takes them then.

    Args:
        engine: Runs clients.
        plans: Plans their work from their data.
        settings: How rounds are run.
        own_solve: Runs the method's own solve, if it has one.
    """

    def __init__(
        self, engine: Engine, plans: LocalPlans, settings: Settings, own_solve: OwnSolve | None = None
    ) -> None:
        self.engine, self.plans, self.settings = engine, plans, settings
        self.algorithm, self.trainer, self._own_solve = engine.algorithm, engine.trainer, own_solve
        self._round: RoundPlans | None = None
        self._training: list[int] = []  # the clients that are to train, by stored index
        self._gradients = ClientGradients(engine)
        self._inputs: tuple[Task, RoundInputs] | None = None  # what the engine makes of a task
        self._read: tuple[set[str], set[str]] = (set(), set())  # of the server state, and of the mean gradients
        self._before: tuple[Sequence[int], Sequence[State]] = ([], [])  # stored indices, and states before the work
        self._result: ChunkResult | None = None  # of the clients whose reply is out
        self._hears = {"on_client_start": False, "on_client_end": False}
        self._sound = SoundClients(engine, settings.drops_failed)

    # ------------------------------------------------------------------ a round

    def hello(
        self, drawn: Mapping[ClientId, int], round: int, failed: Callable[[ClientError], None] | None = None
    ) -> list[Participant]:
        """Return those of the clients drawn that can take part, with their sizes and the steps of their work.

        Args:
            drawn: How often each client was drawn.
            round: The round.
            failed: Is told of clients whose data cannot be made.

        Raises:
            ClientError: If that of a client cannot, and nobody is told.
        """
        return self._plans_of(round).of_drawn(drawn, failed)

    def _plans_of(self, round: int) -> RoundPlans:
        if self._round is None or self._round.round != round:
            self._round = self.plans.for_round(round)
        return self._round

    def begin(self, round: int, members: Sequence[Participant]) -> None:
        """Begin a round, or begin it again.

        Args:
            round: The round.
            members: The clients that are to train here, with the steps asked of them.
        """
        self._training, self._inputs, self._read = [member.index for member in members], None, (set(), set())
        self._gradients, self._result = ClientGradients(self.engine, len(members)), None
        self._hears = {hook: hears(self.trainer, hook) for hook in ("on_client_start", "on_client_end")}
        plans = self._plans_of(round)
        work = [plans.of(member.index, member.steps) for member in members]
        self.engine.begin_round(work)
        if self._own_solve is not None:
            self._own_solve.begin_round(work)

    def end(self) -> None:
        """Let go of the round and of its data: the next round's need not lie beside them."""
        self._round = self._inputs = self._result = None
        self._training, self._gradients, self._before = [], ClientGradients(self.engine), ([], [])

    def chunks(self, task: Task, clients: Sequence[int]) -> list[Sequence[int]]:
        """Return the clients that are to be asked together, by stored index, of those that are here."""
        if task.phase == TRAIN:
            chunks = self.engine.chunks(self._work_of(task, clients))
            return [[plan.participant.index for plan in plans] for plans in chunks]
        if task.phase == GRADIENTS and self._gradients.keeps:
            clients = list(dict.fromkeys([*clients, *self._training]))
        return [clients] if clients else []

    def answer(self, task: Task, clients: Sequence[int], states: ClientStates) -> Iterator[Reply]:
        """Yield replies for some clients.

        Args:
            task: What is asked.
            clients: The clients, by stored index; see :meth:`chunks`.
            states: What they keep.

        Raises:
            ClientError: If a client fails and is not to be dropped, or if something fails that is no client's own
                fault.
        """
        if task.phase == GRADIENTS:
            return self._answer_gradients(task, clients)
        if task.phase == LOSS:
            return self._answer_loss(task, clients)
        return self._train(task, clients, states)

    def _work_of(self, task: Task, clients: Sequence[int]) -> list[WorkPlan]:
        plans = self._plans_of(task.round)
        return [plans.of(index, task.steps.get(index)) for index in clients]

    def members(self, task: Task, clients: Sequence[int]) -> list[Participant]:
        """Return clients by stored index, with the steps that a task asks of them."""
        return [plan.participant for plan in self._work_of(task, clients)]

    def _inputs_of(self, task: Task) -> RoundInputs:
        """Return a task as engines read it; what they read of it is noted."""
        if self._inputs is None or self._inputs[0] is not task:
            server, cohort_grad = (
                Watched(state, read) for state, read in zip((task.server, task.cohort_grad), self._read, strict=True)
            )
            self._inputs = task, RoundInputs(task.round, task.x, server, {}, cohort_grad, task.mean_examples)
        return self._inputs[1]

    def _stop_at(self, error: ClientError) -> None:
        """Raise an error that is not a reason to leave a client out."""
        if not self.settings.drops_failed or error.culprit is None:
            raise error

    # ------------------------------------------------------------------ gradients, and the loss

    def _answer_gradients(self, task: Task, clients: Sequence[int]) -> Iterator[Reply]:
        """Yield replies of clients, of several in one where the model is small."""
        asked, most = set(task.clients), gradients_together(task.x)
        ready: list[tuple[int, State]] = []
        for plan, gradients in self._gradients.each(self._inputs_of(task), self._work_of(task, clients)):
            index = plan.participant.index
            is_failure = isinstance(gradients, ClientError)
            if ready and (is_failure or len(ready) == most or (index in asked) != (ready[0][0] in asked)):
                yield self._gradient_reply(task, ready, ready[0][0] in asked)
                ready = []
            if isinstance(gradients, ClientError):
                self._stop_at(gradients)
                yield self._reply(task, [index], failed={index: gradients})
            else:
                ready.append((index, gradients))
        if ready:
            yield self._gradient_reply(task, ready, ready[0][0] in asked)

    def _gradient_reply(self, task: Task, ready: Sequence[tuple[int, State]], sends: bool) -> Reply:
        """Return a reply of clients that have their gradients."""
        indices, gradients = zip(*ready, strict=True)
        send: State = {}
        if sends and len(ready) == 1:
            send = {point: value[None] for point, value in gradients[0].items()}
        elif sends:
            send = {point: torch.stack([own[point] for own in gradients]) for point in self.algorithm.full_grad_at}
        return self._reply(task, indices, send=send, norms=self._gradients.norms_of(indices))

    def _answer_loss(self, task: Task, clients: Sequence[int]) -> Iterator[Reply]:
        """Yield one reply for all clients, whose losses are added up."""
        engine, total, examples = self.engine, 0.0, 0
        failed: dict[int, ClientError] = {}
        for index in clients:
            self.trainer._signal_connector.check()
            client_id = self.plans.population.ids[index]
            try:
                with NamesClient(client_id, task.round, "the population's loss", lambda: None):
                    batches = self.trainer.datamodule.client_batches(client_id)
                    loss = engine.loss_at(task.x, batches, task.round, index)
                    if not math.isfinite(loss):
                        raise ClientError(f"its loss is {loss:g}. Lower the rates, or look at its data.")
            except ClientError as error:
                self._stop_at(error)
                failed[index] = error
                continue
            total += loss
            examples += batches.size
        total = sum(engine.split.gather(total))
        yield self._reply(task, clients, loss=total, loss_examples=examples, failed=failed)

    # ------------------------------------------------------------------ local work

    def _train(self, task: Task, clients: Sequence[int], states: ClientStates) -> Iterator[Reply]:
        engine, plans = self.engine, self._work_of(task, clients)
        if self._hears["on_client_start"]:
            for plan in plans:
                call_round_hook(self.trainer, "on_client_start", task.round, plan.participant.client_id)
            engine.check_hooks()
        self._result = None
        result = self._sound.train(partial(self._run, task, states), plans)
        failed = dict(self._sound.failed)
        if result is None:
            yield self._reply(task, list(failed), failed=failed)
            return
        failed |= {result.participants[row].index: error for row, error in result.faults.items()}
        for error in failed.values():
            self._stop_at(error)
        self._result = result
        work = {plan.participant.index: plan for plan in plans}
        ordered = [work[who.index] for who in result.participants]
        examples = [_examples(plan) for plan in ordered]
        own_examples = [] if self._own_solve is None else self._own_solve.examples(ordered)
        chunk = ChunkReplies(engine, result, states, self._before, self.settings.compression, task.round)
        norms = self._gradients.norms_of(work, taken_anew=True) if self.algorithm.full_grad_at else {}
        yield from chunk.each(partial(self._reply, task, norms=norms), examples, own_examples, failed)

    def _run(self, task: Task, states: ClientStates, plans: Sequence[WorkPlan]) -> ChunkResult:
        """Hand out what the clients of a chunk keep, and train them.

        Args:
            task: What is asked.
            states: What clients keep.
            plans: The clients' work.
        """
        engine, indices = self.engine, [plan.participant.index for plan in plans]
        has_more = bool(engine.buffers.kept) or engine.keeps_solver
        together = None if has_more else states.of_all(indices)
        each = states.of_each(indices) if together is None else []
        buffers = each[0].buffers if engine.buffers.kept else {}  # engines that run several refuse these
        engine.buffers.write({**task.buffers, **buffers})
        solvers = [state.solver for state in each] if engine.keeps_solver else [{}] * len(plans)
        own: Sequence[State] = [state.own for state in each] if together is None else together
        inputs, failed = self._inputs_of(task), dict[int, ClientError]()
        if self._own_solve is not None:
            own, failed = self._own_solve.run(inputs, plans, own)
            engine.buffers.write({**task.buffers, **buffers})
        self._before = indices, own
        if self.algorithm.full_grad_at:
            inputs = replace(inputs, full_grad=self._gradients.of_workers(inputs, plans))
        result = engine.run(inputs, plans, own, solvers)
        faults = {row: failed[who.index] for row, who in enumerate(result.participants) if who.index in failed}
        return replace(result, faults={**result.faults, **faults}) if faults else result

    def end_training(self) -> None:
        """Finish what is done once for all clients that were trained here in this round."""
        self.engine.end_round()
        if self._own_solve is not None:
            self._own_solve.engine.end_round()

    def call_end_hooks(self, clients: Sequence[ClientId]) -> None:
        """Let callbacks hear of clients of the last reply that are done.

        Args:
            clients: Those whose answers count.
        """
        result = self._result
        if result is None or not self._hears["on_client_end"]:
            return
        rows = {report.client_id: row for row, report in enumerate(result.reports)}
        for client_id in clients:
            self.engine.point_to(result, rows[client_id])
            call_round_hook(self.trainer, "on_client_end", result.reports[rows[client_id]])

    def _reply(self, task: Task, clients: Sequence[int], **parts: Any) -> Reply:
        server, cohort_grad = self._read
        read: dict[str, Any] = {"server_read": frozenset(server), "cohort_grad_read": frozenset(cohort_grad)}
        return Reply(task.round, task.phase, clients, **read, **parts)


def gradients_together(x: Vector) -> int:
    """Return how many clients' gradients are summed at once, which decides on the last bits of a sum.

    Args:
        x: The parameters [P].
    """
    return max(1, _TOGETHER // len(x))


def _examples(plan: WorkPlan) -> int:
    """Return how many examples a client goes through in its local epochs."""
    return sum(plan.batches.num_examples(batches) for batches in plan.epochs)
