"""Clients' full-batch gradients, from their average to the clients' own work."""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from lightning_fed.core.errors import ClientError
from lightning_fed.core.types import State
from lightning_fed.engines.base import Engine, RoundInputs, WorkPlan

__all__ = ["ClientGradients"]

_KEPT_BYTES = 2**30  # of full-batch gradients that are kept from their average to the clients' work


class ClientGradients:
    """The full-batch gradients that clients take in one round, by stored index and point.

    Args:
        engine: The engine that takes them.
        clients: How many clients are to read their own in their local work.

    Attributes:
        keeps: Whether they are kept from their average to the local work. Beyond a gigabyte they are taken anew then,
            which takes as long again but keeps memory within bounds.
    """

    def __init__(self, engine: Engine, clients: int = 0) -> None:
        self.engine, self.algorithm = engine, engine.algorithm
        size = clients * len(self.algorithm.full_grad_at) * engine.flat.y.nbytes
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
