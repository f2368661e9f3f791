"""The choice of the engine: the requested one, or the fastest that can run the module."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

from lightning_fed.callbacks.base import any_uses_hook
from lightning_fed.compat.package import pl
from lightning_fed.compat.private import is_overridden, rank_zero_info, rank_zero_warn
from lightning_fed.core.devices import is_out_of_memory, release_memory
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.engines.base import Engine, WorkPlan
from lightning_fed.engines.prepared import PreparedModule
from lightning_fed.engines.sequential.engine import SequentialEngine
from lightning_fed.engines.vectorized.engine import VectorizedEngine

_TRIED = 10  # clients that may fail in a trial step before the module is blamed
_MISSING = (AttributeError, KeyError, IndexError, TypeError)  # errors of a step that reads an attribute too early
_LATER = ("on_train_start", "on_train_epoch_start")
_REMEDY = (
    ". A trial step comes before on_train_start and the hooks of rounds and clients: give what they set a first value"
    " of the same kind in __init__"
)


def make_engine(
    name: str,
    chunk_size: int | None,
    prepared: PreparedModule,
    some: Callable[[], Iterator[WorkPlan]],
    before: str | None = None,
    drew_before: bool | None = None,
) -> Engine:
    """Return an engine by name; "auto" uses the vectorized one if it can run the module, and logs the choice.

    ``some`` yields clients' work for the vectorized engine's trial step. A resumed run uses the engine that "auto"
    chose ``before``, for the same bits. If its step draws random numbers now, but did not in the earlier trial
    (``drew_before``), the sequential engine is used, as in an uninterrupted run.
    """
    if name == "sequential":
        return SequentialEngine(prepared)
    if name == "auto" and prepared.settings.client_privacy is not None:
        rank_zero_info("engine='auto' takes 'sequential', the only one that runs single examples for client_privacy.")
        return SequentialEngine(prepared)
    if name == "auto" and not prepared.module.automatic_optimization:
        rank_zero_info("engine='auto' takes 'sequential', the only one that runs modules with manual optimization.")
        return SequentialEngine(prepared)
    if name == "auto" and before == "sequential":
        rank_zero_info("engine='auto' takes 'sequential', with which this run was trained before.")
        return SequentialEngine(prepared)
    try:
        engine = VectorizedEngine(chunk_size, prepared, partial(SequentialEngine, prepared))
        _try_out(engine, some())
        if before == "vectorized" and drew_before is False and engine.step.is_random:
            raise engine.step.new_draws_error()
    except FederatedError as error:
        if name != "auto":
            raise
        reason = reason_in(error)
        if before == "vectorized":
            rank_zero_warn(
                "engine='auto' continues with 'sequential', though this run was trained with 'vectorized' before. The"
                f" result will differ in rounding from an uninterrupted run. The reason: {reason}"
            )
        else:
            rank_zero_info(f"engine='auto' takes 'sequential', since {reason}")
        return SequentialEngine(prepared)
    if name == "auto":
        at_once = "one client at a time" if engine.chunk_size == 1 else f"up to {engine.chunk_size} clients at once"
        rank_zero_info(
            f"engine='auto' takes 'vectorized', {at_once}: no hook is called per batch, and a trial step of the module"
            " agreed."
        )
    return engine


def _try_out(engine: VectorizedEngine, plans: Iterator[WorkPlan]) -> None:
    """Try a step on a client that can take one."""
    failure: ClientError | None = None
    for plan in islice(plans, _TRIED):
        try:
            with engine.errors_of(plan, 0, "a trial step"):
                engine.try_out(plan)
            return
        except ClientError as error:
            engine.prepared.check_parameters()  # the step may have frozen some
            if isinstance(error.__cause__, FederatedError) and not isinstance(error.__cause__, ClientError):
                raise error.__cause__ from error.__cause__.__cause__
            if is_out_of_memory(error.__cause__):
                release_memory(error, engine.flat.y.device)
                raise
            failure = failure or error
    if failure is not None:
        if isinstance(failure.__cause__, _MISSING) and _may_set_later(engine):
            raise ClientError(f"{failure}{_REMEDY}", failure.culprit) from failure.__cause__
        raise failure


def _may_set_later(engine: Engine) -> bool:
    """Return whether hooks that run after the trial step may set an attribute that it reads."""
    of_module = any(is_overridden(hook, engine.prepared.module, pl.LightningModule) for hook in _LATER)
    return of_module or any_uses_hook(engine.trainer, "on_round_start", "on_client_start", of_users=True)


def reason_in(error: FederatedError) -> str:
    """Return an engine's error as text that continues a sentence."""
    text = str(error)
    return text if text.startswith("engine=") else text[:1].lower() + text[1:]
