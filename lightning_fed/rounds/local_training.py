"""Clients' local work: they are trained together, those that fail are found, and what the others keep is put away."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_fed.callbacks.base import call_round_hook, hears
from lightning_fed.compat.private import rank_zero_info
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.seeds import Purpose, generator
from lightning_fed.core.types import ClientId, State
from lightning_fed.engines.base import ChunkResult, Engine, RoundInputs, WorkPlan
from lightning_fed.engines.processor import denormals_as_zero
from lightning_fed.engines.vectorized.changes import changed, marks
from lightning_fed.rounds.before_work import ClientGradients, OwnSolve
from lightning_fed.rounds.local_plans import num_examples
from lightning_fed.rounds.messages import Reply, Task
from lightning_fed.server.aggregation.compression import Compressor, compress
from lightning_fed.server.client_states.state import ClientState, ClientStates
from lightning_fed.settings.settings import Settings

__all__ = ["LocalTraining", "stop_at"]


class LocalTraining:
    """Train clients, several at once where the engine does, and make their replies.

    Args:
        engine: The engine that trains them.
        settings: How rounds are run.
        gradients: Their full-batch gradients.
        own_solve: Runs the method's own solve, if it has one.

    Attributes:
        result: What the engine returned of the clients whose reply is out.
    """

    def __init__(
        self, engine: Engine, settings: Settings, gradients: ClientGradients, own_solve: OwnSolve | None
    ) -> None:
        self.engine, self.settings, self.gradients, self.own_solve = engine, settings, gradients, own_solve
        self.engines = [engine] if own_solve is None else [engine, own_solve.engine]
        self.trainer = engine.trainer
        self.begin_round()
        self._has_told = False  # that clients failed together, and how it is found out who

    def begin_round(self) -> None:
        """Let go of the last clients, and look at whether any callback hears of clients."""
        self.result: ChunkResult | None = None
        self._ended = 0  # of its clients, whose hook has been called
        self._before: tuple[Sequence[int], Sequence[State]] = ([], [])  # stored indices, and states before the work
        self._hears_start = hears(self.trainer, "on_client_start")
        self._hears_end = hears(self.trainer, "on_client_end")
        algorithm = self.engine.algorithm
        averages = bool(algorithm.full_grad_at) and algorithm.full_grad_for != "client"
        self._has_measured = averages or algorithm.population_loss

    @contextmanager
    def _attributes_kept(self, client_id: ClientId) -> Iterator[None]:
        """Refuse that ``on_client_start`` changes what full-batch gradients or losses have been taken without.

        Raises:
            FederatedError: Naming the attribute.
        """
        module = self.trainer.lightning_module
        before = marks(module)
        yield
        name = changed(before, marks(module))
        if name is not None:
            method = type(self.engine.algorithm).__name__
            raise FederatedError(
                f"on_client_start changes the attribute {name!r} of {type(module).__name__} for client {client_id!r},"
                f" after {method} has taken full-batch gradients or losses that do not have the change."
                " Put what differs between clients into their data, set it for all clients in on_round_start, and keep"
                " notes on clients in the callback."
            )

    def answer(
        self,
        reply: Callable[..., Reply],
        task: Task,
        inputs: RoundInputs,
        plans: Sequence[WorkPlan],
        states: ClientStates,
    ) -> Iterator[Reply]:
        """Train clients, put away what they keep, and yield one reply of all, or one of each that sends compressed.

        Args:
            reply: Makes a reply of clients, given what it says beside the task.
            task: What is asked.
            inputs: The same for the engine.
            plans: The clients' work.
            states: What they keep.

        Raises:
            ClientError: If a client fails and is not to be dropped, or if something fails that is no client's own
                fault.
        """
        if self._hears_start:
            for plan in plans:
                client_id = plan.participant.client_id
                with self._attributes_kept(client_id) if self._has_measured else nullcontext():
                    call_round_hook(self.trainer, "on_client_start", task.round, client_id)
                for engine in self.engines:
                    engine.client_started(client_id)
        if self._hears_start or self._hears_end:
            for engine in self.engines:
                engine.check_hooks(plans)
        failed: dict[int, ClientError] = {}
        self.result = None
        result = self._train_sound(partial(self._run, task, inputs, states), plans, failed)
        if result is None:
            yield reply(list(failed), failed=failed)
            return
        failed |= {result.participants[row].index: error for row, error in result.faults.items()}
        for error in failed.values():
            stop_at(error, self.settings.drops_failed)
        self.result, self._ended = result, 0
        yield from self._replies(reply, result, task.round, plans, states, failed)

    def _replies(
        self,
        reply: Callable[..., Reply],
        result: ChunkResult,
        round: int,
        plans: Sequence[WorkPlan],
        states: ClientStates,
        failed: dict[int, ClientError],
    ) -> Iterator[Reply]:
        clients, work = [who.index for who in result.participants], {plan.participant.index: plan for plan in plans}
        ordered = [work[index] for index in clients]
        examples = list(map(num_examples, ordered))
        own_examples = [] if self.own_solve is None else self.own_solve.examples(ordered)
        personal = self.engine.buffers.personal  # these stay with the client
        buffers = [{name: value for name, value in own.items() if name not in personal} for own in result.buffers]
        norms = self.gradients.norms_of(work, taken_anew=True) if self.engine.algorithm.full_grad_at else {}
        for at, messages in self._messages(result, round, states):
            others = [index for index in failed if index not in clients[at]]
            yield reply(
                [*clients[at], *others],
                reports=result.reports[at],
                buffers=buffers[at],
                norms=norms,
                examples=examples[at],
                own_examples=own_examples[at],
                failed=failed,
                **messages,
            )
            failed = {}

    def call_end_hooks(self, clients: Sequence[ClientId]) -> None:
        """Let callbacks hear of clients of the last reply; see :meth:`ClientWork.call_end_hooks`."""
        result = self.result
        if result is None or not self._hears_end:
            return
        rows = {report.client_id: row for row, report in enumerate(result.reports)}
        for client_id in clients:
            self.engine.point_to(result, rows[client_id])
            call_round_hook(self.trainer, "on_client_end", result.reports[rows[client_id]])
            self._ended += 1
            if self._ended < len(rows) - len(result.faults):  # others were trained together with it
                self.engine.client_ended(client_id)

    def _train_sound(
        self,
        run: Callable[[Sequence[WorkPlan]], ChunkResult],
        plans: Sequence[WorkPlan],
        failed: dict[int, ClientError],
    ) -> ChunkResult | None:
        """Train those clients that can be trained, as if the others were not there, which are added to ``failed``."""
        drops = self.settings.drops_failed
        undo = self.engine.undo_point() if drops else _nothing
        try:
            return run(plans)
        except ClientError as error:
            undo()
            if error.culprit is None or (len(plans) == 1 and not drops):
                raise
            if len(plans) == 1:
                failed[plans[0].participant.index] = error
                return None
            if drops and not self._has_told:
                self._has_told = True
                rank_zero_info(
                    f"{error} Which of them it was is found out by running them one by one; the others are then run at"
                    " once again. This is said only once."
                )
            sound = []
            for plan in plans:
                if self._train_sound(run, [plan], failed) is not None:
                    sound.append(plan)
                undo()
            if len(sound) == len(plans):
                raise  # no client alone is to blame
        return self._train_sound(run, sound, failed) if sound else None

    @denormals_as_zero()
    def _run(self, task: Task, inputs: RoundInputs, states: ClientStates, plans: Sequence[WorkPlan]) -> ChunkResult:
        """Hand out what the clients of a chunk keep, and train them."""
        engine, indices = self.engine, [plan.participant.index for plan in plans]
        has_more = bool(engine.buffers.kept) or engine.keeps_solver
        together = None if has_more else states.of_all(indices)
        each = states.of_each(indices) if together is None else []
        buffers = each[0].buffers if engine.buffers.kept else {}  # engines that run several refuse these
        engine.buffers.write({**task.buffers, **buffers})
        solvers = [state.solver for state in each] if engine.keeps_solver else [{}] * len(plans)
        own: Sequence[State] = [state.own for state in each] if together is None else together
        failed: dict[int, ClientError] = {}
        if self.own_solve is not None:
            own, failed = self.own_solve.run(inputs, plans, own)
            engine.buffers.write({**task.buffers, **buffers})
        self._before = indices, own
        if engine.algorithm.full_grad_at:
            inputs = replace(inputs, full_grad=self.gradients.of_workers(inputs, plans))
        result = engine.run(inputs, plans, own, solvers)
        faults = {row: failed[who.index] for row, who in enumerate(result.participants) if who.index in failed}
        return replace(result, faults={**result.faults, **faults}) if faults else result

    def _messages(
        self, result: ChunkResult, round: int, states: ClientStates
    ) -> Iterator[tuple[slice, dict[str, Any]]]:
        """Put away what clients keep, and yield the rows that a reply is of with what it says of their messages."""
        compressor = self.settings.compression
        sound = [row for row in result.asked if row not in result.faults]
        sending = [row for row in sound if result.reports[row].steps or not self.engine.algorithm.local_work]
        if compressor is None or not sound:
            self._keep_all(result, states, sending)
            models = result.shared if result.sends_delta else None
            sent = {"send": result.send, "implied": result.implied, "models": models, "changes": result.delta}
            yield slice(None), sent
            return
        kept = self._kept(result)
        for row in sound:
            send, size = State(), 0
            if row in sending:
                send, residuals, size = self._compressed(compressor, result, row, round, states)
                self._keep(result, states, row, kept[row], residuals)
            at = slice(row, row + 1)
            yield at, {"send": send, "message_bytes": size, "changes": result.delta[at]}

    def _compressed(
        self, compressor: Compressor, result: ChunkResult, row: int, round: int, states: ClientStates
    ) -> tuple[State, State, int]:
        """Return what the server gets of a client's messages [1, ...], what the client keeps of them, and the bytes."""
        algorithm, index = self.engine.algorithm, result.participants[row].index
        send = {name: value[row] for name, value in result.send.items() if name not in algorithm.aside}
        residuals = states.residuals(index, send) if compressor.error_feedback else {}
        stream = generator(self.engine.seed, Purpose.COMPRESSION, round, index)
        sent, residuals, size = compress(compressor, send, residuals, stream, algorithm.uncompressed)
        return {name: value[None] for name, value in sent.items()}, residuals, size

    def _keep_all(self, result: ChunkResult, states: ClientStates, rows: Sequence[int]) -> None:
        """Put away what several clients keep, at once where that is their method's state alone."""
        if len(rows) > 1 and result.keeps_states_only:
            ordered, some = sorted(rows), len(rows) < len(result.reports)
            keep = {name: value[ordered] if some else value for name, value in result.keep.items()}
            states.keep_all([result.participants[row].index for row in ordered], keep)
            return
        kept = self._kept(result)
        for row in rows:
            self._keep(result, states, row, kept[row], {})

    def _kept(self, result: ChunkResult) -> list[State]:
        """Return what each client keeps: copies of what it had, which new ones share, where that is nothing new."""
        if result.keep:
            return result.kept()
        had = dict(zip(*self._before, strict=True))
        return [{name: value.clone() for name, value in had[who.index].items()} for who in result.participants]

    def _keep(self, result: ChunkResult, states: ClientStates, row: int, kept: State, residuals: State) -> None:
        """Put away what one client keeps."""
        solver = result.solver[row] if result.solver else {}
        names = self.engine.buffers.kept if result.buffers else ()
        buffers = {name: result.buffers[row][name] for name in names}
        if kept or solver or buffers or residuals:
            states.keep(result.participants[row].index, ClientState(kept, buffers, solver, residuals).joined())


def stop_at(error: ClientError, drops: bool) -> None:
    """Raise an error that is not a reason to leave a client out, given whether there is any."""
    if not drops or error.culprit is None:
        raise error


def _nothing() -> None:
    """Take nothing back, where the run stops anyway."""
