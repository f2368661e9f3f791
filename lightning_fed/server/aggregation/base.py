"""Other ways to put the messages of a cohort together than their weighted mean."""

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

__all__ = ["FULL_GRAD", "Aggregator", "averaged_points"]

FULL_GRAD = "full_grad_"
"""What the name of a point is put behind to name the full-batch gradients that clients send of it."""


def averaged_points(algorithm: Algorithm, round: int | None = None) -> tuple[str, ...]:
    """Return the points whose full-batch gradients clients send to be averaged, in a round or else in any round."""
    readers = algorithm.full_grad_for if round is None else algorithm.full_grad_readers(round)
    return algorithm.full_grad_at if readers in ("cohort", "both") else ()


class Aggregator(ArgumentsRepr, ABC):
    """A rule that combines the messages of a cohort into one; see ``robust`` and ``privacy`` beside it.

    It replaces the mean of every message that :attr:`Algorithm.reduces` declares, and of full-batch gradients.
    """

    weighted: bool = True
    """Whether clients may count unequally."""

    def for_run(self, algorithm: Algorithm, weighting: Weighting | None, sampler: Sampler) -> "Aggregator":
        """Return the aggregator as a run with these settings uses it.

        Args:
            algorithm: The method.
            weighting: The ``weighting`` that the user set, None if none.
            sampler: Who takes part.

        Raises:
            FederatedError: If they do not go together.
        """
        name = type(self).__name__
        if algorithm.population_loss:
            raise FederatedError(
                f"aggregator={self!r} does not go with {algorithm!r}, which goes by the mean of the losses that all"
                f" clients report: {name} does not stand in for that mean. Use the method without it, such as"
                " FedProx(mu=0.1)."
            )
        if not self.weighted and weighting not in (None, "uniform"):
            raise FederatedError(
                f"weighting={weighting!r} does not go with aggregator={self!r}, for which all clients count alike."
                " Leave weighting unset, or set weighting='uniform'."
            )
        if not self.weighted and "examples" in algorithm.reduces.values():
            raise FederatedError(
                f"aggregator={self!r} does not go with {algorithm!r}, which averages messages by examples"
                f" ({dict(algorithm.reduces)}): for {name} all clients count alike."
            )
        return copy.copy(self)

    def state_dict(self) -> dict[str, Any]:
        """Return what it keeps from round to round, as checkpoints hold it; nothing by default."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any], x: Vector) -> None:
        """Go on from where a checkpoint's run was.

        Args:
            state_dict: What :meth:`state_dict` has returned; nothing to begin.
            x: The server parameters [P].
        """
        assert not state_dict

    @abstractmethod
    def of_round(self, *arguments: Any, **named: Any) -> Aggregation:
        """Return the object that receives the messages of a cohort; the arguments are those of :class:`Aggregation`."""
