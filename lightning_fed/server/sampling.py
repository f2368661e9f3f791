"""The cohort of a round as a function of (seed, round)."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.seeds import Purpose, generator
from lightning_fed.core.types import ClientId

__all__ = ["Sampler", "UniformSampler", "draw"]

Sampler: TypeAlias = Callable[..., Sequence[ClientId]]
"""``sampler(seed, round, population)`` or ``sampler(seed, round)``: the ids of a cohort; an id may come twice."""


class UniformSampler:
    """Draw clients uniformly without replacement.

    Args:
        clients_per_round: How many: an int is a count, a float in (0, 1] a share of the population.

    Raises:
        FederatedError: If the number is not positive, a share exceeds one, or more clients are wanted than exist.

    Example:
        >>> len(UniformSampler(3)(seed=0, round=0, population=range(10)))
        3
        >>> UniformSampler(1.0)(seed=0, round=0, population=["a", "b"])
        ['a', 'b']
    """

    def __init__(self, clients_per_round: int | float = 1.0) -> None:
        k = clients_per_round
        if isinstance(k, bool) or not isinstance(k, int | float):
            raise FederatedError(f"clients_per_round must be an int or a float, found {k!r} ({type(k).__name__}).")
        if isinstance(k, int) and k < 1:
            raise FederatedError(f"clients_per_round must be at least 1 client, found {k}.")
        if isinstance(k, float) and not 0 < k <= 1:
            raise FederatedError(
                f"clients_per_round as a share must lie in (0, 1], found {k}. For a count pass an int."
            )
        self.clients_per_round = clients_per_round

    def count(self, population: int) -> int:
        """Return the cohort's size for a population.

        Raises:
            FederatedError: If more clients are wanted than exist.
        """
        k = self.clients_per_round
        if isinstance(k, float):
            return max(1, round(k * population))
        if k > population:
            raise FederatedError(
                f"clients_per_round={k} asks for more clients than the {population} non-empty ones there are."
                f" Pass at most {population}, or a share such as 1.0."
            )
        return k

    def __call__(self, seed: int, round: int, population: Sequence[ClientId]) -> list[ClientId]:
        """Return the cohort of a round, in the population's order."""
        n = len(population)
        k = self.count(n)
        if k == n:
            return list(population)
        stream = generator(seed, Purpose.COHORT, round)
        chosen: set[int] = set()
        for j in range(n - k, n):  # Floyd's algorithm: k draws whatever the population's size
            i = int(torch.randint(j + 1, (), generator=stream))
            chosen.add(j if i in chosen else i)
        return [population[i] for i in sorted(chosen)]

    def __repr__(self) -> str:
        """Show the sampler as it would be written."""
        return f"{type(self).__name__}({self.clients_per_round!r})"


def draw(sampler: Sampler, seed: int, round: int, population: Sequence[ClientId]) -> list[ClientId]:
    """Call a sampler of two or three arguments.

    Raises:
        FederatedError: If what it returns is no list of ids.
    """
    args: tuple[Any, ...] = (seed, round, population) if _takes_population(sampler) else (seed, round)
    cohort = sampler(*args)
    if isinstance(cohort, str) or not hasattr(cohort, "__iter__"):
        raise FederatedError(f"The sampler must return a list of client ids, found {cohort!r} in round {round}.")
    return [i.item() if hasattr(i, "item") else i for i in cohort]


def _takes_population(sampler: Sampler) -> bool:
    try:
        parameters = inspect.signature(sampler).parameters.values()
    except (TypeError, ValueError):
        return True
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) >= 3 or any(p.kind is p.VAR_POSITIONAL for p in parameters)
