"""Client samplers: they draw the cohort of a round from (seed, round), and some also from clients' reports."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from lightning_fed.core.arguments import ArgumentsRepr, check_flags, check_number, finite
from lightning_fed.core.client_weights import ClientWeights
from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.rounds import ClientReport
from lightning_fed.core.seeds import Purpose, derive_seed, generator
from lightning_fed.core.types import ClientId

LossesOf: TypeAlias = Callable[[Sequence[ClientId]], Mapping[ClientId, float]]
"""Measures the training loss f_i of clients at the server model; clients that do not answer are left out."""


class LearningSampler(Protocol):
    r"""A sampler that reads clients' reports. Any object with these methods works, without inheriting from this class.

    Each run copies the trainer's sampler, and begins with that copy's state. Checkpoints save the state, so a resumed
    run draws the same cohorts as an uninterrupted one. A sampler must only draw from its state, the seed and the
    round: every process of a run draws, and all must get the same cohort.

    A sampler may define two more methods.

    - ``needs_losses_of(seed, round, population)`` returns the ids of clients whose training loss at the server model
      it needs. The run measures these losses, and calls ``sampler(seed, round, population, losses)``. ``losses`` maps
      ids to losses, without the clients that do not answer.
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
            reports: The reports of the clients that took part, by id. Reports from sites are claims: only the type
                and the range of their numbers are checked.
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


Sampler: TypeAlias = Callable[..., Sequence[ClientId]]
"""``sampler(seed, round, population)`` or ``sampler(seed, round)``: the ids of a cohort, possibly with repetitions.

``population`` is the sequence of eligible ids; its ``sizes`` are their numbers of examples.
"""


class CountingSampler(ArgumentsRepr):
    """A sampler of a fixed number or share of clients."""

    _positional = 1

    def __init__(self, clients_per_round: int | float) -> None:
        k = clients_per_round
        if isinstance(k, bool) or not isinstance(k, int | float):
            raise FederatedError(f"clients_per_round must be an int or a float, found {k!r} ({type(k).__name__}).")
        if isinstance(k, int) and not 1 <= k < 2**63:
            raise FederatedError(f"clients_per_round must be at least 1 client, and fewer than 2**63, found {k}.")
        if isinstance(k, float) and not 0 < k <= 1:
            raise FederatedError(
                f"clients_per_round as a share must lie in (0, 1], found {k}. For a count pass an int."
            )
        self.clients_per_round = clients_per_round

    def count(self, population: int) -> int:
        """Return the cohort's size for a population; raise if the population is too small."""
        k = self.clients_per_round
        if isinstance(k, float):
            return max(1, round(k * population))
        if k > population:
            raise FederatedError(
                f"clients_per_round={k} asks for more clients than the {population} non-empty ones there are."
                f" Pass at most {population}, or a share such as 1.0."
            )
        return k


class UniformSampler(CountingSampler):
    """Draw clients uniformly without replacement.

    Args:
        clients_per_round: The cohort's size: an int is a count, a float in (0, 1] is a share of the population, 1.0 is
            full participation.

    Raises:
        FederatedError: If the number is not positive, a share exceeds one, or the count exceeds the population.

    Example:
        >>> len(UniformSampler(3)(seed=0, round=0, population=range(10)))
        3
        >>> UniformSampler(1.0)(seed=0, round=0, population=["a", "b"])
        ['a', 'b']
    """

    def __init__(self, clients_per_round: int | float = 1.0) -> None:
        super().__init__(clients_per_round)

    def __call__(self, seed: int, round: int, population: Sequence[ClientId]) -> list[ClientId]:
        """Return the cohort of a round, in the population's order."""
        k = self.count(len(population))
        return _choose(k, population, generator(seed, Purpose.COHORT, round))


class RoundRobinSampler(CountingSampler):
    """Take clients in turn, in their stored order; all participate equally often.

    Args:
        clients_per_round: The cohort's size, as a count or a share.

    Raises:
        FederatedError: As :class:`UniformSampler`.

    Example:
        >>> RoundRobinSampler(2)(seed=0, round=1, population=["a", "b", "c"])
        ['c', 'a']
    """

    def __call__(self, seed: int, round: int, population: Sequence[ClientId]) -> list[ClientId]:
        """Return the cohort of a round."""
        n, k = len(population), self.count(len(population))
        return [population[(round * k + i) % n] for i in range(k)]


class WeightedSampler(CountingSampler):
    r"""Draw clients with given probabilities :math:`p_k`, by default with replacement.

    With ``weights="examples"`` and the run's ``weighting="uniform"``, this is the sampling of Algorithm 2 of Li et al.,
    *Federated Optimization in Heterogeneous Networks* (FedProx), MLSys 2020 (https://arxiv.org/abs/1812.06127): with
    probability :math:`p_k = n_k / n` and a simple mean. A client drawn twice trains once and counts twice.

    Args:
        clients_per_round: The number of draws, as a count or a share.
        weights: "examples", a mapping from id to weight, or the path of a JSON object or a CSV file with the columns
            ``client`` and ``weight``. They need not sum to one; a client with weight zero is never drawn.
        replacement: Whether a client may be drawn more than once in a round.

    Raises:
        FederatedError: If a weight is missing, negative or not finite, or, without replacement, too few clients have a
            positive weight.

    Example:
        >>> WeightedSampler(2, weights={"a": 1.0, "b": 0.0})(
        ...     seed=0, round=0, population=["a", "b"]
        ... )
        ['a', 'a']
    """

    _positional = 2

    def __init__(
        self,
        clients_per_round: int | float,
        weights: Literal["examples"] | Mapping[ClientId, float] | str = "examples",
        replacement: bool = True,
    ) -> None:
        super().__init__(clients_per_round)
        check_flags("WeightedSampler", replacement=replacement)
        self.weights = ClientWeights(weights)
        self.replacement = replacement

    def count(self, population: int) -> int:
        """Return the number of draws for a population."""
        k = self.clients_per_round
        return k if isinstance(k, int) and self.replacement else super().count(population)

    def __call__(self, seed: int, round: int, population: Sequence[ClientId]) -> list[ClientId]:
        """Return the cohort of a round, in the population's order, with repetitions."""
        k, p = self.count(len(population)), self.weights.of(population)
        stream = generator(seed, Purpose.COHORT, round)
        if self.replacement:
            p = p / p.max()  # a sum of very large weights would be infinite
            total = p.cumsum(0)
            drawn = torch.searchsorted(total, torch.rand(k, generator=stream, dtype=p.dtype) * total[-1], right=True)
            # rounding the product up to the full sum would select past the last client of positive weight
            drawn = drawn.clamp(max=int(p.nonzero().max()))
        else:
            if k > int((p > 0).sum()):
                raise FederatedError(
                    f"clients_per_round={k} without replacement asks for more clients than the {int((p > 0).sum())} of"
                    " positive weight."
                )
            drawn = first_drawn(p, k, stream)
        return [population[i] for i in sorted(drawn.tolist())]


class BernoulliSampler(ArgumentsRepr):
    """Include every client independently, with one probability or one per client.

    The cohort's size varies. A round with an empty cohort changes nothing and is reported.

    Args:
        probability: The probability, in (0, 1]; or a mapping from id to a value in [0, 1], or a file as for
            :class:`WeightedSampler`.

    Raises:
        FederatedError: If a probability is out of range or missing.
    """

    _positional = 1

    def __init__(self, probability: float | Mapping[ClientId, float] | str) -> None:
        self.probability = probability
        self._of_each: float | ClientWeights
        if isinstance(probability, str | Mapping):
            self._of_each = ClientWeights(probability, most=1.0, name="probability")
        elif 0 < finite(probability) <= 1:
            self._of_each = probability
        else:
            raise FederatedError(
                f"BernoulliSampler(probability={probability!r}): it must lie in (0, 1], or be a mapping from client id,"
                " or the path of a file."
            )

    def __call__(self, seed: int, round: int, population: Sequence[ClientId]) -> list[ClientId]:
        """Return the cohort of a round, in the population's order."""
        p = self._of_each.of(population) if isinstance(self._of_each, ClientWeights) else self._of_each
        return included(p, population, generator(seed, Purpose.COHORT, round))


class AvailabilitySampler(CountingSampler):
    """Draw uniformly among the clients that are available at the time of day.

    Every client has a longitude, a function of (seed, client). Its probability of being available in a round varies
    between ``low`` and ``high`` over its day. If fewer clients are available than requested, all of them participate.

    Args:
        clients_per_round: The largest cohort, as a count or a share of the population.
        rounds_per_day: Rounds in a day.
        low: The probability of being available at the worst hour, in [0, 1].
        high: The probability at the best hour, in [low, 1].

    Raises:
        FederatedError: If a value is out of range.
    """

    def __init__(
        self, clients_per_round: int | float, rounds_per_day: float = 24.0, low: float = 0.1, high: float = 0.9
    ) -> None:
        super().__init__(clients_per_round)
        if not 0 <= finite(low) <= finite(high) <= 1:
            raise FederatedError(f"AvailabilitySampler needs 0 <= low <= high <= 1, found low={low!r}, high={high!r}.")
        check_number(self, "rounds_per_day", rounds_per_day, "(0, inf)")
        self.rounds_per_day, self.low, self.high = rounds_per_day, low, high

    def __call__(self, seed: int, round: int, population: Sequence[ClientId]) -> list[ClientId]:
        """Return the cohort of a round, in the population's order."""
        return self.cohort(seed, round, population, seed)

    def cohort(self, seed: int, round: int, population: Sequence[ClientId], run_seed: int) -> list[ClientId]:
        """Return a cohort drawn with its own seed; clients keep the run's longitudes."""
        longitudes = torch.Generator().manual_seed(derive_seed(run_seed, Purpose.AVAILABILITY))
        phase = torch.rand(len(population), generator=longitudes, dtype=torch.float64)
        day = (1 + torch.cos(2 * math.pi * (round / self.rounds_per_day - phase))) / 2
        stream = generator(seed, Purpose.COHORT, round)
        available = included(self.low + (self.high - self.low) * day, population, stream)
        return _choose(min(self.count(len(population)), len(available)), available, stream)


def draw(
    sampler: Sampler,
    seed: int,
    round: int,
    population: Sequence[ClientId],
    run_seed: int,
    losses_of: LossesOf | None = None,
) -> list[ClientId]:
    """Call a sampler with two or three arguments, or four if it needs losses; ``seed`` may differ from the run's."""
    is_own = type(sampler).__call__ is not AvailabilitySampler.__call__  # a subclass may override it
    if isinstance(sampler, AvailabilitySampler) and not is_own:
        return sampler.cohort(seed, round, population, run_seed)
    if (needs := getattr(sampler, "needs_losses_of", None)) is not None:
        asked = _ids(needs(seed, round, population), "The sampler's needs_losses_of", round)
        assert losses_of is not None or not asked
        losses = {} if losses_of is None or not asked else losses_of(asked)
        cohort = sampler(seed, round, population, losses)
    else:
        cohort = sampler(seed, round, population) if _takes_population(sampler) else sampler(seed, round)
    return _ids(cohort, "The sampler", round)


def _ids(found: Any, who: str, round: int) -> list[ClientId]:
    """Return the client ids from a user's sampler, with elements of arrays and tensors as Python numbers."""
    try:
        items = None if isinstance(found, str | bytes | set | frozenset) else iter(found)
    except TypeError:  # a 0-dim tensor raises it too
        items = None
    if items is None:
        hint = " A set has no order of its own: sort it." if isinstance(found, set | frozenset) else ""
        raise FederatedError(f"{who} must return a list of client ids, found {found!r} in round {round}.{hint}")
    ids = list[ClientId]()
    for item in items:
        client_id = item
        if hasattr(item, "item"):
            with suppress(ValueError, RuntimeError):  # the item has several elements
                client_id = item.item()
        if not isinstance(client_id, int | str) or isinstance(client_id, bool):  # True and 1.0 are equal to 1
            raise FederatedError(
                f"{who} must return client ids, ints or strs, found {client_id!r} in round {round}. Convert positions"
                " or a mask to ids, as in [i for i, is_chosen in zip(population, mask) if is_chosen]."
            )
        ids.append(client_id)
    return ids


def has_examples(population: Sequence[ClientId], client_id: ClientId) -> bool:
    """Return whether a client has examples; a client built on demand may turn out to have none."""
    if (size_of := getattr(population, "size", None)) is None:
        return True
    try:
        return bool(size_of(client_id) > 0)
    except ClientError:  # the round reports the error when the client trains
        return True


def _choose(k: int, population: Sequence[ClientId], stream: torch.Generator) -> list[ClientId]:
    """Choose k of a population uniformly by Floyd's algorithm: k draws for any population size."""
    n = len(population)
    if k == n:
        return list(population)
    chosen: set[int] = set()
    for j in range(n - k, n):
        i = int(torch.randint(j + 1, (), generator=stream))
        chosen.add(j if i in chosen else i)
    return [population[i] for i in sorted(chosen)]


def first_drawn(weights: Tensor, count: int, stream: torch.Generator) -> Tensor:
    """Return the places of ``count`` draws without replacement, by weights [n]; zero weights come last.

    The earliest of independent exponential clocks are such draws.
    """
    exponential = -torch.rand(len(weights), generator=stream, dtype=torch.float64).log()
    times = exponential.log() - weights.log()  # logarithms: division by a very small weight would overflow
    return torch.where(weights > 0, times, math.inf).argsort(stable=True)[:count]


def included(p: float | Tensor, population: Sequence[ClientId], stream: torch.Generator) -> list[ClientId]:
    """Draw every client independently, with one probability for all or one per client [N]."""
    drawn = torch.rand(len(population), generator=stream, dtype=torch.float64)
    return [population[i] for i in (drawn < p).nonzero()[:, 0].tolist()]


def _takes_population(sampler: Sampler) -> bool:
    try:
        parameters = inspect.signature(sampler).parameters.values()
    except (TypeError, ValueError):
        return True
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) >= 3 or any(p.kind is p.VAR_POSITIONAL for p in parameters)
