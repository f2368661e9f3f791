"""The clients of a round: drawn from the seed and the round, with steps limited by heterogeneity."""

import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from lightning_fed.compat.package import pl
from lightning_fed.compat.private import rank_zero_info, rank_zero_warn
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.seeds import Purpose, derive_seed
from lightning_fed.core.types import ClientId
from lightning_fed.server.participation import Participant, Population, unbiased
from lightning_fed.server.privacy import DifferentialPrivacy
from lightning_fed.server.sampling import LossesOf, draw
from lightning_fed.settings.settings import Settings


@dataclass(frozen=True, slots=True)
class DrawnCohort:
    """The clients of a round."""

    members: Sequence[Participant] = ()  # the clients that train, with their planned steps
    gradient_members: Sequence[Participant] = ()  # the clients that compute full-batch gradients at the method's points
    dropped: Sequence[ClientId] = ()  # the ids of clients that were drawn to train but left out
    measured: Sequence[ClientId] = ()  # the ids of clients whose loss was measured to draw the others


class CohortSampling:
    """Draws the cohorts of a run, by its seed or by :func:`secret_seed`."""

    def __init__(self, settings: Settings, population: Population, seed: int) -> None:
        self.settings, self.population, self.seed = settings, population, seed
        self._is_checked = type(settings.sampler).__module__.startswith("lightning_fed.")

    def draw(
        self,
        round: int,
        ask: Callable[[Mapping[ClientId, int]], Sequence[Participant]],
        losses_of: LossesOf | None = None,
    ) -> DrawnCohort:
        """Return a round's cohort.

        ``ask`` takes the number of draws of each client. It returns the clients that can participate, in this order,
        with their sizes and steps. ``losses_of`` measures clients for samplers that need losses.
        """
        settings, algorithm = self.settings, self.settings.algorithm
        measured = dict[ClientId, float]()

        def once(clients: Sequence[ClientId]) -> Mapping[ClientId, float]:
            assert losses_of is not None
            if missing := [client_id for client_id in dict.fromkeys(clients) if client_id not in measured]:
                measured.update(losses_of(missing))
            return {client_id: measured[client_id] for client_id in clients if client_id in measured}

        if isinstance(settings.aggregator, DifferentialPrivacy):
            cohort = settings.aggregator.cohort(self.seed, round, self.population)
        else:
            cohort = draw(settings.sampler, self.seed, round, self.population, self.seed, once)
            if not self._is_checked:
                self._is_checked = True
                if cohort != (again := draw(settings.sampler, self.seed, round, self.population, self.seed, once)):
                    raise FederatedError(
                        f"The sampler drew {cohort[:5]} in round {round}, and {again[:5]} when it was asked again."
                        " Other processes and a resumed run would train other clients. Draw from (seed, round) alone,"
                        " such as with torch.Generator().manual_seed(seed + round), or learn in update(): see"
                        " LearningSampler."
                    )
        drawn = Counter(cohort)
        members = ask(drawn)
        if settings.heterogeneity is not None:  # it limits each client's steps
            epochs, planned = [settings.local_epochs or 1] * len(members), [m.steps for m in members]
            steps = settings.heterogeneity(self.seed, round, [m.index for m in members], epochs, planned)
            _check_steps(steps, members, settings.heterogeneity)
            completed = zip(members, steps, strict=True)
            members = [replace(member, steps=done) for member, done in completed if done is not None]
        if (chances := getattr(settings.sampler, "probabilities", None)) is not None:
            members = unbiased(members, chances(round, self.population), self.population, settings.weighting)
        if algorithm.needs_everyone:
            self._check_everyone(members, round)
        gradient_members: Sequence[Participant] = ()
        if algorithm.full_grad_at and algorithm.full_grad_readers(round) != "nobody":
            gradient_members = members
            if algorithm.grad_cohort != "same":
                seed = derive_seed(self.seed, Purpose.GRADIENT_COHORT)
                others = draw(settings.gradient_sampler, seed, round, self.population, self.seed, once)
                gradient_members = ask(Counter(others))
            if not gradient_members:
                members = ()  # without the cohort's gradient there is no step
        there = {member.client_id for member in members}
        dropped = [client_id for client_id in drawn if client_id not in there]
        return DrawnCohort(members, gradient_members, dropped, tuple(measured))

    def _check_everyone(self, members: Sequence[Participant], round: int) -> None:
        """Raise if the method needs all clients with equal steps, but the cohort differs."""
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


def secret_seed(trainer: pl.Trainer, aggregator: DifferentialPrivacy, population: Population) -> int:
    """Return a secret seed for the cohorts, which privacy depends on; all processes must call it."""
    rank_zero_info(
        f"{aggregator!r}: cohorts and noise are drawn from the operating system's entropy, so the run does not repeat"
        " itself. Values from clients' training are not logged. Those of validation are: its data must not be clients'."
    )
    delta, most = aggregator.delta, 1 / len(population)
    if delta >= most:
        rank_zero_warn(f"delta={delta:g} is not below 1/N = {most:.3g}: such a guarantee says little of one client.")
    unknown: int = trainer.strategy.broadcast(secrets.randbits(128))
    return unknown


def _check_steps(found: Any, members: Sequence[Participant], heterogeneity: object) -> None:
    """Raise unless a heterogeneity model has returned a number of local steps, or None, for each client."""
    fits = isinstance(found, Sequence) and not isinstance(found, str) and len(found) == len(members)
    if not fits or any(k is not None and (not isinstance(k, Integral) or k < 0) for k in found):
        raise FederatedError(
            f"{type(heterogeneity).__name__} must return a list with the local steps of each of {len(members)} clients,"
            f" integers of at least 0, or None for a client that is left out, found {found!r}."
        )
