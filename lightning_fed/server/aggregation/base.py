"""The base class of aggregators that replace the weighted mean."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.arguments import ArgumentsRepr
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import Vector, Weighting
from lightning_fed.server.aggregation.mean import Aggregation
from lightning_fed.server.sampling import Sampler

FULL_GRAD = "full_grad_"
"""The prefix of a point's name in messages of full-batch gradients at that point."""


def averaged_points(algorithm: Algorithm, round: int | None = None) -> tuple[str, ...]:
    """Return the points whose full-batch gradients clients send, in a round, or in any round if None."""
    readers = algorithm.full_grad_for if round is None else algorithm.full_grad_readers(round)
    return algorithm.full_grad_at if readers in ("cohort", "both") else ()


class Aggregator(ArgumentsRepr, ABC):
    """A rule that combines the messages of a cohort into one; see ``robust`` and ``privacy``.

    It replaces the mean of every message that :attr:`Algorithm.reduces` declares, and of full-batch gradients.
    """

    weighted: bool = True
    """Whether clients may have unequal weights."""

    argument: str = "aggregator"
    """The argument of the trainer that takes it."""

    def for_run(self, algorithm: Algorithm, weighting: Weighting | None, sampler: Sampler) -> "Aggregator":
        """Return a copy of the aggregator for a run with these settings.

        Args:
            algorithm: The method.
            weighting: The ``weighting`` that the user set, or None.
            sampler: The client sampler.

        Raises:
            FederatedError: If these settings cannot be combined.
        """
        name = type(self).__name__
        if algorithm.population_loss:
            raise FederatedError(
                f"{self.argument}={self!r} cannot be combined with {algorithm!r}, which uses the mean of the losses"
                f" that all clients report: {name} does not replace that mean. Use the method without it, such as"
                " FedProx(mu=0.1)."
            )
        if not self.weighted and weighting not in (None, "uniform"):
            raise FederatedError(
                f"weighting={weighting!r} cannot be combined with {self.argument}={self!r}, which gives all clients"
                " the same weight. Leave weighting unset, or set weighting='uniform'."
            )
        if not self.weighted and "examples" in algorithm.reduces.values():
            raise FederatedError(
                f"{self.argument}={self!r} cannot be combined with {algorithm!r}, which averages messages by examples"
                f" ({dict(algorithm.reduces)}): {name} gives all clients the same weight."
            )
        return copy.copy(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that checkpoints save; none by default."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any], x: Vector) -> None:
        """Restore the state of a checkpoint.

        Args:
            state_dict: The result of :meth:`state_dict`; empty for a new run.
            x: The server parameters [P].
        """
        assert not state_dict

    @abstractmethod
    def of_round(self, *arguments: Any, **named: Any) -> Aggregation:
        """Return an object that aggregates one cohort's messages; it takes the arguments of :class:`Aggregation`."""
