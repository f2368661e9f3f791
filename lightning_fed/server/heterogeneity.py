"""Simulated devices: clients' training times, and clients that do less work, miss a deadline, or drop out."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fed.core.arguments import ArgumentsRepr, check_flags, check_number, check_one_of
from lightning_fed.core.client_weights import ClientWeights
from lightning_fed.core.seeds import Purpose, derive_seed, generator
from lightning_fed.core.types import ClientId

_LARGEST_EXPONENT = 700.0  # exp() of more than 709 overflows a float
_PER_CLIENT, _SLOW, _JITTER = 1, 2, 3  # the random streams of a clock; SystemsHeterogeneity has its own


class SystemsHeterogeneity(ArgumentsRepr):
    r"""Decide how many local steps each client of a cohort completes.

    Three independent causes, each a function of (seed, round, client):

    - **stragglers**: a share of the cohort does only :math:`U\{1, \dots, E\}` of the E requested epochs. If the work is
      one epoch or a number of steps, E counts the steps. This is the setting of Li et al., *Federated Optimization in
      Heterogeneous Networks* (FedProx), MLSys 2020 (https://arxiv.org/abs/1812.06127), section 5.2.
    - **deadline**: a client completes at most :math:`\lfloor v_i \cdot \text{deadline} \rfloor` steps. Its relative
      speed :math:`v_i` is log-normal with median 1, and the same in every round.
    - **dropout**: a client does its work, but its message never arrives.

    ``policy`` applies to stragglers and to clients past the deadline. "keep" uses their partial work, as FedProx does.
    "drop" leaves them out of the round, as FedAvg does in that paper. A client without a single step is always left
    out: its weight is zero and its state is unchanged. K_i is the number of steps taken, so every method stays exact.

    Note:
        The FedProx authors' code never draws E, and uses one seed for all clients and rounds. This class draws E as in
        the paper, and every draw has its own seed.

    Args:
        stragglers: The share of the cohort that does less, in [0, 1], rounded to a number of clients.
        policy: "keep" or "drop".
        dropout: The probability that a client is lost, in [0, 1).
        deadline: The steps that a client of median speed completes in a round, positive; None for no deadline.
        speed_spread: The standard deviation of the logarithm of the speeds, at least 0.

    Raises:
        FederatedError: If a value is out of range.

    Example:
        >>> SystemsHeterogeneity(stragglers=0.5)(
        ...     0, 0, clients=[3, 8], epochs=[4, 4], steps=[40, 40]
        ... )
        [40, 10]
    """

    def __init__(
        self,
        stragglers: float = 0.0,
        policy: Literal["keep", "drop"] = "keep",
        dropout: float = 0.0,
        deadline: float | None = None,
        speed_spread: float = 0.5,
    ) -> None:
        self.stragglers = check_number(self, "stragglers", stragglers, "[0, 1]")
        self.policy = check_one_of(self, "policy", policy, ("keep", "drop"))
        self.dropout = check_number(self, "dropout", dropout, "[0, 1)")
        self.deadline = None if deadline is None else check_number(self, "deadline", deadline, "(0, inf)")
        self.speed_spread = check_number(self, "speed_spread", speed_spread, "[0, inf)")

    def __call__(
        self, seed: int, round: int, clients: Sequence[int], epochs: Sequence[int], steps: Sequence[int]
    ) -> list[int | None]:
        """Return the local steps that each client of a cohort completes, None for a client that is left out.

        Args:
            seed: The run's seed.
            round: The round, from 0.
            clients: The stored indices of the cohort.
            epochs: The local epochs requested of each client.
            steps: The optimizer steps in those epochs.
        """
        count = math.floor(self.stragglers * len(clients) + 0.5)
        order = torch.randperm(len(clients), generator=generator(seed, Purpose.STRAGGLERS, round)).tolist()
        slow, each = set(order[:count]), enumerate(zip(clients, epochs, steps, strict=True))
        return [self._complete(seed, round, *client, position in slow) for position, client in each]

    def _complete(self, seed: int, round: int, client: int, epochs: int, steps: int, slow: bool) -> int | None:
        in_time = self._in_time(seed, client, steps)
        if self.policy == "drop" and (slow or in_time < steps):
            return None
        done = min(self._straggle(seed, round, client, epochs, steps), in_time) if slow else in_time
        if self.dropout:
            stream = generator(seed, Purpose.DROPOUT, round, client)
            if float(torch.rand((), generator=stream, dtype=torch.float64)) < self.dropout:
                return None
        return done or None

    def _straggle(self, seed: int, round: int, client: int, epochs: int, steps: int) -> int:
        stream = generator(seed, Purpose.STRAGGLERS, round, client + 1)
        parts = epochs if epochs > 1 else steps
        return steps // parts * int(torch.randint(1, parts + 1, (), generator=stream)) if steps else 0

    def _in_time(self, seed: int, client: int, steps: int) -> int:
        if self.deadline is None:
            return steps
        draw = torch.randn((), generator=generator(seed, Purpose.SPEED, 0, client), dtype=torch.float64)
        speed = math.exp(min(_LARGEST_EXPONENT, self.speed_spread * float(draw)))
        return math.floor(min(steps, self.deadline * speed))


class ClientClock(ArgumentsRepr):
    r"""The simulated seconds between sending a client the model and receiving its message.

    .. math::
        t_i = \text{seconds}_i \cdot [n_i] \cdot \text{slow\_factor}^{[i \text{ is slow}]}
              \cdot e^{\text{spread} \cdot u_i + \text{jitter} \cdot u_{i, r}}

    with :math:`u` standard normal and :math:`u_i` the same in every round. The slow clients are a rounded share of all
    clients, drawn once. All times are functions of the seed, the client and the round.

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
        self.seconds: float | ClientWeights
        if isinstance(seconds, str | Mapping):
            self.seconds = ClientWeights(seconds, name=f"{type(self).__name__}(seconds=...)", column="seconds")
        else:
            self.seconds = check_number(self, "seconds", seconds, "(0, inf)")
        check_flags(self, per_example=per_example)
        self.per_example = per_example
        self.slow_share = check_number(self, "slow_share", slow_share, "[0, 1)")
        self.slow_factor = check_number(self, "slow_factor", slow_factor, "[1, inf)")
        self.spread = check_number(self, "spread", spread, "[0, inf)")
        self.jitter = check_number(self, "jitter", jitter, "[0, inf)")
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
        """Return the part of the clients' seconds that all rounds share, float64 [N]."""
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
