"""Failed clients: the search for them in a chunk, their causes, and the limits that stop the run."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from statistics import median

import torch

from lightning_fed.compat.private import rank_zero_info, rank_zero_warn
from lightning_fed.core.errors import ClientError
from lightning_fed.core.types import ClientId
from lightning_fed.engines.base import ChunkResult, Engine, WorkPlan
from lightning_fed.server.participation import Participant

_SHOWN = 5  # causes listed in one message


class Faults:
    """The clients that failed in a round so far, and the causes.

    A failed client is dropped from the whole round: none of its messages is averaged, and its state does not change.
    The round equals one without the client.

    Args:
        drops: Whether failed clients are dropped. If not, the first failure stops the run.
        max_share: The share of requested clients that may fail before the run stops anyway.
        max_ratio: The limit on the ratio of a client's update norm to the cohort's median. A client above it has
            failed. None for no limit.
        round: The round, from 0.
    """

    def __init__(
        self, drops: bool = False, max_share: float = 0.0, max_ratio: float | None = None, round: int = 0
    ) -> None:
        self.drops, self.max_share, self.max_ratio, self.round = drops, max_share, max_ratio, round
        self.causes: dict[ClientId, str] = {}
        self.refused: set[ClientId] = set()  # failed clients that had already sent all their messages
        self.asked: set[ClientId] = set()  # clients requested to train
        self._asked_for_gradients: set[ClientId] = set()
        self._first: ClientError | None = None

    def ask(
        self, members: Sequence[Participant], gradient_members: Sequence[Participant], dropped: Sequence[ClientId]
    ) -> None:
        """Record the requested clients before the round starts, or restarts without failed clients.

        See :class:`DrawnCohort`.
        """
        failed, id_of = self.causes.keys(), attrgetter("client_id")
        self.asked = {*map(id_of, members), *(failed & set(dropped))}
        self._asked_for_gradients = set(map(id_of, gradient_members))
        if self._asked_for_gradients - failed:
            self._asked_for_gradients |= failed - self.asked
        self.check_asked()

    def check_asked(self) -> None:
        """Stop the run if too many of the requested clients failed; see :meth:`check`."""
        if self.causes:
            self.check(self.asked)
            self.check(self._asked_for_gradients)

    def affect(self, members: Iterable[Participant]) -> bool:
        """Return whether one of these clients failed."""
        return any(member.client_id in self.causes for member in members)

    def add(self, error: ClientError) -> None:
        """Record a failed client, or raise its error if the run must stop or no client is to blame."""
        if not self.drops or error.culprit is None:
            raise error
        self.causes.setdefault(error.culprit, str(error))
        self._first = self._first or error

    def merge(self, parts: Iterable[Mapping[ClientId, str]]) -> None:
        """Combine the :attr:`causes` of all processes, with the same result in each."""
        self.causes = dict(self.causes)  # a copy: the old dict is among `parts`
        for part in parts:
            self.causes.update(part)

    def check(self, asked: Collection[ClientId]) -> None:
        """Stop the run if all clients requested for one task failed, or more than the allowed share."""
        failed, count = sorted(self.causes.keys() & asked, key=str), len(asked)
        if not failed or (len(failed) < count and len(failed) <= self.max_share * count):
            return
        causes = "".join(f"\n- {self.causes[client_id]}" for client_id in failed[:_SHOWN])
        more = f"\n- and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else ""
        limit = f", more than max_failed_share={self.max_share:g} allows" if len(failed) < count else ""
        raise ClientError(
            f"{len(failed)} of {count} clients failed in round {self.round}{limit}:{causes}{more}"
        ) from self._first

    def add_outliers(self, norms: Mapping[ClientId, float], what: str, x: torch.Tensor) -> set[ClientId]:
        """Record and return the clients whose message ``what`` has too large a norm compared to the median."""
        known = list(filter(math.isfinite, norms.values()))  # a site may send no norms
        if self.max_ratio is None or not known:
            return set()
        middle = median(known)
        if len(known) == len(norms) and max(known) <= self.max_ratio * middle:
            return set()
        # If most clients hardly move, the median is only rounding, and cannot judge clients that still learn. The floor
        # uses at least float32's epsilon: float64's is so small that any sound step would exceed the limit.
        eps = max(torch.finfo(dtype).eps for dtype in (x.dtype, torch.float32))
        floor = eps * float(torch.linalg.vector_norm(x))
        times = f"times the cohort's median of {middle:.3g}"
        if middle < floor:
            times, middle = f"times the {floor:.3g} that may be rounding, the cohort's median being less", floor
        outliers = {client_id: norm for client_id, norm in norms.items() if norm > self.max_ratio * middle > 0}
        for client_id, norm in outliers.items():
            self.add(
                ClientError(
                    f"Client {client_id!r} returned {what} of norm {norm:.3g} in round {self.round},"
                    f" {norm / middle:.3g} {times}; max_update_ratio={self.max_ratio:g} allows less. Look at its data,"
                    " clip gradients, or raise the limit.",
                    client_id,
                )
            )
        return set(outliers)


def warn_of(failed: Mapping[ClientId, str], warned: set[ClientId]) -> None:
    """Warn about each failed client once per run, given the causes; ``warned`` tracks the clients already named."""
    for client_id, cause in failed.items():
        if client_id not in warned:
            warned.add(client_id)
            rank_zero_warn(
                f"{cause.rstrip('.')}. It has left the round, since on_client_error='drop'. From here on this client's"
                " failures are only counted."
            )


class Isolation:
    """Trains clients as if the failing ones did not exist."""

    def __init__(self, engine: Engine, drops: bool) -> None:
        self.engine, self.drops = engine, drops
        self._has_explained = False  # whether it has logged how it finds the failed client

    def run(
        self,
        train: Callable[[Sequence[WorkPlan]], ChunkResult],
        plans: Sequence[WorkPlan],
        failed: dict[int, ClientError],
    ) -> ChunkResult | None:
        """Train the clients that do not fail; return None if all fail.

        ``failed`` collects the failed clients' errors by stored index. An error is raised if failed clients are not
        dropped, or if no client is to blame.
        """
        undo = self.engine.savepoint() if self.drops else None
        try:
            return train(plans)
        except ClientError as error:
            if undo is not None:
                undo()
            if error.culprit is None or (len(plans) == 1 and not self.drops):
                raise
            if len(plans) == 1:
                failed[plans[0].participant.index] = error
                return None
            if self.drops and not self._has_explained:
                self._has_explained = True
                rank_zero_info(
                    f"{error} Which of them it was is found out by running them one by one; the others are then run at"
                    " once again. This is said only once."
                )
            sound = []
            for plan in plans:
                if self.run(train, [plan], failed) is not None:
                    sound.append(plan)
                if undo is not None:
                    undo()
            if len(sound) == len(plans):
                raise  # no single client is to blame
        return self.run(train, sound, failed) if sound else None


def stop_at(error: ClientError, drops: bool) -> None:
    """Raise an error unless failed clients are dropped and a client is to blame for it."""
    if not drops or error.culprit is None:
        raise error
