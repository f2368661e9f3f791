"""What clients do before their local work: they take full-batch gradients, and run the method's own solve."""

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from lightning_fed.core.errors import ClientError
from lightning_fed.core.seeds import Purpose, derive_seed
from lightning_fed.core.types import State
from lightning_fed.engines.base import Engine, RoundInputs, WorkPlan
from lightning_fed.engines.prepared import PreparedModule
from lightning_fed.rounds.local_plans import limited, num_examples
from lightning_fed.settings.settings import Settings, cut

__all__ = ["ClientGradients", "OwnSolve", "prepared_for_own_solve"]

_KEPT_BYTES = 2**30  # of full-batch gradients that are kept from their average to the clients' work


class ClientGradients:
    """The full-batch gradients that clients take in one round, by stored index and point.

    Args:
        engine: The engine that takes them.

    Attributes:
        keeps: Whether they are kept from their average to the local work. Beyond a gigabyte they are taken anew then,
            which takes as long again but keeps memory within bounds.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.algorithm = engine, engine.algorithm
        self.begin_round(0)

    def begin_round(self, clients: int) -> None:
        """Forget those of the last round; so many clients are to read their own in their local work."""
        size = clients * len(self.algorithm.full_grad_at) * self.engine.flat.y.nbytes
        self.keeps = self.algorithm.full_grad_for == "both" and size <= _KEPT_BYTES
        self._kept: dict[int, State] = {}
        self._norms: dict[int, dict[str, float]] = {}
        self._anew: set[int] = set()  # those that had to be taken for the local work

    def each(self, inputs: RoundInputs, plans: Sequence[WorkPlan]) -> Iterator[tuple[WorkPlan, State | ClientError]]:
        """Yield the gradients of clients at the points that the method names, or why a client has none."""
        for plan, answer in self.engine.each_full_gradients(inputs, plans):
            index = plan.participant.index
            try:
                gradients = self._checked(plan, answer, inputs.round)
            except ClientError as error:
                yield plan, error
                continue
            if self.keeps:
                self._kept[index] = gradients
            yield plan, gradients

    def of_workers(self, inputs: RoundInputs, plans: Sequence[WorkPlan]) -> dict[int, State]:
        """Return the gradients of clients about to work, where these are theirs to read.

        Raises:
            ClientError: If a client has none.
        """
        if self.algorithm.full_grad_for == "cohort":
            return {}
        indices = [plan.participant.index for plan in plans]
        own = {index: self._kept[index] for index in indices if index in self._kept}
        missing = [plan for plan in plans if plan.participant.index not in own]
        for plan, answer in self.engine.each_full_gradients(inputs, missing):
            index = plan.participant.index
            own[index] = self._checked(plan, answer, inputs.round)
            self._anew.add(index)
        return own

    def norms_of(self, indices: Iterable[int], taken_anew: bool = False) -> dict[str, dict[int, float]]:
        """Return the norms of clients' gradients, by point and stored index.

        Args:
            indices: The clients.
            taken_anew: Whether those that were kept from their average are left out.
        """
        known = [index for index in indices if index in (self._anew if taken_anew else self._norms)]
        points = self.algorithm.full_grad_at if known else ()
        return {point: {index: self._norms[index][point] for index in known} for point in points}

    def _checked(self, plan: WorkPlan, answer: State | ClientError, round: int) -> State:
        """Return a client's gradients, and note their norms.

        Raises:
            ClientError: If it has none, or one that is not finite.
        """
        if isinstance(answer, ClientError):
            raise answer
        client_id = plan.participant.client_id
        norms = {point: float(torch.linalg.vector_norm(gradient)) for point, gradient in answer.items()}
        for point, norm in norms.items():
            if not math.isfinite(norm):
                raise ClientError(
                    f"Client {client_id!r} came back from round {round} with a full-batch gradient at {point} that is"
                    " not finite. Lower the learning rate, or look at its data.",
                    client_id,
                )
        self._norms[plan.participant.index] = norms
        return answer


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
        return [num_examples(self.plan(plan)) for plan in plans]
