"""Training those clients of a chunk that can be trained."""

from collections.abc import Callable, Sequence

from lightning_fed._compat import rank_zero_info
from lightning_fed.core.errors import ClientError
from lightning_fed.engines.base import ChunkResult, Engine, WorkPlan
from lightning_fed.rounds.faults import Faults

__all__ = ["run_sound"]


def run_sound(
    run: Callable[[Sequence[WorkPlan]], ChunkResult], plans: Sequence[WorkPlan], engine: Engine, faults: Faults
) -> ChunkResult | None:
    """Train those clients of a chunk that can be trained, as if the others were not there; or name who cannot.

    Args:
        run: Trains clients.
        plans: The clients' work.
        engine: The engine that trains them.
        faults: Takes note of those that fail. Who that is shows when clients that failed together are run one by one.

    Returns:
        What came back, None if every client failed.

    Raises:
        ClientError: If a client fails and is not to be dropped, or if something fails that is no client's own fault.
    """
    undo = engine.undo_point() if faults.drops else _nothing
    try:
        return run(plans)
    except ClientError as error:
        undo()
        if len(plans) == 1 or error.culprit is None:
            faults.add(error)
            return None
        if faults.drops and not engine.has_told:
            engine.has_told = True
            rank_zero_info(
                f"{error} Which of them it was is found out by running them one by one; the others are then run at once"
                " again. This is said only once."
            )
        sound = []
        for plan in plans:
            if run_sound(run, [plan], engine, faults) is not None:
                sound.append(plan)
            undo()
        if len(sound) == len(plans):
            raise  # no client alone is to blame
    return run_sound(run, sound, engine, faults) if sound else None


def _nothing() -> None:
    """Take nothing back, where the run stops anyway."""
