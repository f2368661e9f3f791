"""A local solve of each client that comes before its work in a round, and that sends nothing."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from lightning_fed.core.errors import ClientError
from lightning_fed.core.seeds import Purpose, derive_seed
from lightning_fed.core.types import State
from lightning_fed.engines.base import Engine, RoundInputs, WorkPlan
from lightning_fed.engines.prepared import PreparedModule
from lightning_fed.rounds.local_plans import limited
from lightning_fed.settings import Settings, cut

__all__ = ["OwnSolve", "prepared_for_own_solve"]


def prepared_for_own_solve(prepared: PreparedModule) -> PreparedModule:
    """Return the same module and optimizer, for an engine that runs the own solve of the method."""
    other = copy.copy(prepared)
    own = prepared.algorithm.own_solve
    assert own is not None
    other.algorithm = own
    other.seed = derive_seed(prepared.seed, Purpose.OWN_SOLVE) if own.own_batches else prepared.seed
    return other


class OwnSolve:
    """Run :attr:`Algorithm.own_solve` of clients; what it keeps is theirs when their work begins.

    It leaves no other trace: what it logs is forgotten, and buffers are written anew before the work.

    Args:
        engine: Runs it.
        settings: How rounds are run.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings, self._trainer = engine, settings, engine.trainer
        self._epochs = engine.algorithm.own_epochs

    def begin_round(self, plans: Sequence[WorkPlan]) -> None:
        """Look at what may have changed since the last round, before any client does anything in this one."""
        self.engine.begin_round([self.plan(plan) for plan in plans])

    def plan(self, plan: WorkPlan) -> WorkPlan:
        """Return the work of a client's own solve: as long as its work in the round, unless the method says."""
        batches, accumulated = plan.batches.for_own_solve(), self._trainer.accumulate_grad_batches
        if self._epochs is None and batches is plan.batches:
            return plan
        length = limited(batches.num_batches(), self._trainer.limit_train_batches)
        steps = self.settings.steps(length, accumulated)
        if self._epochs is not None:
            steps = -(-length // accumulated) * self._epochs
        who = replace(plan.participant, steps=steps)
        return WorkPlan(who, batches, cut(steps, length, accumulated))

    def run(
        self, inputs: RoundInputs, plans: Sequence[WorkPlan], clients: Sequence[State]
    ) -> tuple[list[State], dict[int, ClientError]]:
        """Return what clients keep after their own solve, and those that failed, by stored index.

        Args:
            inputs: What the server hands out.
            plans: The clients' work in the round.
            clients: What they keep.
        """
        kept = {plan.participant.index: client for plan, client in zip(plans, clients, strict=True)}
        failed: dict[int, ClientError] = {}
        for chunk in self.engine.chunks([self.plan(plan) for plan in plans if any(plan.epochs)]):
            undo = self.engine.undo_point()
            try:
                own: list[Any] = [kept[plan.participant.index] for plan in chunk]
                result = self.engine.run(inputs, chunk, own, [{}] * len(chunk))
                failed |= {result.participants[row].index: error for row, error in result.faults.items()}
                for who, new in zip(result.participants, result.kept(), strict=True):
                    kept[who.index] = {**kept[who.index], **new}
            finally:
                undo()
        return [kept[plan.participant.index] for plan in plans], failed

    def examples(self, plans: Iterable[WorkPlan]) -> list[int]:
        """Return how many examples each client goes through."""
        own = [self.plan(plan) for plan in plans]
        return [sum(plan.batches.num_examples(batches) for batches in plan.epochs) for plan in own]
