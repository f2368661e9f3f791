"""Who begins, and whose answer arrives, between one step of an asynchronous server and the next."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lightning_fed.core.seeds import Purpose, generator
from lightning_fed.core.types import ClientId
from lightning_fed.server.asynchronous.client_clock import ClientClock

__all__ = ["Arrival", "Arrivals", "Between"]


class Arrival(NamedTuple):
    """An answer.

    Attributes:
        round: The round in which its client began: it had the model after so many steps of the server.
        client: The client's place in the population.
    """

    round: int
    client: int


@dataclass(frozen=True, slots=True)
class Between:
    """What happens from one step of the server to the next.

    Attributes:
        begin: The places of the clients that begin, in order of time; none is there twice.
        arrive: The answers of which the step is made, in order of time.
        left: Those that are still on their way after it.
        time: When the last one arrives, in simulated seconds.
    """

    begin: list[int]
    arrive: list[Arrival]
    left: list[Arrival]
    time: float


class Arrivals:
    """The events of an asynchronous run: a function of the seed, worked out from the start and kept nowhere.

    So many clients work at any time. One that answers makes room for another, drawn uniformly among those that neither
    work nor have begun with the same model: what a client would do twice with one model is not worth doing. If there is
    nobody, its place stays free until the next step of the server.

    Args:
        seed: The run's seed.
        population: The clients there are.
        clock: How long they take.
        size: The answers of which the server makes a step.
        concurrency: The clients at work at a time.
    """

    def __init__(
        self, seed: int, population: Sequence[ClientId], clock: ClientClock, size: int, concurrency: int
    ) -> None:
        self.seed, self.population, self.clock = seed, population, clock
        self.size, self.concurrency = size, concurrency
        self._restart()

    def _restart(self) -> None:
        self._round, self._time, self._begun = -1, 0.0, 0
        self._at_work: list[tuple[float, int, Arrival]] = []  # a heap by time; the second settles ties
        self._between: Between | None = None

    def in_round(self, round: int) -> Between:
        """Return what happens before the server's step in a round."""
        if round < self._round:
            self._restart()
        while self._round < round:
            self._round += 1
            self._between = self._next()
        assert self._between is not None
        return self._between

    def _next(self) -> Between:
        begin, arrive = list[int](), list[Arrival]()
        busy = {arrival.client for _, _, arrival in self._at_work}
        while True:
            while len(self._at_work) < self.concurrency and (client := self._draw(busy)) is not None:
                busy.add(client)
                begin.append(client)
                done = self._time + self.clock.seconds_of(self.seed, self.population, client, self._round)
                heapq.heappush(self._at_work, (done, self._begun, Arrival(self._round, client)))
                self._begun += 1
            self._time, _, arrival = heapq.heappop(self._at_work)
            arrive.append(arrival)
            if arrival.round < self._round:  # it may begin again, with a newer model
                busy.remove(arrival.client)
            if len(arrive) == self.size:
                break
        return Between(begin, arrive, [arrival for _, _, arrival in sorted(self._at_work)], self._time)

    def _draw(self, busy: set[int]) -> int | None:
        """Return a client that is not busy, None if there is none."""
        if len(busy) == len(self.population):
            return None
        stream = generator(self.seed, Purpose.COHORT, self._begun)
        while (client := int(torch.randint(len(self.population), (), generator=stream))) in busy:
            pass
        return client
