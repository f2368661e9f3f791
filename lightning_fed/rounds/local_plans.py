"""The work of clients in a round, planned from their data."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from lightning_fed.compat.package import pl
from lightning_fed.compat.private import rank_zero_warn
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.data.batches.batches import ClientBatches, RepeatedBatches
from lightning_fed.engines.base import WorkPlan
from lightning_fed.engines.client_errors import NamesClient
from lightning_fed.server.participation import Participant, Population
from lightning_fed.settings.settings import Settings, cut

__all__ = ["LocalPlans", "limited", "num_examples"]

_TRIED = 10  # clients whose data cannot be made, before the first round


class LocalPlans:
    """Plan what clients do, from their data.

    Args:
        trainer: The trainer, with its data module attached.
        settings: How rounds are run.
        population: The clients there are.
        clients: Those whose data is here; all of them by default.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        settings: Settings,
        population: Population,
        clients: Sequence[ClientId] | None = None,
    ) -> None:
        self.trainer, self.settings, self.population = trainer, settings, population
        self.clients: Sequence[ClientId] = population if clients is None else clients

    def for_round(self, round: int) -> "RoundPlans":
        """Return what plans the work of one round, and builds each client's data once."""
        return RoundPlans(self, round)

    def some(self) -> Iterator[WorkPlan]:
        """Yield the work of the first few clients that have examples, to try things out on.

        Raises:
            ClientError: If the data of none of them can be made.
        """
        failures: list[ClientError] = []
        for client_id in self.clients:
            try:
                plan = self.for_round(0).plan(client_id, warns=False)
            except ClientError as error:
                failures.append(error)
                if len(failures) in (_TRIED, len(self.clients)):
                    raise
                continue
            if plan is not None:
                yield plan

    def check_counts(self) -> None:
        """Refuse clients' loaders whose batches do not tell how many examples they have; one client is tried.

        Raises:
            FederatedError: Naming the client, the batch and the remedy.
        """
        try:
            plan = next(self.some(), None)
        except ClientError:
            return  # it is reported when the client is at work
        if plan is not None:
            plan.batches.check_counts()


class RoundPlans:
    """Plan the work of one round.

    Args:
        plans: What the run plans with.
        round: The round.
    """

    def __init__(self, plans: LocalPlans, round: int) -> None:
        self.round, self.settings, self.population = round, plans.settings, plans.population
        self._accumulated = plans.trainer.accumulate_grad_batches
        self._limit, self._repeats = plans.trainer.limit_train_batches, plans.settings.algorithm.steps_per_batch
        self._batches_of: Callable[[ClientId], ClientBatches] = plans.trainer.datamodule.batches_of()
        self._work: dict[int, tuple[int, tuple[int, ...]]] = {}  # steps and batches by the length of an epoch
        self._plans: dict[ClientId, WorkPlan | None] = {}  # None of clients without examples

    def of_drawn(
        self, drawn: Mapping[ClientId, int], failed: Callable[[ClientError], None] | None
    ) -> list[Participant]:
        """Plan the work asked of each client, and return those that can take part; one drawn twice is trained once.

        Args:
            drawn: How often each client was drawn.
            failed: Is told of clients whose data cannot be made; None to stop there.
        """
        members = []
        for client_id, count in drawn.items():
            try:
                plan = self.plan(client_id)
            except ClientError as error:
                if failed is None:
                    raise
                failed(error)
                continue
            if plan is not None:
                members.append(plan.participant if count == 1 else replace(plan.participant, count=count))
        return members

    def plan(self, client_id: ClientId, warns: bool = True) -> WorkPlan | None:
        """Return a client's whole work, None if it has no examples.

        Raises:
            ClientError: If its data cannot be made.
        """
        if client_id not in self._plans:
            self._plans[client_id] = self._plan(client_id)
        plan = self._plans[client_id]
        if plan is None and warns:
            rank_zero_warn(f"Client {client_id!r} is empty: it is left out of round {self.round}.")
        return plan

    def _plan(self, client_id: ClientId) -> WorkPlan | None:
        try:
            batches = self._batches_of(client_id)
            length = batches.num_batches() if batches.size else 0
            if self._repeats > 1:
                batches = RepeatedBatches(batches, self._repeats)
        except Exception as error:
            if isinstance(error, FederatedError) and not isinstance(error, ClientError):
                raise  # what a module refuses by name is refused here too
            with NamesClient(client_id, self.round, "the making of its data", lambda: None):
                raise
        if batches.size == 0:
            return None
        if length not in self._work:
            num_batches = limited(length, self._limit) * self._repeats
            steps = self.settings.steps(num_batches, self._accumulated)
            self._work[length] = steps, cut(steps, num_batches, self._accumulated)
        steps, epochs = self._work[length]
        who = Participant(client_id, self.population.index_of(client_id), batches.size, 1, steps)
        return WorkPlan(who, batches, epochs)

    def of(self, index: int, steps: int | None = None) -> WorkPlan:
        """Return the work planned for a client, cut to what is asked of it.

        Args:
            index: Its stored index.
            steps: The local steps asked of it; None for all that were planned.
        """
        client_id = self.population.ids[index]
        plan = self._plans.get(client_id) or self.plan(client_id)
        if plan is None:
            raise ClientError(f"Client {client_id!r} has no examples.", client_id)
        if steps is None or steps == plan.participant.steps:
            return plan
        epochs = cut(steps, plan.epochs[0], self._accumulated)
        return WorkPlan(replace(plan.participant, steps=steps), plan.batches, epochs)


def limited(num_batches: int, limit: int | float) -> int:
    """Apply ``limit_train_batches`` to a client's epoch: a count, or a share of at least one batch."""
    if isinstance(limit, int):
        return min(num_batches, limit)
    return min(num_batches, max(1, int(num_batches * limit)))


def num_examples(plan: WorkPlan) -> int:
    """Return how many examples a client goes through in its local epochs."""
    return sum(map(plan.batches.num_examples, plan.epochs))
