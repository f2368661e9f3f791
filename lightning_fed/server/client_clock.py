"""Simulated training times of clients, in seconds."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fed.core.arguments import ArgumentsRepr, check_flags, check_number
from lightning_fed.core.client_weights import ClientWeights
from lightning_fed.core.seeds import Purpose, derive_seed, generator
from lightning_fed.core.types import ClientId

_LARGEST_EXPONENT = 700.0  # beyond 709 there is no float
_PER_CLIENT, _SLOW, _JITTER = 1, 2, 3  # the purposes of random streams; SystemsHeterogeneity has its own


class ClientClock(ArgumentsRepr):
    r"""The simulated seconds between sending a client the model and receiving its message.

    .. math::
        t_i = \text{seconds}_i \cdot [n_i] \cdot \text{slow\_factor}^{[i \text{ is slow}]}
              \cdot e^{\text{spread} \cdot u_i + \text{jitter} \cdot u_{i, r}}

    with :math:`u` standard normal and :math:`u_i` the same in every round. The slow clients are drawn once, a rounded
    share of all. All times are functions of the seed, the client and the round.

    Args:
        seconds: A number for all clients, a mapping from id to seconds, or the path of a JSON object or a CSV file with
            the columns ``client`` and ``seconds``, such as a trace of real devices.
        per_example: Whether ``seconds`` is per example, and so multiplied by n_i.
        slow_share: The share of slow clients, in [0, 1).
        slow_factor: The factor of the slow clients' seconds, at least 1.
        spread: The standard deviation over clients of the logarithm of their seconds, at least 0.
        jitter: The same over the rounds of one client.

    Raises:
        FederatedError: If a value is out of range.

    Example:
        >>> clock = ClientClock(seconds={"a": 2.0, "b": 3.0})
        >>> clock.seconds_of(0, ["a", "b"], client=1, round=0)
        3.0
    """

    _positional = 1

    def __init__(
        self,
        seconds: float | Mapping[ClientId, float] | str = 1.0,
        per_example: bool = False,
        slow_share: float = 0.0,
        slow_factor: float = 10.0,
        spread: float = 0.0,
        jitter: float = 0.0,
    ) -> None:
        owner = type(self).__name__
        self.seconds: float | ClientWeights
        if isinstance(seconds, str | Mapping):
            self.seconds = ClientWeights(seconds, name=f"{owner}(seconds=...)", column="seconds")
        else:
            self.seconds = check_number(owner, "seconds", seconds, "(0, inf)")
        check_flags(owner, per_example=per_example)
        self.per_example = per_example
        self.slow_share = check_number(owner, "slow_share", slow_share, "[0, 1)")
        self.slow_factor = check_number(owner, "slow_factor", slow_factor, "[1, inf)")
        self.spread = check_number(owner, "spread", spread, "[0, inf)")
        self.jitter = check_number(owner, "jitter", jitter, "[0, inf)")
        self._base: tuple[int, Sequence[ClientId], Tensor] | None = None

    def seconds_of(self, seed: int, population: Sequence[ClientId], client: int, round: int) -> float:
        """Return the seconds that a client takes in a round.

        Args:
            seed: The run's seed.
            population: The clients of the run, with their ``sizes`` if seconds are per example.
            client: The client's position among them.
            round: The round in which it begins.
        """
        if self._base is None or self._base[0] != seed or self._base[1] is not population:
            self._base = seed, population, self._base_of(seed, population)
        seconds = float(self._base[2][client])
        if self.jitter:
            stream = generator(derive_seed(seed, Purpose.SPEED, _JITTER + round), Purpose.SPEED, 0, client)
            exponent = self.jitter * float(torch.randn((), generator=stream, dtype=torch.float64))
            seconds *= math.exp(min(_LARGEST_EXPONENT, exponent))
        return seconds

    def _base_of(self, seed: int, population: Sequence[ClientId]) -> Tensor:
        """Return the part of the clients' seconds that is equal in every round, float64 [N]."""
        count = len(population)
        base = torch.ones(count, dtype=torch.float64)
        base *= self.seconds.of(population) if isinstance(self.seconds, ClientWeights) else self.seconds
        if self.per_example:
            sizes: Any = population
            base *= torch.tensor(sizes.sizes, dtype=torch.float64)
        if self.spread:
            stream = generator(seed, Purpose.SPEED, _PER_CLIENT)
            exponents = self.spread * torch.randn(count, generator=stream, dtype=torch.float64)
            base *= exponents.clamp(max=_LARGEST_EXPONENT).exp()
        order = torch.randperm(count, generator=generator(seed, Purpose.SPEED, _SLOW))
        base[order[: math.floor(self.slow_share * count + 0.5)]] *= self.slow_factor
        return base
