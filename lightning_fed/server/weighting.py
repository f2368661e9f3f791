"""The members of a cohort, and what each counts for in a mean."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId, Weighting

__all__ = ["WEIGHTINGS", "Participant", "no_weight", "raw_weight"]

WEIGHTINGS = ("examples", "uniform", "steps")


@dataclass(frozen=True, slots=True)
class Participant:
    """One member of a cohort.

    Attributes:
        client_id: The id.
        index: The stored index.
        size: The number of training examples, n_i.
        count: How often it was drawn: it is trained once and counts so many times in a mean.
        steps: The local steps planned for it.
    """

    client_id: ClientId
    index: int
    size: int
    count: int = 1
    steps: int = 0


def raw_weight(weighting: Weighting, member: Participant, steps: int) -> float:
    """Return a client's weight before normalisation, times how often it was drawn.

    Args:
        weighting: "examples" (n_i), "uniform", "steps" (K_i), or a function of (client_id, size, steps).
        member: The client.
        steps: The local steps K_i that it takes.

    Raises:
        FederatedError: If the name is unknown, or the weight is negative or not finite.
    """
    if weighting == "examples":
        return float(member.size * member.count)
    if weighting == "uniform":
        return float(member.count)
    if weighting == "steps":
        return float(steps * member.count)
    if not callable(weighting):
        raise FederatedError(
            f"weighting must be one of {WEIGHTINGS} or a function of (client_id, size, steps), found {weighting!r}."
        )
    weight = float(weighting(member.client_id, member.size, steps))
    if not math.isfinite(weight) or weight < 0:
        raise FederatedError(
            f"weighting must give finite weights >= 0, found {weight!r} for client {member.client_id!r} of"
            f" {member.size} examples and {steps} steps."
        )
    return weight * member.count


def no_weight(clients: Sequence[ClientId]) -> FederatedError:
    """Return the error that these clients have weight zero, all of them."""
    return FederatedError(f"weighting must give weights that are not all zero, found zeros for the clients {clients}.")
