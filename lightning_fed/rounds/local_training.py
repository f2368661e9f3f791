"""Clients' local work, a chunk at a time: gradients before training, the inner solve, training, and its results."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_fed.callbacks.base import any_uses_hook, call_round_hook
from lightning_fed.compat.private import rank_zero_warn
from lightning_fed.core.devices import are_equal, numbers_of
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.seeds import Purpose, derive_seed, generator, seed_global
from lightning_fed.core.types import ClientId, State
from lightning_fed.engines.base import ChunkResult, Engine, OnlySequentialError, RoundInputs, WorkPlan
from lightning_fed.engines.client_settings import FrozenParameters, SettingsSnapshot
from lightning_fed.engines.prepared import PreparedModule
from lightning_fed.engines.processor import denormals_as_zero
from lightning_fed.rounds.failures import Isolation, stop_at
from lightning_fed.rounds.local_plans import limited, num_examples
from lightning_fed.rounds.messages import Reply, Task
from lightning_fed.server.aggregation.compression import compress
from lightning_fed.server.attacks import attacked
from lightning_fed.server.client_states.state import LOCAL_STEPS, PERSONAL, ClientState, ClientStates, Stacked
from lightning_fed.server.participation import Participant
from lightning_fed.settings.settings import Settings, cut

_CACHE_BYTES = 2**30  # limit on full-batch gradients cached between their averaging and the local work


class Outgoing:
    """Stages the states and yields the messages of a chunk; ``attackers`` has the stored indices of bad clients."""

    def __init__(self, engine: Engine, settings: Settings, attackers: frozenset[int] = frozenset()) -> None:
        self.engine, self.compressor = engine, settings.compression
        self.attack, self.attackers = settings.attack, attackers

    def of(
        self, result: ChunkResult, before: Sequence[State], round: int, states: ClientStates
    ) -> Iterator[tuple[slice, dict[str, Any]]]:
        """Stage the clients' new states, and yield the rows of each reply with its messages.

        There is one reply for all clients, or one per client if messages are compressed or a client is bad. ``before``
        has the clients' states before the work, in the order of :attr:`ChunkResult.asked`.
        """
        sound = [row for row in result.asked if row not in result.faults]
        sending = sound
        if self.engine.algorithm.local_work:
            sending = [row for row in sound if result.reports[row].steps]
        is_attacked = bool(self.attackers) and any(result.participants[row].index in self.attackers for row in sending)
        if not sound or (self.compressor is None and not is_attacked):
            self._stage_all(result, before, states, sending)
            models = result.shared if result.sends_delta else None
            together = {"send": result.send, "implied": result.implied, "models": models, "changes": result.delta}
            yield slice(None), together
            return
        kept = self._new_states(result, before)
        for row in sound:
            at = slice(row, row + 1)
            sent: dict[str, Any] = {"send": State(), "message_bytes": 0}
            if row in sending:
                sent, residuals = self._sent(result, row, round, states)
                self._stage(result, states, row, kept[row], residuals)
            yield at, {**sent, "changes": result.delta[at]}

    def _sent(self, result: ChunkResult, row: int, round: int, states: ClientStates) -> tuple[dict[str, Any], State]:
        """Return one client's messages [1, ...] after the attack and compression, and its residuals."""
        algorithm, index = self.engine.algorithm, result.participants[row].index
        is_attacker = index in self.attackers
        if not is_attacker and self.compressor is None:
            at = slice(row, row + 1)
            models = result.shared[at] if result.sends_delta else None
            send = {name: value[at] for name, value in result.send.items()}
            return {"send": send, "implied": result.implied, "models": models, "message_bytes": None}, {}
        send = {name: value[row] for name, value in result.send.items() if name not in algorithm.aside}
        if is_attacker:
            assert self.attack is not None
            stream = generator(self.engine.seed, Purpose.ATTACK, round, index)
            vectors = {name: value for name, value in send.items() if name not in algorithm.uncompressed}
            send = {**send, **attacked(self.attack, vectors, stream)}
        residuals, size = State(), None
        if self.compressor is not None:
            residuals = states.residuals(index, send) if self.compressor.error_feedback else {}
            stream = generator(self.engine.seed, Purpose.COMPRESSION, round, index)
            send, residuals, size = compress(self.compressor, send, residuals, stream, algorithm.uncompressed)
        return {"send": {name: value[None] for name, value in send.items()}, "message_bytes": size}, residuals

    def _stage_all(
        self, result: ChunkResult, before: Sequence[State], states: ClientStates, rows: Sequence[int]
    ) -> None:
        """Stage the states of several clients, at once if they only contain the method's state."""
        if len(rows) > 1 and result.keep and not result.solver and not result.buffers:
            ordered, some = sorted(rows), len(rows) < len(result.reports)
            keep = {name: value[ordered] if some else value for name, value in result.keep.items()}
            states.stage_all([result.participants[row].index for row in ordered], keep)
            return
        had_none = not isinstance(before, Stacked) and not any(before)
        if had_none and not (result.keep or result.solver or result.buffers):
            return
        kept = self._new_states(result, before)
        for row in rows:
            self._stage(result, states, row, kept[row], {})

    def _new_states(self, result: ChunkResult, before: Sequence[State]) -> list[State]:
        """Return each client's new state; clone an unchanged one, because new clients share theirs."""
        if result.keep:
            return result.new_states()
        kept: list[State] = [{}] * len(result.reports)
        for row, had in zip(result.asked, before, strict=True):
            kept[row] = {name: value.clone() for name, value in had.items()}
        return kept

    def _stage(self, result: ChunkResult, states: ClientStates, row: int, kept: State, residuals: State) -> None:
        """Stage the state of one client."""
        solver = result.solver[row] if result.solver else {}
        names = self.engine.buffers.kept if result.buffers else ()
        buffers = {name: result.buffers[row][name] for name in names}
        if kept or solver or buffers or residuals:
            states.stage(result.participants[row].index, ClientState(kept, buffers, solver, residuals).joined())


class ClientGradients:
    """The clients' full-batch gradients of one round, by stored index and point.

    With ``caches``, they are kept between their averaging and the local work. Beyond a gigabyte they are recomputed
    instead, which doubles their time but bounds the memory.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.algorithm = engine, engine.algorithm
        self.begin_round(0)

    def begin_round(self, clients: int) -> None:
        """Drop the last round's gradients; ``clients`` is the number of clients that read theirs in local work."""
        size = clients * len(self.algorithm.full_grad_at) * self.engine.flat.y.nbytes
        self.caches = self.algorithm.full_grad_for == "both" and size <= _CACHE_BYTES
        self._cached: dict[int, State] = {}
        self._norms: dict[int, dict[str, float | Tensor]] = {}
        self._unread: list[tuple[Participant, int, State]] = []  # client, round and norms by point
        self._recomputed: set[int] = set()  # clients whose gradients were recomputed for the local work

    def each(self, inputs: RoundInputs, plans: Sequence[WorkPlan]) -> Iterator[tuple[WorkPlan, State | ClientError]]:
        """Yield the clients' gradients at the method's points, or a client's error."""
        for plan, answer in self.engine.each_full_gradients(inputs, plans):
            index = plan.participant.index
            try:
                gradients = self._checked(plan, answer, inputs.round)
            except ClientError as error:
                yield plan, error
                continue
            if self.caches:
                self._cached[index] = gradients
            yield plan, gradients
        self.check()

    def of_workers(self, inputs: RoundInputs, plans: Sequence[WorkPlan]) -> dict[int, State]:
        """Return the gradients that clients read in their local work."""
        if self.algorithm.full_grad_readers(inputs.round) in ("cohort", "nobody"):
            return {}
        indices = [plan.participant.index for plan in plans]
        own = {index: self._cached[index] for index in indices if index in self._cached}
        missing = [plan for plan in plans if plan.participant.index not in own]
        for plan, answer in self.engine.each_full_gradients(inputs, missing):
            index = plan.participant.index
            own[index] = self._checked(plan, answer, inputs.round)
            self._recomputed.add(index)
        return own

    def norms_of(self, indices: Iterable[int], recomputed: bool = False) -> dict[str, dict[int, float | Tensor]]:
        """Return the norms of clients' gradients, by point and stored index.

        With ``recomputed``, only recomputed gradients count.
        """
        known = [index for index in indices if index in (self._recomputed if recomputed else self._norms)]
        points = self.algorithm.full_grad_at if known else ()
        return {point: {index: self._norms[index][point] for index in known} for point in points}

    def _checked(self, plan: WorkPlan, answer: State | ClientError, round: int) -> State:
        """Return a client's gradients, and record their norms."""
        if isinstance(answer, ClientError):
            raise answer
        norms = {point: torch.linalg.vector_norm(gradient) for point, gradient in answer.items()}
        self._unread.append((plan.participant, round, norms))
        self._norms[plan.participant.index] = dict(norms)
        if not self.engine.reads_later:
            self.check()
        return answer

    def check(self) -> None:
        """Read the norms of gradients; raise if one is not finite."""
        unread, self._unread = self._unread, []
        if not unread:
            return
        numbers = iter(numbers_of([norm for _, _, norms in unread for norm in norms.values()]))
        for who, number, norms in unread:
            found = {point: next(numbers) for point in norms}
            for point, norm in found.items():
                if not math.isfinite(norm):
                    raise ClientError(
                        f"Client {who.client_id!r} returned, in round {number}, a full-batch gradient at {point}"
                        " that is not finite. Lower the learning rate, or look at its data.",
                        who.client_id,
                    )
            self._norms[who.index] = dict(found)


def prepared_for_inner_solve(prepared: PreparedModule) -> PreparedModule:
    """Return a copy with the same module and optimizer, for an engine that runs the method's inner solve."""
    other = copy.copy(prepared)
    own = prepared.algorithm.own_solve
    assert own is not None
    other.algorithm = own
    other.seed = derive_seed(prepared.seed, Purpose.INNER_SOLVE) if own.own_batches else prepared.seed
    return other


class InnerSolve:
    """Runs :attr:`Algorithm.own_solve` for clients before their work, and updates their state.

    It has no other effect: its logs are discarded, and buffers are rewritten before the work.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings, self._trainer = engine, settings, engine.trainer
        self._epochs = engine.algorithm.own_epochs

    def plan(self, plan: WorkPlan) -> WorkPlan:
        """Return the plan of a client's inner solve, by default as long as its work in the round."""
        batches, accumulated = plan.batches.for_own_solve(), self._trainer.accumulate_grad_batches
        if self._epochs is None and batches is plan.batches:
            return plan
        length = limited(batches.num_batches(), self._trainer.limit_train_batches)
        steps = self.settings.steps(length, accumulated)
        if self._epochs is not None:
            steps = -(-length // accumulated) * self._epochs
        who = replace(plan.participant, steps=steps)
        return WorkPlan(who, batches, cut(steps, length, accumulated))

    def run(
        self, inputs: RoundInputs, plans: Sequence[WorkPlan], clients: Sequence[State]
    ) -> tuple[list[State], dict[int, ClientError]]:
        """Return the clients' states after their inner solve, and the failed clients, by stored index.

        ``plans`` has their work in the round, and ``clients`` their states before the solve.
        """
        kept = {plan.participant.index: client for plan, client in zip(plans, clients, strict=True)}
        failed: dict[int, ClientError] = {}
        for chunk in self.engine.chunks([self.plan(plan) for plan in plans if any(plan.epochs)]):
            undo = self.engine.savepoint()
            try:
                own: list[Any] = [kept[plan.participant.index] for plan in chunk]
                result = self.engine.run(inputs, chunk, own, [{}] * len(chunk))
                failed |= {result.participants[row].index: error for row, error in result.faults.items()}
                for who, new in zip(result.participants, result.new_states(), strict=True):
                    new.pop(LOCAL_STEPS, None)  # this counts only the steps of the client's work
                    kept[who.index] = {**kept[who.index], **new}
            finally:
                undo()
        return [kept[plan.participant.index] for plan in plans], failed


class LocalTraining:
    """Trains clients, several at once if the engine does, and builds their replies."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        gradients: ClientGradients,
        inner_solve: InnerSolve | None,
        attackers: frozenset[int] = frozenset(),
    ) -> None:
        self.engine, self.settings, self.gradients, self.inner_solve = engine, settings, gradients, inner_solve
        engines = [engine] if inner_solve is None else [engine, inner_solve.engine]
        self._shares = any(engine.shares_settings for engine in engines)
        self.trainer = engine.trainer
        self._held: SettingsSnapshot | None = None  # restores settings that the last client's hook changed
        self._has_warned = False  # about changes that have no effect
        self._frozen = FrozenParameters(engine.prepared)
        self._isolation = Isolation(engine, settings.drops_failed)
        self._outgoing = Outgoing(engine, settings, attackers)
        self.begin_round()

    def begin_round(self, reads_later: bool = False) -> None:
        """Release the last clients, and check whether any callback has client hooks.

        With ``reads_later``, numbers may stay on an accelerator until all clients have trained. They do if nothing
        reads them earlier and no client may be dropped.
        """
        self.put_back_settings()
        self.result: ChunkResult | None = None  # the result of the last reply's clients
        self._round = 0  # the round of the result
        # the settings before the first `on_client_end` of its clients, if they share settings
        self._at_end: SettingsSnapshot | None = None
        self._before: Sequence[State] = []  # the states of its clients before the work
        self._uses_start_hook = any_uses_hook(self.trainer, "on_client_start")
        self._sets = self._uses_start_hook and any_uses_hook(self.trainer, "on_client_start", of_users=True)
        self._uses_end_hook = any_uses_hook(self.trainer, "on_client_end")
        algorithm = self.engine.algorithm
        settings, engine = self.settings, self.engine
        needs_numbers = settings.drops_failed or settings.aggregator or settings.compression or settings.client_privacy
        self._reads = any_uses_hook(self.trainer, "on_client_end", of_users=True)
        is_alone = engine.flat.y.device.type != "cpu" and engine.split.size == 1
        engine.reads_later = reads_later and is_alone and not (needs_numbers or self._reads)
        averages = bool(algorithm.full_grad_at) and algorithm.full_grad_for != "client"
        self._has_measured = averages or algorithm.population_loss

    def _show(self, task: Task, index: int, states: ClientStates) -> None:
        """Load the model that a client starts from into the module, in place of the last client's."""
        engine, own, buffers = self.engine, self.engine.flat.personal, dict[str, Tensor]()
        if len(own) or engine.buffers.kept:
            (kept,) = states.of_each([index])
            own, buffers = kept.own.get(PERSONAL, own), kept.buffers
        engine.show(task.x, own, {**task.buffers, **buffers})
        self._shown = engine.flat.whole.clone(), engine.buffers.read()

    def _warn_of_discarded(self, client_id: ClientId) -> None:
        """Warn if ``on_client_start`` has changed the model that a client starts from, since that has no effect."""
        flat, module = self.engine.flat, type(self.trainer.lightning_module).__name__
        flat.gather()
        whole, buffers = self._shown
        now = self.engine.buffers.read()
        pairs = {name: (value, buffers[name]) for name, value in now.items()}
        pairs |= dict(zip(flat.names, zip(flat.cut(flat.whole), flat.cut(whole), strict=True), strict=True))
        are_same = are_equal(pairs.values())
        differing = [name for name, is_same in zip(pairs, are_same, strict=True) if not is_same]
        name = next((n for n in differing if not torch.equal(*(t.nan_to_num() for t in pairs[n]))), None)
        if name is not None:
            self._has_warned = True
            rank_zero_warn(
                f"on_client_start changes {name!r} of {module} for client {client_id!r}, without effect: it starts"
                " from the server's weights and buffers, and from its own personal ones. Keep a value for one client in"
                " an attribute, in a parameter that is not trained (requires_grad=False), or in the client's data."
            )

    def _seed_hooks(self, purpose: Purpose, index: int) -> None:
        """Seed the global generators, so that a client's hooks draw the same numbers in any cohort and process."""
        seed_global(derive_seed(self.engine.seed, purpose, self._round, index), self.engine.flat.y.device)

    def _start(self, client_id: ClientId, index: int) -> None:
        """Call ``on_client_start``, which must not change settings that earlier gradients or losses depended on.

        The last client's changes are undone first, since they hold only for that client.
        """
        self.put_back_settings()
        if not self._sets:  # this package's own hooks do not change settings
            call_round_hook(self.trainer, "on_client_start", self._round, client_id)
            return
        self._held = held = SettingsSnapshot(self.engine.prepared, with_callbacks=False)  # restored if a hook raises
        self._seed_hooks(Purpose.HOOKS_BEFORE_CLIENT, index)
        call_round_hook(self.trainer, "on_client_start", self._round, client_id)
        held.keep_changed("on_client_start")
        self.engine.prepared.check_parameters()
        if self._has_measured and (what := held.changed_in_module()) is not None:
            method = type(self.engine.algorithm).__name__
            raise FederatedError(
                f"on_client_start changes {what} for client {client_id!r}, after {method} has taken full-batch"
                " gradients or losses that do not have the change. Put what differs between clients into their data,"
                " set it for all clients in on_round_start, and keep notes on clients in the callback."
            )
        if self._shares:
            self._check_shared(held, f"on_client_start changes {{}} for client {client_id!r}")

    def _check_shared(self, settings: SettingsSnapshot, found: str) -> None:
        """Raise if a hook has changed settings, since clients that train together share them."""
        if (what := settings.changed()) is not None:
            raise OnlySequentialError(
                f"engine='vectorized' cannot give each client its own settings: {found.format(what)}, and others train"
                " together with it. Set it in on_round_start for all clients, make it part of the client's data, or"
                " use engine='sequential'. Keep notes in the callback."
            )

    def put_back_settings(self) -> None:
        """Restore the settings that ``on_client_start`` has changed for the last client, if any."""
        held, self._held = self._held, None
        if held is not None:
            held.restore()

    def answer(
        self,
        reply: Callable[..., Reply],
        task: Task,
        inputs: RoundInputs,
        plans: Sequence[WorkPlan],
        states: ClientStates,
    ) -> Iterator[Reply]:
        """Train clients, and yield one reply for all, or one per client if messages are compressed or a client is bad.

        ``reply`` builds a reply to the task from clients and other parts; ``inputs`` is the task for the engine.
        """
        self._round = task.round
        if self._uses_start_hook:
            for plan in plans:
                client_id = plan.participant.client_id
                if self._sets:
                    self._show(task, plan.participant.index, states)
                self._start(client_id, plan.participant.index)
                if self._sets and not self._has_warned:
                    self._warn_of_discarded(client_id)
        failed: dict[int, ClientError] = {}
        self.result = None
        result = self._isolation.run(partial(self._run, task, inputs, states), plans, failed)
        if result is None:
            yield reply(list(failed), failed=failed)
            return
        failed |= {result.participants[row].index: error for row, error in result.faults.items()}
        for error in failed.values():
            stop_at(error, self.settings.drops_failed)
        self.result, self._at_end = result, None
        clients, work = [who.index for who in result.participants], {plan.participant.index: plan for plan in plans}
        examples = [num_examples(work[index]) for index in clients]
        own_examples: list[int] = []
        if self.inner_solve is not None:
            own_examples = [num_examples(self.inner_solve.plan(work[index])) for index in clients]
        buffers = result.buffers
        if personal := self.engine.buffers.personal:  # these stay on the client
            buffers = [{name: value for name, value in own.items() if name not in personal} for own in buffers]
        norms = self.gradients.norms_of(work, recomputed=True) if self.engine.algorithm.full_grad_at else {}
        for at, messages in self._outgoing.of(result, self._before, task.round, states):
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
        """Call the callbacks' hook for clients of the last reply; see :meth:`ClientWork.call_end_hooks`."""
        result = self.result
        if result is None or not self._uses_end_hook:
            return
        rows = {report.client_id: row for row, report in enumerate(result.reports)}
        if self._reads and self._shares and self._at_end is None:
            self._at_end = SettingsSnapshot(self.engine.prepared, with_callbacks=False)
        for client_id in clients:
            self.engine.bind(result, rows[client_id])
            if self._reads:
                self._seed_hooks(Purpose.HOOKS_AFTER_CLIENT, result.participants[rows[client_id]].index)
            call_round_hook(self.trainer, "on_client_end", result.reports[rows[client_id]])
            if self._reads:
                self.engine.prepared.check_parameters()
            if self._at_end is not None:
                self._check_shared(self._at_end, f"on_client_end changes {{}} after client {client_id!r}")

    @denormals_as_zero()
    def _run(self, task: Task, inputs: RoundInputs, states: ClientStates, plans: Sequence[WorkPlan]) -> ChunkResult:
        """Train the clients of a chunk from their states."""
        engine, indices = self.engine, [plan.participant.index for plan in plans]
        has_more = bool(engine.buffers.kept) or engine.keeps_solver
        together = None if has_more else states.of_all(indices)
        each = states.of_each(indices) if together is None else []
        buffers = each[0].buffers if engine.buffers.kept else {}  # engines that run several at once reject these
        engine.buffers.write({**task.buffers, **buffers})
        solvers = [state.solver for state in each] if engine.keeps_solver else [{}] * len(plans)
        own: Sequence[State] = [state.own for state in each] if together is None else together
        failed: dict[int, ClientError] = {}
        if self.inner_solve is not None:
            own, failed = self.inner_solve.run(inputs, plans, own)
            engine.buffers.write({**task.buffers, **buffers})
        self._before = own
        if engine.algorithm.full_grad_at:
            found = self.gradients.of_workers(inputs, plans)
            inputs = replace(inputs, full_grad=found)
            if engine.algorithm.overrides("begin_client") and engine.algorithm.full_grad_readers(task.round) == "both":
                own = [engine.algorithm.begin_client(state, found[i]) for state, i in zip(own, indices, strict=True)]
                for state, plan in zip(own, plans, strict=True):
                    if not plan.participant.steps:  # no later work saves its state
                        states.stage(plan.participant.index, ClientState(state).joined())
        frozen = self._frozen.read() if self._frozen.names else []
        result = engine.run(inputs, plans, own, solvers)
        if self._frozen.names:
            self._frozen.check(frozen)
        if not failed:
            return result
        faults = {row: failed[who.index] for row, who in enumerate(result.participants) if who.index in failed}
        return replace(result, faults={**result.faults, **faults})
