"""Training those clients of a chunk that can be trained."""

from collections.abc import Callable, Sequence

from lightning_fed._compat import rank_zero_info
from lightning_fed.core.errors import ClientError
from lightning_fed.engines.base import ChunkResult, Engine, WorkPlan

__all__ = ["SoundClients"]


class SoundClients:
    """Train clients together, and find out who is to blame where that fails.

    Args:
        engine: The engine that trains them.
        drops: Whether clients that fail are left out; if not, their error is raised.
    """

    def __init__(self, engine: Engine, drops: bool) -> None:
        self.engine, self.drops = engine, drops
        self.failed: dict[int, ClientError] = {}
        self._has_told = False  # that clients failed together, and how it is found out who

    def train(self, run: Callable[[Sequence[WorkPlan]], ChunkResult], plans: Sequence[WorkPlan]) -> ChunkResult | None:
        """Train those clients that can be trained, as if the others were not there; or name who cannot.

        Args:
            run: Trains clients.
            plans: The clients' work.

        Returns:
            What came back, None if every client failed; :attr:`failed` then says why, by stored index.

        Raises:
            ClientError: If a client fails and is not to be dropped, or if something fails that is no client's own
                fault.
        """
        self.failed = {}
        return self._try(run, plans)

    def _try(self, run: Callable[[Sequence[WorkPlan]], ChunkResult], plans: Sequence[WorkPlan]) -> ChunkResult | None:
        undo = self.engine.undo_point() if self.drops else _nothing
        try:
            return run(plans)
        except ClientError as error:
            undo()
            if error.culprit is None or (len(plans) == 1 and not self.drops):
                raise
            if len(plans) == 1:
                self.failed[plans[0].participant.index] = error
                return None
            if self.drops and not self._has_told:
                self._has_told = True
                rank_zero_info(
                    f"{error} Which of them it was is found out by running them one by one; the others are then run at"
                    " once again. This is said only once."
                )
            sound = []
            for plan in plans:
                if self._try(run, [plan]) is not None:
                    sound.append(plan)
                undo()
            if len(sound) == len(plans):
                raise  # no client alone is to blame
        return self._try(run, sound) if sound else None


def _nothing() -> None:
    """Take nothing back, where the run stops anyway."""
