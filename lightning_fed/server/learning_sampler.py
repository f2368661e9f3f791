"""Samplers that learn from clients' reports: the methods that a run calls, and the checks of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.rounds import ClientReport
from lightning_fed.core.types import ClientId

LossesOf: TypeAlias = Callable[[Sequence[ClientId]], Mapping[ClientId, float]]
"""Measures the training loss f_i of clients at the server model; clients that do not answer are left out."""


class LearningSampler(Protocol):
    r"""A sampler that reads clients' reports: any object with these methods, which need not inherit from this class.

    Each run works on a copy of the sampler that its trainer got, and begins with that copy's state. Checkpoints hold
    the state, so that a resumed run draws the cohorts of the uninterrupted one. A sampler must draw from its state, the
    seed and the round alone: all processes of a run draw, and must draw the same cohort.

    A sampler may define two more methods.

    - ``needs_losses_of(seed, round, population)`` returns the ids of clients whose training loss at the server model
      it must know. The run measures these losses, and calls ``sampler(seed, round, population, losses)``, where
      ``losses`` is a mapping by id without the clients that do not answer.
    - ``probabilities(round, population)`` returns the probability :math:`p_i` of each client [N] to be in the cohort,
      for a sampler that includes every client independently. The round's sum is then the unbiased estimate of the mean
      over all clients, :math:`\sum_{i \in S} (w_i / p_i) m_i`, in place of the mean over the cohort.
    """

    def __call__(self, seed: int, round: int, population: Sequence[ClientId]) -> Sequence[ClientId]:
        """Return the cohort of a round, without changing the state."""
        ...

    def update(self, round: int, reports: Mapping[ClientId, ClientReport]) -> None:
        """Learn from a completed round.

        Args:
            round: The round, from 0.
            reports: The reports of the clients that took part, by id. Reports from sites are claims: their numbers are
                checked for their type and range, not for their truth.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state as numbers, text, tensors, and dicts and lists of them."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        ...


def learns(sampler: object) -> bool:
    """Return whether a sampler reads reports; raise if it has no state for checkpoints."""
    if not callable(getattr(sampler, "update", None)):
        return False
    for name in ("state_dict", "load_state_dict"):
        if not callable(getattr(sampler, name, None)):
            raise FederatedError(
                f"sampler={sampler!r} has a method update, and so learns from reports, but has no method {name}. Define"
                " state_dict and load_state_dict, so that the run can be resumed."
            )
    return True
