"""Systems heterogeneity: clients that do less work than requested, miss a deadline, or drop out."""

import math
from collections.abc import Sequence
from typing import Literal

import torch

from lightning_fed.core.arguments import ArgumentsRepr, check_number, check_one_of
from lightning_fed.core.seeds import Purpose, generator

_LARGEST_EXPONENT = 700.0  # beyond 709 there is no float


class SystemsHeterogeneity(ArgumentsRepr):
    r"""Decide how many local steps each client of a cohort completes.

    Three independent causes, each a function of (seed, round, client):

    - **stragglers**: a share of the cohort does only :math:`U\{1, \dots, E\}` of the E requested epochs, or of the
      steps if the work is one epoch or a number of steps. This is the setting of Li et al., *Federated Optimization in
      Heterogeneous Networks* (FedProx), MLSys 2020 (https://arxiv.org/abs/1812.06127), section 5.2.
    - **deadline**: a client of relative speed :math:`v_i`, log-normal with median 1 and the same in every round, can do
      :math:`\lfloor v_i \cdot \text{deadline} \rfloor` steps.
    - **dropout**: a client does its work, but its message never arrives.

    ``policy`` applies to stragglers and to clients past the deadline: "keep" uses their partial work, as FedProx does;
    "drop" leaves them out of the round, as FedAvg does in that paper. A client without a single step is always left
    out: its weight is zero and its state is unchanged. K_i is the number of steps taken, so every method stays exact.

    Note:
        The authors' code of FedProx never draws E, and uses one seed for all clients and rounds. Here E is drawn as in
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
        check_number(self, "stragglers", stragglers, "[0, 1]")
        check_number(self, "dropout", dropout, "[0, 1)")
        check_number(self, "speed_spread", speed_spread, "[0, inf)")
        if deadline is not None:
            check_number(self, "deadline", deadline, "(0, inf)")
        self.stragglers = stragglers
        self.policy = check_one_of(self, "policy", policy, ("keep", "drop"))
        self.dropout = dropout
        self.deadline = deadline
        self.speed_spread = speed_spread

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
