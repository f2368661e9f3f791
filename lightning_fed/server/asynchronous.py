"""Asynchronous servers: FedBuff steps after every M messages, FedAsync after each message."""

import heapq
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_fed.algorithms.base import Algorithm
from lightning_fed.core.arguments import check_count, check_number, check_one_of, finite
from lightning_fed.core.devices import accumulation, narrowed
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.seeds import Purpose, generator
from lightning_fed.core.types import ClientId, State, Vector, Weighting
from lightning_fed.server.aggregation.mean import Aggregator, Collectives, averaged_points
from lightning_fed.server.aggregation.robust import CollectedAggregation
from lightning_fed.server.heterogeneity import ClientClock
from lightning_fed.server.sampling import Sampler


class Arrival(NamedTuple):
    """A client's message and its origin."""

    round: int  # number of server steps in the model at its client's start
    client: int  # position in the population


@dataclass(frozen=True, slots=True)
class Between:
    """The events between two server steps, in order of time."""

    begin: list[int]  # positions of the clients that begin, without repetition
    arrive: list[Arrival]  # messages used by the server step
    left: list[Arrival]  # messages still in transit after it
    time: float  # arrival of the last message used, in simulated seconds


class Arrivals:
    """The events of an asynchronous run, recomputed from the seed and never saved.

    ``concurrency`` clients work at any time. When one replies, another starts, drawn uniformly among the idle clients
    that have not yet started from the current model. If there is none, the slot stays free until the next server step.
    """

    def __init__(
        self, seed: int, population: Sequence[ClientId], clock: ClientClock, size: int, concurrency: int
    ) -> None:
        self.seed, self.population, self.clock = seed, population, clock
        self.size, self.concurrency = size, concurrency
        self._restart()

    def _restart(self) -> None:
        self._round, self._time, self._begun = -1, 0.0, 0
        self._in_progress: list[tuple[float, int, Arrival]] = []  # a heap by time; the second entry breaks ties
        self._between: Between | None = None

    def in_round(self, round: int) -> Between:
        """Return the events before the server's step of a round."""
        if round < self._round:
            self._restart()
        while self._round < round:
            self._round += 1
            self._between = self._next()
        assert self._between is not None
        return self._between

    def _next(self) -> Between:
        begin, arrive = list[int](), list[Arrival]()
        busy = {arrival.client for _, _, arrival in self._in_progress}
        while True:
            while len(self._in_progress) < self.concurrency and (client := self._draw(busy)) is not None:
                busy.add(client)
                begin.append(client)
                done = self._time + self.clock.seconds_of(self.seed, self.population, client, self._round)
                heapq.heappush(self._in_progress, (done, self._begun, Arrival(self._round, client)))
                self._begun += 1
            self._time, _, arrival = heapq.heappop(self._in_progress)
            arrive.append(arrival)
            if arrival.round < self._round:  # it may start again from a newer model
                busy.remove(arrival.client)
            if len(arrive) == self.size:
                break
        return Between(begin, arrive, [arrival for _, _, arrival in sorted(self._in_progress)], self._time)

    def _draw(self, busy: set[int]) -> int | None:
        """Return a client that is not busy, or None."""
        if len(busy) == len(self.population):
            return None
        stream = generator(self.seed, Purpose.COHORT, self._begun)
        while (client := int(torch.randint(len(self.population), (), generator=stream))) in busy:
            pass
        return client


class Asynchronous(Aggregator):
    """A simulated asynchronous run; see :class:`lightning_fed.server.FedBuff` and ``FedAsync``.

    It is both the sampler and the aggregator of the run. A client trains when it begins, from the model of that time,
    and its message is held until its simulated arrival. A round therefore trains the clients that begin between two
    server steps, and its step uses the messages that arrive between them.

    Args:
        size: M, the number of messages per server step.
        concurrency: The number of clients training at a time.
        clock: The clients' training times; all equal by default.

    Raises:
        FederatedError: If a number is not positive.
    """

    weighted = False
    argument = "asynchronous"

    def __init__(self, size: int, concurrency: int, clock: ClientClock | None = None) -> None:
        self.size = check_count(self, "size", size)
        self.concurrency = check_count(self, "concurrency", concurrency)
        if clock is not None and not isinstance(clock, ClientClock):
            raise FederatedError(f"{type(self).__name__}(clock={clock!r}): clock must be a ClientClock, or None.")
        self.clock = ClientClock() if clock is None else clock
        self._arrivals: Arrivals | None = None
        self._round = -1
        self._messages: dict[tuple[int, ClientId], State] = {}  # keyed by the round in which a client began, and its id
        self._on_their_way: list[tuple[int, ClientId]] = []  # keys of the messages in transit after the last step

    @abstractmethod
    def weight(self, staleness: int) -> float:
        """Return the weight of a message.

        Args:
            staleness: The server steps since its client began.
        """

    def held(self, change: Vector, x: Vector) -> Vector:
        """Return the value to store for a client's change, given its starting point [P]; the change by default."""
        return change

    def applied(self, held: Vector, x: Vector) -> Vector:
        """Return the change to apply for a stored value, given the current model [P]; the value by default."""
        return held

    def for_run(self, algorithm: Algorithm, weighting: Weighting | None, sampler: Sampler) -> Aggregator:
        """Return a copy for a run of this method; raise if the method needs all clients of a round at once."""
        name, method = type(self).__name__, type(algorithm).__name__
        needs = None
        if averaged_points(algorithm):
            needs = "a gradient that is averaged over the cohort before it works"
        elif algorithm.needs_everyone:
            needs = "all clients in every round"
        elif not algorithm.local_work:
            needs = "the gradients of a cohort at one model"
        elif not algorithm.scales_with_means:
            needs = "means with weights that sum to one"
        if needs is not None:
            raise FederatedError(
                f"asynchronous={name}(...) cannot be combined with {method}, which needs {needs}: here clients begin"
                " and end at different times, and late messages count less. Use a method whose clients work alone, such"
                " as FedAvg, FedProx or Scaffold."
            )
        run = super().for_run(algorithm, weighting, sampler)
        assert isinstance(run, Asynchronous)
        run._arrivals, run._messages, run._on_their_way = None, {}, []
        return run

    # ------------------------------------------------------------------ sampling

    def count(self, population: int) -> int:
        """Return the number of clients training at a time; raise if the population is too small."""
        for name, wanted in (("size", self.size), ("concurrency", self.concurrency)):
            if wanted > population:
                raise FederatedError(
                    f"{type(self).__name__}({name}={wanted}) needs at least as many clients; there are {population}"
                    " non-empty ones."
                )
        return self.concurrency

    def __call__(self, seed: int, round: int, population: Sequence[ClientId]) -> list[ClientId]:
        """Return the clients that begin in a round, in order of time."""
        if self._arrivals is None or (self._arrivals.seed, self._arrivals.population) != (seed, population):
            self.count(len(population))
            self._arrivals = self.events(seed, population)
        self._round = round
        return [population[client] for client in self.between().begin]

    def events(self, seed: int, population: Sequence[ClientId]) -> Arrivals:
        """Return the run's starts and arrivals; a subclass may return recorded events."""
        return Arrivals(seed, population, self.clock, self.size, self.concurrency)

    def between(self) -> Between:
        """Return the events of the current round, or of the last one."""
        assert self._arrivals is not None
        return self._arrivals.in_round(self._round)

    # ------------------------------------------------------------------ aggregation

    def of_round(self, reduces: Mapping[str, str], weighting: Weighting, *arguments: Any, **named: Any) -> "_Arriving":
        """Return an object that stores the messages of clients that begin, and combines those that arrive."""
        return _Arriving(self, reduces, "uniform", *arguments, **named)

    def key_of(self, arrival: Arrival) -> tuple[int, ClientId]:
        """Return the round and the client id of an arrival."""
        assert self._arrivals is not None
        return arrival.round, self._arrivals.population[arrival.client]

    def taken(self, begun: Mapping[ClientId, State]) -> list[tuple[int, State]]:
        """Store the messages of clients that began in this round; return those that arrive, with their staleness."""
        between = self.between()
        self._messages |= {(self._round, client_id): messages for client_id, messages in begun.items()}
        arriving = list[tuple[int, State]]()
        for arrival in between.arrive:
            began, client_id = key = self.key_of(arrival)
            if key not in self._messages:
                raise FederatedError(
                    f"There is no message of client {client_id!r}, which began in round {began}: it has no examples or"
                    " took no step, or the checkpoint has lost it. In an asynchronous run every client that begins must"
                    " answer. Leave clients without examples out of the data."
                )
            arriving.append((self._round - began, self._messages[key]))
        self._on_their_way = [self.key_of(arrival) for arrival in between.left]
        there = {*self._on_their_way, *map(self.key_of, between.arrive)}
        self._messages = {key: messages for key, messages in self._messages.items() if key in there}
        return arriving

    def state_dict(self) -> dict[str, Any]:
        """Return the messages in transit after the last completed round."""
        return {"messages": [(*key, dict(self._messages[key])) for key in self._on_their_way]}

    def load_state_dict(self, state_dict: Mapping[str, Any], x: Vector) -> None:
        """Restore a checkpoint's messages in transit; raise a ValueError for invalid ones."""
        self._arrivals = None
        self._messages = {
            (began, client_id): {name: value.to(x.device) for name, value in messages.items()}
            for began, client_id, messages in state_dict.get("messages", ())
        }
        self._on_their_way = list(self._messages)
        for (began, client_id), messages in self._messages.items():
            is_finite = all(bool(value.isfinite().all()) for value in messages.values())
            if not is_finite or messages.get("delta", x).shape != x.shape:
                raise ValueError(f"client {client_id!r} of round {began} has a message of another shape, or not finite")


class _Arriving(CollectedAggregation):
    """Collects the messages of clients that begin in a round, and combines those that arrive."""

    needs_clients = False

    def __init__(self, run: Asynchronous, *arguments: Any, **named: Any) -> None:
        super().__init__(run, *arguments, **named)
        self._run = run

    def merge(self, partials: Sequence[Mapping[str, Any]], ranks: Collectives, x: Vector) -> None:
        """Give every process all messages."""
        super().merge(partials, ranks, x)
        everybody = [index for indices in self._by_rank for index in indices]
        everybodys = {index: State() for index in everybody}
        for name in sorted(self._shapes):  # processes may have seen the names in different orders
            rows = x.new_zeros(len(everybody), *self._shapes[name])
            for row, index in zip(rows, everybody, strict=True):
                if index in self._collected:
                    row.copy_(self._collected[index][name])
            ranks.sum([rows])
            for row, index in zip(rows, everybody, strict=True):
                everybodys[index][name] = row.clone()
        self._collected = everybodys

    def compute(self, x: Vector) -> tuple[State, Vector | None]:
        """Combine the arriving messages; clients that begin in this round begin at x."""
        run = self._run
        begun = {self._members[index].client_id: _with(own, run.held, x) for index, own in self._collected.items()}
        means = dict[str, Tensor]()
        for staleness, held in run.taken(begun):
            if not finite(share := run.weight(staleness)) >= 0:
                raise FederatedError(
                    f"{type(run).__name__}.weight({staleness}) must be a finite number of at least 0, found {share!r}."
                )
            for name, value in _with(held, run.applied, x).items():
                # sums over all clients, such as SCAFFOLD's c, are not discounted for staleness
                is_sum = self.reduces[name] == "population"
                weight = 1 / self.population if is_sum else share / run.size
                if name not in means:
                    means[name] = torch.zeros(value.shape, **accumulation(x.device))
                means[name].add_(value.to(means[name].device), alpha=weight)
        return {name: narrowed(value, x) for name, value in means.items()}, None


def _with(messages: State, function: Callable[[Vector, Vector], Vector], x: Vector) -> State:
    """Return messages with the function applied to "delta"."""
    return {name: function(value, x) if name == "delta" else value for name, value in messages.items()}


class FedBuff(Asynchronous):
    r"""A server that steps along the mean of the next M messages to arrive, however stale they are.

    Nguyen et al., *Federated Learning with Buffered Asynchronous Aggregation*, AISTATS 2022
    (https://arxiv.org/abs/2106.06639), Algorithm 1 and the scaling of its experiments:

    .. math::
        x^{r+1} = x^r + \eta_s \frac1M \sum_{m=1}^M (1 + \tau_m)^{-a} \Delta_m

    with :math:`\Delta_m = y_m - x^{r - \tau_m}` and :math:`\tau_m` the server steps since the client began. The rate
    :math:`\eta_s` is the server optimizer's.

    Args:
        size: M, the number of messages per server step.
        concurrency: The number of clients training at a time.
        staleness_exponent: :math:`a \ge 0`. With 0, all messages have equal weight.
        clock: The clients' training times; all equal by default.

    Raises:
        FederatedError: If a value is out of range.

    Example:
        >>> FedBuff(size=10, concurrency=100).weight(3)
        0.5
    """

    def __init__(
        self, size: int, concurrency: int, staleness_exponent: float = 0.5, clock: ClientClock | None = None
    ) -> None:
        super().__init__(size, concurrency, clock)
        self.staleness_exponent = check_number("FedBuff", "staleness_exponent", staleness_exponent, "[0, inf)")

    def weight(self, staleness: int) -> float:
        """Return (1 + staleness)^-a."""
        return float((1 + staleness) ** -self.staleness_exponent)


class FedAsync(Asynchronous):
    r"""A server that moves towards each client's model as it arrives.

    Xie, Koyejo and Gupta, *Asynchronous Federated Optimization*, 2019 (https://arxiv.org/abs/1903.03934), Algorithm 1
    and section 5.2:

    .. math::
        x^{r+1} = (1 - \alpha_r) x^r + \alpha_r y, \qquad \alpha_r = \alpha \, s(\tau)

    with :math:`\tau` the server steps since the client began, and s(tau) = 1 ("constant"), :math:`(1 + \tau)^{-a}`
    ("polynomial"), or 1 up to b and then :math:`1 / (a (\tau - b) + 1)` ("hinge"). A model that no other overtakes has
    :math:`\tau = 0` and the weight :math:`\alpha`. The paper's Algorithm 1, read literally, gives it
    :math:`t - \tau = 1`. The paper's clients have a proximal term: use :class:`lightning_fed.algorithms.FedProx`. Keep
    the server's optimizer at SGD with rate 1. Any other optimizer is applied to :math:`\alpha_r (y - x^r)`.

    Args:
        concurrency: The number of clients training at a time.
        alpha: The weight of a model without staleness, in (0, 1].
        staleness: The name of s.
        a: The parameter of "polynomial" and "hinge", at least 0.
        b: The other parameter of "hinge", at least 0.
        clock: The clients' training times; all equal by default.

    Raises:
        FederatedError: If a value is out of range.

    Example:
        >>> FedAsync(concurrency=10, alpha=0.6, staleness="hinge", a=10.0, b=4.0).weight(4)
        0.6
    """

    def __init__(
        self,
        concurrency: int,
        alpha: float = 0.6,
        staleness: Literal["constant", "polynomial", "hinge"] = "polynomial",
        a: float = 0.5,
        b: float = 0.0,
        clock: ClientClock | None = None,
    ) -> None:
        super().__init__(1, concurrency, clock)
        self.alpha = check_number("FedAsync", "alpha", alpha, "(0, 1]")
        self.staleness = check_one_of("FedAsync", "staleness", staleness, ("constant", "polynomial", "hinge"))
        self.a = check_number("FedAsync", "a", a, "[0, inf)")
        self.b = check_number("FedAsync", "b", b, "[0, inf)")
        if b and staleness != "hinge":
            raise FederatedError(f"FedAsync(b={b!r}) is of no use to staleness={staleness!r}. Leave it unset.")

    def weight(self, staleness: int) -> float:
        """Return alpha s(staleness)."""
        if self.staleness == "polynomial":
            return float(self.alpha * (1 + staleness) ** -self.a)
        if self.staleness == "hinge" and staleness > self.b:
            return self.alpha / (self.a * (staleness - self.b) + 1)
        return self.alpha

    def held(self, change: Vector, x: Vector) -> Vector:
        """Return the client's model."""
        return x + change

    def applied(self, held: Vector, x: Vector) -> Vector:
        """Return the difference between the client's model and the current one."""
        return held - x
