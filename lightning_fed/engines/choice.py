"""Which engine runs the cohort."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, cast

from lightning_fed._compat import rank_zero_info
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.engines.base import Engine, WorkPlan
from lightning_fed.engines.fallback import Fallback
from lightning_fed.engines.prepared import PreparedModule
from lightning_fed.engines.sequential.engine import SequentialEngine
from lightning_fed.engines.vectorized.engine import VectorizedEngine

__all__ = ["make_engine"]

_TRIED = 10  # clients that fail in a trial step, before the module is to blame


def make_engine(
    name: str,
    chunk_size: int | None,
    prepared: PreparedModule,
    some: Callable[[], Iterator[WorkPlan]],
) -> Engine:
    """Return the engine of a name; "auto" takes the vectorized one wherever it can run the module, and says so.

    Args:
        name: "sequential", "vectorized" or "auto".
        chunk_size: How many clients the vectorized engine runs at once.
        prepared: What every engine takes.
        some: Yields clients' work, to try the vectorized engine out on.

    Raises:
        FederatedError: If the vectorized engine is asked for by name and cannot run the module.
    """
    trainer: Any = prepared.trainer
    make_sequential = partial(SequentialEngine, trainer.fit_loop.epoch_loop, prepared)
    if name == "sequential":
        return make_sequential()
    try:
        engine = VectorizedEngine(chunk_size, prepared=prepared)
        _try_out(engine, some())
    except FederatedError as error:
        if name != "auto":
            raise
        rank_zero_info(f"engine='auto' takes 'sequential', since {_decapitalised(str(error))}")
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
