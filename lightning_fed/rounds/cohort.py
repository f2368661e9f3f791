"""Who takes part in a round: clients are drawn, by the seed, the round and what they say of themselves; some fail."""

import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from lightning_fed.compat.package import pl
from lightning_fed.compat.private import rank_zero_info, rank_zero_warn
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.seeds import Purpose, derive_seed
from lightning_fed.core.types import ClientId
from lightning_fed.server.aggregation.privacy import DifferentialPrivacy
from lightning_fed.server.participation import Participant, Population
from lightning_fed.server.sampling import Sampler, draw
from lightning_fed.settings.settings import Settings

__all__ = ["CohortSampling", "DrawnCohort", "Faults", "secret_seed", "warn_of"]

_SHOWN = 5  # causes that one message lists


@dataclass(frozen=True, slots=True)
class DrawnCohort:
    """The clients of a round.

    Attributes:
        members: Those that train, with the steps planned for them.
        gradient_members: Those that take full-batch gradients at the points that the method names.
        dropped: The ids that were drawn to train and left out.
    """

    members: Sequence[Participant] = ()
    gradient_members: Sequence[Participant] = ()
    dropped: Sequence[ClientId] = ()


class CohortSampling:
    """Draw the cohorts of a run.

    Args:
        settings: How rounds are run.
        population: The clients there are.
        seed: What cohorts are drawn from; the run's, or :func:`secret_seed`.
    """

    def __init__(self, settings: Settings, population: Population, seed: int) -> None:
        self.settings, self.population, self.seed = settings, population, seed

    def draw(self, round: int, ask: Callable[[Mapping[ClientId, int]], Sequence[Participant]]) -> DrawnCohort:
        """Return a round's cohort.

        Args:
            round: The round.
            ask: Given how often each client was drawn, returns those that can take part, in this order, with their
                sizes and the steps that they would take.
        """
        settings, algorithm = self.settings, self.settings.algorithm
        drawn = self._drawn(settings.sampler, self.seed, round)
        members = ask(drawn)
        if settings.heterogeneity is not None:
            members = self._completed(members, round)
        if algorithm.needs_everyone:
            self._check_everyone(members, round)
        gradient_members: Sequence[Participant] = ()
        if algorithm.full_grad_at:
            gradient_members = members
            if algorithm.grad_cohort != "same":
                seed = derive_seed(self.seed, Purpose.GRADIENT_COHORT)
                gradient_members = ask(self._drawn(settings.gradient_sampler, seed, round))
            if not gradient_members:
                members = ()  # without the cohort's gradient there is no step to take
        there = {member.client_id for member in members}
        return DrawnCohort(members, gradient_members, [client_id for client_id in drawn if client_id not in there])

    def _check_everyone(self, members: Sequence[Participant], round: int) -> None:
        """Refuse a cohort that is not all clients, alike in their steps, to a method that needs it.

        Raises:
            FederatedError: Naming the method and what was found.
        """
        name, steps = type(self.settings.algorithm).__name__, sorted({member.steps for member in members})
        if self.settings.drops_failed:
            raise FederatedError(f"{name} needs all clients in every round: leave on_client_error at 'raise'.")
        if len(members) < len(self.population) or len(steps) > 1:
            found = f"{steps[0]} to {steps[-1]} steps" if steps else "no steps"
            raise FederatedError(
                f"{name} needs all clients in every round, with the same number of local steps; in round {round} there"
                f" are {len(members)} of {len(self.population)}, with {found}. Set clients_per_round=1.0 and"
                " local_steps."
            )

    def _drawn(self, sampler: Sampler, seed: int, round: int) -> Mapping[ClientId, int]:
        """Draw ids, with how often each came up, in the order in which they first did."""
        return Counter(draw(sampler, seed, round, self.population, self.seed))

    def _completed(self, members: Sequence[Participant], round: int) -> list[Participant]:
        """Cut the work to what heterogeneity lets clients complete."""
        assert self.settings.heterogeneity is not None
        epochs = [self.settings.local_epochs or 1] * len(members)
        steps = self.settings.heterogeneity(
            self.seed, round, [m.index for m in members], epochs, [m.steps for m in members]
        )
        return [replace(m, steps=done) for m, done in zip(members, steps, strict=True) if done is not None]


class Faults:
    """The clients that failed in a round so far, and why.

    A client that fails leaves the whole round: nothing of it is averaged, and what it keeps stays as it was. The round
    is then what it would have been had the client not been drawn.

    Args:
        drops: Whether clients that fail leave the round; if not, the run stops at the first one.
        max_share: The share of the clients asked that may fail before the run stops all the same.
        max_ratio: The ratio of a client's update norm to the cohort's median at which the client has failed too; None
            for no such limit.
        round: The round, from 0.
    """

    def __init__(
        self, drops: bool = False, max_share: float = 0.0, max_ratio: float | None = None, round: int = 0
    ) -> None:
        self.drops, self.max_share, self.max_ratio, self.round = drops, max_share, max_ratio, round
        self.causes: dict[ClientId, str] = {}
        self.refused: set[ClientId] = set()  # those of them whose messages had all been sent
        self.asked: set[ClientId] = set()  # to train
        self._asked_for_gradients: set[ClientId] = set()
        self._first: ClientError | None = None

    def ask(
        self, members: Sequence[Participant], gradient_members: Sequence[Participant], dropped: Sequence[ClientId]
    ) -> None:
        """Take note of who is asked in the round, before it begins or begins again without those that have failed.

        Args:
            members: Those that are to train.
            gradient_members: Those whose full-batch gradients are averaged.
            dropped: Those that were drawn to train and left out.

        Raises:
            ClientError: If too many have failed.
        """
        failed = self.causes.keys()
        self.asked = {member.client_id for member in members} | (failed & set(dropped))
        self._asked_for_gradients = {member.client_id for member in gradient_members}
        if self._asked_for_gradients - failed:
            self._asked_for_gradients |= failed - self.asked
        self.check_asked()

    def check_asked(self) -> None:
        """End the run if too many of those that are asked have failed; see :meth:`check`."""
        self.check(self.asked)
        self.check(self._asked_for_gradients)

    def have_hit(self, members: Iterable[Participant]) -> bool:
        """Return whether one of these has failed."""
        return bool(self.causes) and any(member.client_id in self.causes for member in members)

    def add(self, error: ClientError) -> None:
        """Take note of a client that failed.

        Raises:
            ClientError: The error itself, if the run is to stop, or if no client is to blame for it.
        """
        if not self.drops or error.culprit is None:
            raise error
        self.causes.setdefault(error.culprit, str(error))
        self._first = self._first or error

    def merge(self, parts: Iterable[Mapping[ClientId, str]]) -> None:
        """Take in everybody's :attr:`causes`, the same way in every process."""
        self.causes = dict(self.causes)  # the old one is this process's part
        for part in parts:
            self.causes.update(part)

    def check(self, asked: Collection[ClientId]) -> None:
        """End the run if too many clients failed.

        Args:
            asked: The clients that were to do one thing together.

        Raises:
            ClientError: If all of them failed, or a larger share than allowed; it names them and the causes.
        """
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
        """Take note of the clients that are out of all proportion, and return them.

        The median is that of the cohort, but no less than what rounding to float32 does to the parameters.

        Args:
            norms: The norm of what each client that completed came back with.
            what: What that is.
            x: The server parameters [P].

        Raises:
            ClientError: Naming the first of them, if clients are not dropped.
        """
        if self.max_ratio is None or not norms:
            return set()
        middle = median(norms.values())
        if max(norms.values()) <= self.max_ratio * middle:
            return set()
        # Where most clients hardly move, their median is rounding, and no measure of those that still learn. The floor
        # is at least float32's: float64 rounds so much less that any sound step would be out of proportion to it.
        eps = max(torch.finfo(dtype).eps for dtype in (x.dtype, torch.float32))
        floor = eps * float(torch.linalg.vector_norm(x))
        times = f"times the cohort's median of {middle:.3g}"
        if middle < floor:
            times, middle = f"times the {floor:.3g} that may be rounding, the cohort's median being less", floor
        outliers = {client_id: norm for client_id, norm in norms.items() if norm > self.max_ratio * middle > 0}
        for client_id, norm in outliers.items():
            self.add(
                ClientError(
                    f"Client {client_id!r} came back from round {self.round} with {what} of norm {norm:.3g},"
                    f" {norm / middle:.3g} {times}; max_update_ratio={self.max_ratio:g} allows less. Look at its data,"
                    " clip gradients, or raise the limit.",
                    client_id,
                )
            )
        return set(outliers)


def warn_of(failed: Mapping[ClientId, str], warned: set[ClientId]) -> None:
    """Warn of clients that have failed in a round, once of each in a run.

    Args:
        failed: Why each has failed, by id.
        warned: Those of whom a warning was given before; these are added.
    """
    for client_id, cause in failed.items():
        if client_id not in warned:
            warned.add(client_id)
            rank_zero_warn(
                f"{cause.rstrip('.')}. It has left the round, since on_client_error='drop'. From here on this client's"
                " failures are only counted."
            )


def secret_seed(trainer: pl.Trainer, aggregator: DifferentialPrivacy, population: Population) -> int:
    """Return a seed of the cohorts that nobody knows, which privacy depends on.

    Args:
        trainer: The trainer, all of whose processes must ask.
        aggregator: Adds the noise.
        population: The clients.
    """
    rank_zero_info(
        f"{aggregator!r}: cohorts and noise are drawn from the operating system's entropy, so that the run does not"
        " repeat itself. What is known of clients' training is not logged."
    )
    delta, most = aggregator.delta, 1 / len(population)
    if delta >= most:
        rank_zero_warn(f"delta={delta:g} is not below 1/N = {most:.3g}: such a guarantee says little of one client.")
    unknown: int = trainer.strategy.broadcast(secrets.randbits(62))
    return unknown
