"""Who works in a round, and how much."""

import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import TypeAlias

import pytorch_lightning as pl

from lightning_fed._compat import rank_zero_info, rank_zero_warn
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.seeds import Purpose, derive_seed
from lightning_fed.core.types import ClientId
from lightning_fed.data.batches import ClientBatches
from lightning_fed.engines.base import WorkPlan
from lightning_fed.engines.client_errors import NamesClient
from lightning_fed.rounds.faults import Faults
from lightning_fed.server.aggregation import Participant
from lightning_fed.server.population import Population
from lightning_fed.server.privacy import DifferentialPrivacy
from lightning_fed.server.sampling import Sampler, draw
from lightning_fed.settings import Settings, cut

__all__ = ["Planner", "cohort_seed"]

Builder: TypeAlias = Callable[[ClientId], tuple[ClientBatches, int]]
"""Returns a client's data, and its number of batches."""

_TRIED = 10  # clients whose data cannot be made, before the first round


class Planner:
    """Draw cohorts and plan what their clients do, as a function of (seed, round).

    Args:
        trainer: The trainer, with its data module attached.
        settings: How rounds are run.
        population: The clients there are.
        seed: What cohorts are drawn from; see :func:`cohort_seed`.
    """

    def __init__(self, trainer: pl.Trainer, settings: Settings, population: Population, seed: int) -> None:
        self.trainer, self.settings, self.population, self.seed = trainer, settings, population, seed

    def cohort(self, round: int, faults: Faults) -> tuple[list[WorkPlan], list[WorkPlan], list[ClientId]]:
        """Return a round's work, that of those whose full-batch gradients are averaged, and the ids that are left out.

        Args:
            round: The round.
            faults: Takes note of clients whose data cannot be built.
        """
        drawn, build = self._draw(self.settings.sampler, self.seed, round), self._builder(round)
        plans = self._plan(drawn, round, faults, build)
        if self.settings.heterogeneity is not None:
            plans = self._completed(plans, round)
        gradient_plans = self._gradient_cohort(round, plans, faults, build)
        if self.settings.algorithm.full_grad_at and not gradient_plans:
            plans = []  # without the cohort's gradient there is no step to take
        kept = {plan.participant.client_id for plan in plans}
        return plans, gradient_plans, [client_id for client_id in drawn if client_id not in kept]

    def _gradient_cohort(self, round: int, cohort: list[WorkPlan], faults: Faults, build: Builder) -> list[WorkPlan]:
        if not self.settings.algorithm.full_grad_at:
            return []
        if self.settings.algorithm.grad_cohort == "same":
            return cohort
        seed = derive_seed(self.seed, Purpose.GRADIENT_COHORT)
        return self._plan(self._draw(self.settings.gradient_sampler, seed, round), round, faults, build)

    def some(self) -> Iterator[WorkPlan]:
        """Yield the work of the first few clients that have examples, to try things out on.

        Raises:
            ClientError: If the data of none of them can be made.
        """
        failures: list[ClientError] = []
        for client_id in self.population:
            build = self._builder(0)
            try:
                batches, _ = build(client_id)
                plans = self._plan({client_id: 1}, 0, Faults(), build) if batches.size else []
            except ClientError as error:
                failures.append(error)
                if len(failures) in (_TRIED, len(self.population)):
                    raise
                continue
            yield from plans

    def everyone(self, wanted: Callable[[int], bool]) -> Iterator[tuple[int, ClientId]]:
        """Yield stored index and id of every client whose index is wanted."""
        for client_id in self.population:
            index = self.population.index_of(client_id)
            if wanted(index):
                yield index, client_id

    def _draw(self, sampler: Sampler, seed: int, round: int) -> dict[ClientId, int]:
        """Draw ids, with how often each came up."""
        drawn: dict[ClientId, int] = {}
        for client_id in draw(sampler, seed, round, self.population, self.seed):
            drawn[client_id] = drawn.get(client_id, 0) + 1
        return drawn

    def _plan(self, drawn: dict[ClientId, int], round: int, faults: Faults, build: Builder) -> list[WorkPlan]:
        """Plan the work asked of each client; one drawn twice is trained once."""
        accumulated = self.trainer.accumulate_grad_batches
        work: dict[int, tuple[int, tuple[int, ...]]] = {}  # steps and batches by the length of an epoch
        plans = []
        for client_id, count in drawn.items():
            index = self.population.index_of(client_id)
            try:
                batches, length = build(client_id)
            except ClientError as error:
                faults.add(error)
                continue
            if batches.size == 0:
                rank_zero_warn(f"Client {client_id!r} is empty: it is left out of round {round}.")
                continue
            if length not in work:
                num_batches = _limit(length, self.trainer.limit_train_batches)
                steps = self.settings.steps(num_batches, accumulated)
                work[length] = steps, cut(steps, num_batches, accumulated)
            steps, epochs = work[length]
            plans.append(WorkPlan(Participant(client_id, index, batches.size, count, steps), batches, epochs))
        return plans

    def _builder(self, round: int) -> Builder:
        """Return what builds a client's data once, however many of the round's cohorts it is in."""
        return cache(partial(self._build, self.trainer.datamodule.batches_of(), round))

    def _build(
        self, batches_of: Callable[[ClientId], ClientBatches], round: int, client_id: ClientId
    ) -> tuple[ClientBatches, int]:
        """Return a client's data, and its number of batches; what a module refuses by name is refused here too."""
        try:
            batches = batches_of(client_id)
            return batches, batches.num_batches() if batches.size else 0
        except Exception as error:
            if isinstance(error, FederatedError) and not isinstance(error, ClientError):
                raise
            with NamesClient(client_id, round, "the making of its data", lambda: None):
                raise

    def _completed(self, plans: list[WorkPlan], round: int) -> list[WorkPlan]:
        """Cut the work to what heterogeneity lets clients complete."""
        assert self.settings.heterogeneity is not None
        members = [plan.participant for plan in plans]
        epochs = [self.settings.local_epochs or 1] * len(members)
        steps = self.settings.heterogeneity(
            self.seed, round, [m.index for m in members], epochs, [m.steps for m in members]
        )
        accumulated = self.trainer.accumulate_grad_batches
        return [
            WorkPlan(replace(plan.participant, steps=done), plan.batches, cut(done, plan.epochs[0], accumulated))
            for plan, done in zip(plans, steps, strict=True)
            if done is not None
        ]


def cohort_seed(trainer: pl.Trainer, settings: Settings, population: Population, seed: int) -> int:
    """Return the seed of the cohorts: the run's, or one that nobody knows where privacy rests on it.

    Args:
        trainer: The trainer, all of whose processes must ask.
        settings: How rounds are run.
        population: The clients there are.
        seed: The run's seed.
    """
    aggregator = settings.aggregator
    if not isinstance(aggregator, DifferentialPrivacy):
        return seed
    rank_zero_info(
        f"{aggregator!r}: cohorts and noise are drawn from the operating system's entropy, so that the run does not"
        " repeat itself. What is known of clients' training is not logged."
    )
    delta, most = aggregator.delta, 1 / len(population)
    if delta >= most:
        rank_zero_warn(f"delta={delta:g} is not below 1/N = {most:.3g}: such a guarantee says little of one client.")
    unknown: int = trainer.strategy.broadcast(secrets.randbits(62))
    return unknown


def _limit(num_batches: int, limit: int | float) -> int:
    """Apply ``limit_train_batches`` to a client's epoch: a count, or a share of at least one batch."""
    if isinstance(limit, int):
        return min(num_batches, limit)
    return min(num_batches, max(1, int(num_batches * limit)))
