"""Which engine runs the cohort, and what becomes of clients that the vectorized one cannot run after all."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, cast

import torch

from lightning_fed.compat.private import rank_zero_info, rank_zero_warn
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.types import ClientId, State, Vector
from lightning_fed.engines.base import (
    ChunkResult,
    Engine,
    OnlySequentialError,
    RestartRoundError,
    RoundInputs,
    WorkPlan,
)
from lightning_fed.engines.client_errors import in_short
from lightning_fed.engines.prepared import PreparedModule
from lightning_fed.engines.sequential.engine import SequentialEngine
from lightning_fed.engines.vectorized.client_settings import HeldSettings, hears_clients
from lightning_fed.engines.vectorized.engine import VectorizedEngine

__all__ = ["make_engine"]

_TRIED = 10  # clients that fail in a trial step, before the module is to blame


def make_engine(
    name: str,
    chunk_size: int | None,
    prepared: PreparedModule,
    some: Callable[[], Iterator[WorkPlan]],
    before: str | None = None,
) -> Engine:
    """Return the engine of a name; "auto" takes the vectorized one wherever it can run the module, and says so.

    Args:
        name: "sequential", "vectorized" or "auto".
        chunk_size: How many clients the vectorized engine runs at once.
        prepared: What every engine takes.
        some: Yields clients' work, to try the vectorized engine out on.
        before: The engine that "auto" took for the first rounds of this run, if it goes on from a checkpoint: it is
            taken again, for the same bits.

    Raises:
        FederatedError: If the vectorized engine is asked for by name and cannot run the module.
    """
    trainer: Any = prepared.trainer
    make_sequential = partial(SequentialEngine, trainer.fit_loop.epoch_loop, prepared)
    if name == "sequential":
        return make_sequential()
    if name == "auto" and before == "sequential":
        rank_zero_info("engine='auto' takes 'sequential', with which this run was trained before.")
        return make_sequential()
    try:
        engine = VectorizedEngine(chunk_size, prepared=prepared)
        _try_out(engine, some())
    except FederatedError as error:
        if name != "auto":
            raise
        reason = _decapitalised(str(error))
        if before == "vectorized":
            rank_zero_warn(
                "engine='auto' goes on with 'sequential', though this run was trained with 'vectorized' before: the"
                f" result will not have the bits of a run without the break. The reason: {reason}"
            )
        else:
            rank_zero_info(f"engine='auto' takes 'sequential', since {reason}")
        return make_sequential()
    if name == "auto":
        at_once = "one client at a time" if engine.chunk_size == 1 else f"up to {engine.chunk_size} clients at once"
        rank_zero_info(
            f"engine='auto' takes 'vectorized', {at_once}: no hook is called per batch, and a trial step of the module"
            " agreed."
        )
    return cast(Engine, Fallback(engine, make_sequential, goes_on=name == "auto"))


def _try_out(engine: VectorizedEngine, plans: Iterator[WorkPlan]) -> None:
    """Try a step on a client that can take one.

    Raises:
        FederatedError: If the module cannot be run on several clients at once.
        ClientError: If no client that was tried can take a step.
    """
    failure: ClientError | None = None
    for plan in islice(plans, _TRIED):
        try:
            with engine.errors_of(plan, 0, "a trial step"):
                engine.try_out(plan)
            return
        except ClientError as error:
            if isinstance(error.__cause__, FederatedError) and not isinstance(error.__cause__, ClientError):
                raise error.__cause__ from error.__cause__.__cause__
            failure = failure or error
    if failure is not None:
        raise failure


def _decapitalised(text: str) -> str:
    return text if text.startswith("engine=") else text[:1].lower() + text[1:]


class Fallback:
    """Stand in for the vectorized engine, and run clients one by one where it fails on them.

    A trial step sees one shape of batch, and others may fail in the work itself. The clients of such a chunk then start
    again, one after the other, from the same x and the same random streams. If none of them fails, the engine is to
    blame: ``engine="auto"`` goes on with the sequential one, ``engine="vectorized"`` is refused by name.

    If hooks of clients set something for one client only, ``engine="auto"`` restarts the whole round with the
    sequential engine: it puts back what these hooks have set, and they are called again, one client after another.

    Args:
        engine: The vectorized engine.
        make_sequential: Makes the sequential engine, once it is needed.
        goes_on: Whether to go on with that one.

    Attributes:
        has_given_up: Whether the run goes on with the sequential engine.
    """

    def __init__(self, engine: Engine, make_sequential: Callable[[], Engine], goes_on: bool) -> None:
        self.has_given_up = False
        self._engine, self._make_sequential, self._goes_on = engine, make_sequential, goes_on
        self._left: Engine | None = None  # the engine that has run other chunks of this round
        self._row: Vector | None = None  # the parameters [P] that hooks look at, of a chunk that was run one by one
        self._held: HeldSettings | None = None  # as the round began

    def __getattr__(self, name: str) -> Any:
        """Return what the engine at work has."""
        return getattr(self._engine, name)

    def give_up(self) -> None:
        """Go on with the sequential engine."""
        if not self.has_given_up:
            self._left, self._engine, self.has_given_up = self._engine, self._make_sequential(), True

    # ------------------------------------------------------------------ settings of single clients

    @property
    def may_restart(self) -> bool:
        """Whether hooks may turn out to set what the vectorized engine cannot give each client."""
        return self._goes_on and not self.has_given_up and hears_clients(self._engine.trainer)

    def begin_round(self, plans: Sequence[WorkPlan]) -> None:
        """Begin a round; see :meth:`lightning_fed.engines.base.Engine.begin_round`."""
        self._held = HeldSettings(self._engine.prepared) if self.may_restart else None
        try:
            self._engine.begin_round(plans)
        except FederatedError as error:
            if self.has_given_up or not self._goes_on:
                raise
            warnings.warn(f"engine='auto' goes on with 'sequential', since {_decapitalised(str(error))}", stacklevel=2)
            self.give_up()
            self._engine.begin_round(plans)

    def client_started(self, client_id: ClientId) -> None:
        """Look at what ``on_client_start`` has set."""
        with self._restarting():
            self._engine.client_started(client_id)

    def check_hooks(self, plans: Sequence[WorkPlan]) -> None:
        """Look at what hooks of clients have set."""
        with self._restarting():
            self._engine.check_hooks(plans)

    def client_ended(self, client_id: ClientId) -> None:
        """Look at what ``on_client_end`` has set."""
        with self._restarting():
            self._engine.client_ended(client_id)

    @contextmanager
    def _restarting(self) -> Iterator[None]:
        """Let the round start again, with the sequential engine, where the vectorized one refuses.

        Raises:
            RestartRoundError: In the place of the refusal, if it may.
        """
        try:
            yield
        except FederatedError as error:
            if not self.may_restart:
                raise
            raise RestartRoundError(str(error)) from error

    def restart(self, round: int) -> None:
        """Put back what hooks of clients have set in this round, and go on with the sequential engine."""
        held, self._held = self._held, None
        if held is not None:
            held.put_back()
        self.give_up()

    # ------------------------------------------------------------------ the work of a round

    def run(
        self, inputs: RoundInputs, plans: Sequence[WorkPlan], clients: Sequence[State], solvers: Sequence[State]
    ) -> ChunkResult:
        """Train the clients of a chunk; see :meth:`lightning_fed.engines.base.Engine.run`.

        Raises:
            FederatedError: If this engine cannot run them, the sequential one can, and this one was asked for by name.
        """
        if self.has_given_up:
            return self._one_by_one(self._engine, inputs, plans, clients, solvers)
        try:
            return self._engine.run(inputs, plans, clients, solvers)
        except ClientError as error:
            cause = error.__cause__
            if cause is None or not self._may_be_the_engines(error):
                raise
            sequential = self._make_sequential()
            try:
                result = self._one_by_one(sequential, inputs, plans, clients, solvers)
            except Exception:
                raise error from cause  # a client is to blame
            self._blame_engine(cause, inputs.round)
            return result

    def each_full_gradients(
        self, inputs: RoundInputs, plans: Sequence[WorkPlan]
    ) -> Iterator[tuple[WorkPlan, State | ClientError]]:
        """Yield clients' full-batch gradients; see :meth:`lightning_fed.engines.base.Engine.each_full_gradients`."""
        done = 0
        cause: BaseException | None = None
        try:
            for plan, answer in self._engine.each_full_gradients(inputs, plans):
                if isinstance(answer, ClientError) and not self.has_given_up and self._may_be_the_engines(answer):
                    cause = answer.__cause__ or answer
                    break
                yield plan, answer
                done += 1
        except FederatedError as error:
            if not (self._goes_on and isinstance(error, OnlySequentialError)):
                raise
            cause = error
        except Exception as error:  # of clients whose gradients were taken at once, before one of them is named
            cause = error
        if cause is None:
            return
        left = self._make_sequential().each_full_gradients(inputs, plans[done:])
        for number, (plan, answer) in enumerate(left):
            if number == 0 and not isinstance(answer, ClientError):
                self._blame_engine(cause, inputs.round)
            yield plan, answer

    def point_to(self, result: ChunkResult, row: int) -> None:
        """Let :attr:`parameters_at_work`, and the module's, be those of one client of a chunk."""
        if not self.has_given_up:
            self._engine.point_to(result, row)
        elif len(result.reports) > 1:
            self._row = result.y[row]
            self._engine.flat.point_to(self._engine.flat.cut(self._row))

    @property
    def parameters_at_work(self) -> Vector:
        """The parameters [P] of the client whose hooks are called."""
        flat = self._engine.flat
        return self._engine.parameters_at_work if self._row is None else self._row[: flat.numel]

    def end_round(self) -> None:
        """Finish what is done once for all of this process's clients, by both engines if both have run some."""
        self._held = None
        if self._left is not None:
            self._left.end_round()
        self._left = self._row = None
        self._engine.end_round()

    def _may_be_the_engines(self, error: ClientError) -> bool:
        """Return whether clients that failed may train without an error one by one."""
        if isinstance(error.__cause__, OnlySequentialError):
            return self._goes_on  # by name, the engine refuses in the same words
        return error.culprit is not None and not isinstance(error.__cause__, FederatedError)

    def _blame_engine(self, cause: BaseException, round: int) -> None:
        """Go on with the sequential engine and say so, or refuse this one.

        Raises:
            FederatedError: If this engine was asked for by name.
        """
        module = type(self._engine.trainer.lightning_module).__name__
        text = str(cause) if isinstance(cause, OnlySequentialError) else in_short(cause)
        if not self._goes_on:
            raise FederatedError(
                f"engine='vectorized' cannot run clients of {module} in round {round}, though a trial step passed:"
                f" {text}. One by one they run without an error: use engine='sequential', or 'auto'."
            ) from cause
        warnings.warn(
            f"engine='auto' goes on with 'sequential' from round {round} on: 'vectorized' cannot run clients of"
            f" {module}, though a trial step passed ({text}).",
            stacklevel=2,
        )
        self.give_up()

    def _one_by_one(
        self,
        engine: Engine,
        inputs: RoundInputs,
        plans: Sequence[WorkPlan],
        clients: Sequence[State],
        solvers: Sequence[State],
    ) -> ChunkResult:
        self._row, results = None, []
        for plan, client, solver in zip(plans, clients, solvers, strict=True):
            engine.flat.restore()  # hooks may have looked at the parameters of another client
            result = engine.run(inputs, [plan], [client], [solver])
            results.append(result if len(plans) == 1 else _copied(result))
        return results[0] if len(results) == 1 else _joined(results)


def _copied(result: ChunkResult) -> ChunkResult:
    """Return the result of a client that shares nothing with the engine's memory."""
    send, keep = ({name: value.clone() for name, value in part.items()} for part in (result.send, result.keep))
    return replace(result, y=result.y.clone(), send=send, keep=keep)


def _joined(results: Sequence[ChunkResult]) -> ChunkResult:
    """Return the results of single clients as that of a chunk."""
    first = results[0]
    return ChunkResult(
        participants=[who for result in results for who in result.participants],
        y=torch.cat([result.y for result in results]),
        delta=torch.cat([result.delta for result in results]),
        send={name: torch.cat([result.send[name] for result in results]) for name in first.send},
        keep={name: torch.cat([result.keep[name] for result in results]) for name in first.keep},
        sends_delta=first.sends_delta,
        reports=[report for result in results for report in result.reports],
        asked=range(len(results)),
        solver=[solver for result in results for solver in result.solver],
        buffers=[buffers for result in results for buffers in result.buffers],
    )
