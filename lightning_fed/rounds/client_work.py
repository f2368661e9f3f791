"""The clients' half of a round for local data: an engine computes the replies."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lightning_fed.callbacks.base import any_uses_hook
from lightning_fed.compat.private import rank_zero_warn
from lightning_fed.core.devices import is_out_of_memory, release_memory
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.seeds import Purpose, generator
from lightning_fed.core.tracked_state import TrackedState
from lightning_fed.core.types import ClientId, State, Vector
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.engines.base import Engine, OnlySequentialError, Restart, RoundInputs, WorkPlan
from lightning_fed.engines.choice import make_engine, reason_in
from lightning_fed.engines.client_errors import NamesClient
from lightning_fed.engines.client_settings import CLIENT_HOOKS, SettingsSnapshot
from lightning_fed.engines.prepared import PreparedModule
from lightning_fed.engines.processor import check_lstm
from lightning_fed.engines.sequential.engine import SequentialEngine
from lightning_fed.engines.vectorized.engine import VectorizedEngine
from lightning_fed.rounds.client_half import ClientHalf
from lightning_fed.rounds.failures import stop_at
from lightning_fed.rounds.local_plans import LocalPlans, RoundPlans, check_lone_examples, check_separate_examples
from lightning_fed.rounds.local_training import ClientGradients, InnerSolve, LocalTraining, prepared_for_inner_solve
from lightning_fed.rounds.messages import GRADIENTS, LOSS, TRAIN, Reply, Task
from lightning_fed.server.attacks import attacked
from lightning_fed.server.client_states.state import ClientStates
from lightning_fed.server.participation import Participant, Population
from lightning_fed.settings.settings import Settings
from lightning_fed.strategies.processes import Ranks
from lightning_fed.strategies.split import BatchSplit

_TOGETHER = 2**16  # limit on the gradient elements in one reply


class ClientWork(ClientHalf):
    """Answers tasks for clients with local data by running an engine.

    A client that trains before its required gradients were requested computes them then.

    With ``engine="auto"``, the vectorized engine may fail to run clients although its trial step passed. The sequential
    engine then replaces it for the rest of the run, and the round restarts with the same x and random streams. If the
    vectorized engine runs out of memory, the round restarts with half as many clients at once.

    ``engines`` has the engine that runs clients and, if the method has an inner solve, a second one for it.
    """

    def __init__(self, engines: Sequence[Engine], plans: LocalPlans, settings: Settings) -> None:
        self.plans, self.settings = plans, settings
        self.algorithm, self.trainer = engines[0].algorithm, engines[0].trainer
        attack = settings.attack
        self._attackers = plans.attackers if attack is not None and attack.changes_messages else frozenset[int]()
        self._use(engines)
        if len(engines) > 1 and self.chunk_size is not None:  # both engines use the same chunk size
            self._use_chunk(self.chunk_size)
        self._together = 1  # upper bound on the clients that run at once
        self._snapshot: SettingsSnapshot | None = None  # at the start of the round
        self._round: RoundPlans | None = None
        self._training: list[int] = []  # the clients that train here, by stored index
        self._inputs: tuple[Task, RoundInputs] | None = None  # a task as the engine's inputs
        self._read: tuple[set[str], set[str]] = (set(), set())  # names read in the server state and in mean gradients

    def _use(self, engines: Sequence[Engine]) -> None:
        """Switch to these engines."""
        self.engines, self.engine = engines, engines[0]
        self.may_restart = any(engine.name == "vectorized" for engine in engines)
        self._inner_solve = InnerSolve(engines[1], self.settings) if len(engines) > 1 else None
        self._gradients = ClientGradients(self.engine)
        self._local = LocalTraining(self.engine, self.settings, self._gradients, self._inner_solve, self._attackers)

    # ------------------------------------------------------------------ a round

    def participants(
        self, drawn: Mapping[ClientId, int], round: int, failed: Callable[[ClientError], None] | None = None
    ) -> list[Participant]:
        """Plan the drawn clients' work, and return those that can participate; a client drawn twice trains once.

        ``failed`` records the error of a client whose data cannot be built. By default, the error is raised.
        """
        plans, members = self._plans_of(round), []
        for client_id, count in drawn.items():
            try:
                plan = plans.plan(client_id)
            except ClientError as error:
                if failed is None:
                    raise
                failed(error)
                continue
            if plan is not None:
                members.append(plan.participant if count == 1 else replace(plan.participant, count=count))
        return members

    def _plans_of(self, round: int) -> RoundPlans:
        if self._round is None or self._round.round != round:
            self._round = RoundPlans(self.plans, round)
        return self._round

    def begin(self, round: int, members: Sequence[Participant], reads_later: bool = False) -> None:
        """Begin or restart a round, given the clients that train here and their requested steps.

        With ``reads_later``, reports may be incomplete until :meth:`end_training`.
        """
        may_undo = self.may_restart and any_uses_hook(self.trainer, *CLIENT_HOOKS)
        self._snapshot = SettingsSnapshot(self.engine.prepared) if may_undo else None
        self._training, self._inputs, self._read = [member.index for member in members], None, (set(), set())
        self._gradients.begin_round(len(members))
        self._local.begin_round(reads_later)
        plans = self._plans_of(round)
        work = [plans.of(member.index, member.steps) for member in members]
        try:
            self.engine.begin_round(work)
            if self._inner_solve is not None:
                self._inner_solve.engine.begin_round(list(map(self._inner_solve.plan, work)))
        except FederatedError as error:
            if self.settings.engine != "auto" or not self.may_restart:
                raise
            warnings.warn(f"engine='auto' continues with 'sequential', since {reason_in(error)}", stacklevel=2)
            self.give_up()
            self.begin(round, members, reads_later)

    def check_batches(self, sizes: Iterable[tuple[ClientId, int]]) -> None:
        """Raise if the module cannot train on a client's batches, or record-level privacy does not cover them.

        It tries one client for each kind of batch.
        """
        check_lone_examples(self.plans, self.engine.flat, sizes)
        check_separate_examples(self.plans)

    def use_seed(self, seed: int) -> None:
        """Switch to a secret seed of this site, and skip non-finite gradients of examples without an error."""
        self.plans.seed, self._round = seed, None
        for engine in self.engines:
            engine.seed = seed
            if isinstance(engine, SequentialEngine) and engine.private is not None:
                engine.private.skips_not_finite = True

    def savepoint(self) -> Callable[[], None]:
        """Return a function that undoes clients' logging after this call; see :meth:`Engine.savepoint`."""
        return self.engine.savepoint()

    @property
    def split(self) -> BatchSplit:
        """The processes that split every batch of a client."""
        return self.engine.split

    @property
    def engine_names(self) -> list[str]:
        """The names of the engines for the clients and, if the method has one, for the inner solve."""
        return [engine.name for engine in self.engines]

    @property
    def chunk_size(self) -> int | None:
        """The number of clients that run at once; None if the sequential engine runs all."""
        return min((engine.chunk_size for engine in self.engines if isinstance(engine, VectorizedEngine)), default=None)

    @property
    def draws(self) -> bool | None:
        """Whether the last trial of a vectorized step drew random numbers; None without the vectorized engine."""
        at_once = [engine for engine in self.engines if isinstance(engine, VectorizedEngine)]
        return any(engine.step.is_random for engine in at_once) if at_once else None

    def _use_chunk(self, size: int) -> None:
        for engine in self.engines:
            if isinstance(engine, VectorizedEngine):
                engine.use_chunk(size)

    def agree(self, ranks: Ranks) -> None:
        """Use the same chunk size in all processes on accelerators, since random layers depend on it."""
        if self.settings.engine == "sequential" or self.engine.flat.y.device.type == "cpu":
            return
        sizes = ranks.gather(self.chunk_size)
        if None in sizes:
            self.give_up()
        else:
            self._use_chunk(min(sizes))

    def restart_after(self, error: Exception) -> Restart | None:
        """Return how to restart the round after an error, or None if it need not or cannot restart.

        If a device is out of memory, this releases the memory that the error holds: even ending a run needs some.
        """
        both, device = (error, error.__cause__), self.engine.flat.y.device
        may_give_up = self.may_restart and self.settings.engine == "auto"
        if any(map(is_out_of_memory, both)):
            release_memory(error, device)
            self.engine.data.give_up()
            count = min(self._together, self.chunk_size or 1)
            if count > 1:
                return Restart(f"{device} has run out of memory with {count} clients at once.", count // 2)
            return Restart(f"{device} has run out of memory with one client at a time.") if may_give_up else None
        found = next((one for one in both if isinstance(one, OnlySequentialError)), None)
        return Restart(str(found)) if found is not None and may_give_up else None

    def restart(self, round: int, how: Restart) -> None:
        """Prepare the current round to restart in another way, and undo settings changed by its hooks."""
        size = how.chunk_size
        if size is None:
            rank_zero_warn(f"engine='auto' restarts round {round} with 'sequential', and stays with it: {how.reason}")
        else:
            rank_zero_warn(
                f"{how.reason} Round {round} restarts with chunk_size={size}, and the run stays with it. Set"
                f" chunk_size={size} to start with it."
            )
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            snapshot.restore()
        self.engine.flat.bind()  # hooks may have bound the parameters to another client
        if size is None:
            self.give_up()
        else:
            self._use_chunk(size)

    def give_up(self) -> None:
        """Replace the vectorized engine with the sequential one."""
        if self.may_restart:
            self.have_given_up = True
            self._use([SequentialEngine(engine.prepared) for engine in self.engines])

    def end(self) -> None:
        """Release the round and its data before the next round's data are loaded."""
        self._round, self._inputs, self._training, self._snapshot = None, None, [], None
        self._gradients.begin_round(0)
        self._local.begin_round()

    def chunks(self, task: Task, clients: Sequence[int]) -> list[Sequence[int]]:
        """Return the local clients by stored index, in groups that answer together."""
        if task.phase == TRAIN:
            chunks = self.engine.chunks(self.plans_of(task, clients))
            return [[plan.participant.index for plan in plans] for plans in chunks]
        if task.phase == GRADIENTS and self._gradients.caches:
            clients = list(dict.fromkeys([*clients, *self._training]))
        return [clients] if clients else []

    def answer(self, task: Task, clients: Sequence[int], states: ClientStates) -> Iterator[Reply]:
        """Yield replies for some clients, by stored index; clients that the engine runs together share one."""
        self._together = len(clients)
        if task.phase == GRADIENTS:
            return self._answer_gradients(task, clients)
        if task.phase == LOSS:
            return self._answer_loss(task, clients)
        reply, inputs, plans = partial(self._reply, task), self._inputs_of(task), self.plans_of(task, clients)
        return self._local.answer(reply, task, inputs, plans, states)

    def plans_of(self, task: Task, clients: Sequence[int]) -> list[WorkPlan]:
        """Return the work that a task requests from clients, given their stored indices."""
        plans = self._plans_of(task.round)
        return [plans.of(index, task.steps.get(index)) for index in clients]

    def members(self, task: Task, clients: Sequence[int]) -> list[Participant]:
        """Return the participants with the steps that a task requests, given their stored indices."""
        return [plan.participant for plan in self.plans_of(task, clients)]

    def _inputs_of(self, task: Task) -> RoundInputs:
        """Convert a task to the engine's inputs, and track reads of the states in it."""
        if self._inputs is None or self._inputs[0] is not task:
            server, cohort_grad = map(TrackedState, (task.server, task.cohort_grad), self._read)
            self._inputs = task, RoundInputs(task.round, task.x, server, {}, cohort_grad, task.mean_examples)
        return self._inputs[1]

    # ------------------------------------------------------------------ gradients, and the loss

    def _answer_gradients(self, task: Task, clients: Sequence[int]) -> Iterator[Reply]:
        """Yield the clients' replies; with a small model, several clients share one."""
        asked, most = set(task.clients), gradients_together(task.x)
        ready: list[tuple[int, State]] = []
        for plan, gradients in self._gradients.each(self._inputs_of(task), self.plans_of(task, clients)):
            index = plan.participant.index
            is_failure = isinstance(gradients, ClientError)
            if ready and (is_failure or len(ready) == most or (index in asked) != (ready[0][0] in asked)):
                yield self._gradient_reply(task, ready, ready[0][0] in asked)
                ready = []
            if isinstance(gradients, ClientError):
                stop_at(gradients, self.settings.drops_failed)
                yield self._reply(task, [index], failed={index: gradients})
            else:
                ready.append((index, gradients))
        if ready:
            yield self._gradient_reply(task, ready, ready[0][0] in asked)

    def _gradient_reply(self, task: Task, ready: Sequence[tuple[int, State]], sends: bool) -> Reply:
        """Return a reply for clients that have their gradients."""
        indices, gradients = zip(*ready, strict=True)
        send: State = {}
        if sends and len(ready) == 1:
            send = {point: value[None] for point, value in gradients[0].items()}
        elif sends:
            send = {point: torch.stack([own[point] for own in gradients]) for point in self.algorithm.full_grad_at}
        bad = [row for row, index in enumerate(indices) if index in self._attackers] if sends else []
        if bad and len(indices) == 1:
            send = {point: value.clone() for point, value in send.items()}  # the client's own work reads the original
        for row in bad:
            assert self.settings.attack is not None
            stream = generator(self.engine.seed, Purpose.ATTACK_ON_GRADIENTS, task.round, indices[row])
            own = {point: value[row] for point, value in send.items()}
            for point, value in attacked(self.settings.attack, own, stream).items():
                send[point][row] = value
        return self._reply(task, indices, send=send, norms=self._gradients.norms_of(indices))

    def _answer_loss(self, task: Task, clients: Sequence[int]) -> Iterator[Reply]:
        """Yield one reply with the summed losses of all clients."""
        engine, total, examples = self.engine, 0.0, 0
        failed: dict[int, ClientError] = {}
        with engine.losses_at(task.x, task.round) as loss_of:
            for index in clients:
                self.trainer._signal_connector.check()
                client_id = self.plans.population.ids[index]
                try:
                    with NamesClient(client_id, task.round, "the population's loss", lambda: None):
                        batches = self.trainer.datamodule.client_batches(client_id)
                        loss = loss_of(batches, index)
                        if not math.isfinite(loss):
                            raise ClientError(f"its loss is {loss:g}. Lower the rates, or look at its data.")
                except ClientError as error:
                    stop_at(error, self.settings.drops_failed)
                    failed[index] = error
                    continue
                total += loss
                examples += batches.size
        total = sum(engine.split.gather(total))
        yield self._reply(task, clients, loss=total, loss_examples=examples, failed=failed)

    # ------------------------------------------------------------------ the end of local work

    def end_training(self) -> None:
        """Finish the work that is done once per round, after all clients here have trained."""
        self._local.put_back_settings()
        self._gradients.check()
        for engine in self.engines:
            engine.end_round()

    def call_end_hooks(self, clients: Sequence[ClientId]) -> None:
        """Call ``on_client_end`` for the clients of the last reply whose answers count."""
        self._local.call_end_hooks(clients)

    def _reply(self, task: Task, clients: Sequence[int], **parts: Any) -> Reply:
        server, cohort_grad = self._read
        read: dict[str, Any] = {"server_read": frozenset(server), "cohort_grad_read": frozenset(cohort_grad)}
        return Reply(task.round, task.phase, clients, **read, **parts)


def gradients_together(x: Vector) -> int:
    """Return the number of clients whose gradients are summed at once. It affects the last bits of the sum."""
    return max(1, _TOGETHER // len(x))


def prepare_clients(
    prepared: PreparedModule,
    population: Population,
    engine: str,
    clients: Sequence[ClientId] | None = None,
    before: Sequence[str] = (),
    chunk_before: int | None = None,
    drew_before: bool | None = None,
) -> ClientWork:
    """Return the clients' half, given its engine's name; see :func:`make_engine`.

    ``clients`` are those with local data, by default all. ``before``, ``chunk_before`` and ``drew_before`` are the
    :attr:`ClientWork.engine_names`, :attr:`ClientWork.chunk_size` and :attr:`ClientWork.draws` before this run resumed.
    """
    settings, chunk_size = prepared.settings, chunk_before or prepared.settings.chunk_size
    plans = LocalPlans(prepared.trainer, settings, population, clients, prepared.seed)
    check_lstm(prepared.trainer, prepared.flat, plans.some)
    if type(prepared.trainer.datamodule).client_dataloader is not FederatedDataModule.client_dataloader:
        plans.check_counts()
    first, second = (*before, None, None)[:2]
    engines = [make_engine(engine, chunk_size, prepared, plans.some, first, drew_before)]
    if prepared.algorithm.own_solve is not None:
        other = prepared_for_inner_solve(prepared)
        engines.append(make_engine(engine, chunk_size, other, plans.some, second, drew_before))
    return ClientWork(engines, plans, settings)
