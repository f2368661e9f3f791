"""The messages between the two halves of a round (tasks and replies, as plain data), and the order of their sums."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.plain import place_of
from lightning_fed.core.rounds import ClientReport
from lightning_fed.core.types import State, Vector

GRADIENTS, LOSS, TRAIN = "gradients", "loss", "train"  # the phases of a round, in order


@dataclass(frozen=True, slots=True)
class Task:
    """The server's request to clients in one phase of a round, the same for all of them."""

    round: int  # the round, from 0
    # `GRADIENTS`: full-batch gradients at the method's points, before any local work. `LOSS`: the training loss at
    # x. `TRAIN`: local work.
    phase: str
    clients: Sequence[int]  # the requested clients, by stored index, in the cohort's order
    steps: Mapping[int, int]  # the requested local steps, if limited, by stored index
    x: Vector  # the server parameters [P]
    server: State
    cohort_grad: State = field(default_factory=dict)  # the cohort's mean full-batch gradients by point, once known
    buffers: State = field(default_factory=dict)
    # the mean of n_i over the clients that have examples, or nan if the method cannot read it
    mean_examples: float = math.nan
    first_step: int = 0  # the run's step when local work begins, for `local_schedule="total"`; else 0


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply of S clients to a task; S = 1 for a single client.

    It does not contain client states, which stay with the clients. In a simulation the tensors belong to the engine,
    and are valid until the next clients run.
    """

    round: int
    phase: str
    clients: Sequence[int] = ()  # stored indices; the clients of the rows come first, in row order
    send: State = field(default_factory=dict)  # the messages [S, ...] by name, or full-batch gradients by point
    reports: Sequence[ClientReport] = ()  # the clients' reports, in the order of the rows
    models: Tensor | None = None  # the clients' final parameters y [S, P], if the message "delta" is `y - x`
    changes: Tensor | None = None  # `y - x` [S, P], for any messages. None if the sender omits it
    buffers: Sequence[State] = ()  # the module's buffers after each client's work; empty if no client changes any
    # norms of the clients' full-batch gradients, by point and stored index; as 0-dim tensors if they are still on an
    # accelerator
    norms: Mapping[str, Mapping[int, float | Tensor]] = field(default_factory=dict)
    examples: Sequence[int] = ()  # the number of examples in each client's local epochs
    own_examples: Sequence[int] = ()  # the number of examples in each client's inner solve
    loss: float = 0.0  # the sum of the loss over `loss_examples` examples of these clients
    loss_examples: int = 0  # the number of examples in `loss`
    implied: tuple[str, ...] = ()  # the names of messages that are not sent; the server computes them
    message_bytes: int | None = None  # the size of the messages if they are compressed
    server_read: frozenset[str] = frozenset()  # the entries of the server state that clients have read in the round
    cohort_grad_read: frozenset[str] = frozenset()  # the mean gradients that clients have read in the round
    # the causes of failed clients, by stored index; their rows must not be used
    failed: Mapping[int, ClientError] = field(default_factory=dict)


class ReplyOrder:
    """Puts replies in the cohort's order, so that their sum has the same bits for any order of arrival.

    A reply that arrives before the replies of earlier clients waits as a copy. If replies arrive in order, as in a
    simulation, nothing is copied.
    """

    def __init__(self, clients: Iterable[int]) -> None:
        self._clients = list(clients)
        self._position = dict(zip(self._clients, range(len(self._clients)), strict=True))
        self._answered: set[int] = set()
        self._waiting: dict[int, Reply] = {}  # keyed by the first position of each reply
        self._done: set[int] = set()  # clients whose replies have been returned
        self._next = 0  # the first position of a client that is not done

    def rows(self, reply: Reply) -> list[int]:
        """Return the rows of a reply in the order of the sum, without failed clients."""
        row_of = dict(zip(reply.clients, range(len(reply.clients)), strict=True))
        ordered = sorted(row_of.keys() - reply.failed.keys(), key=self._position.__getitem__)
        return list(map(row_of.__getitem__, ordered))

    def arrive(self, reply: Reply) -> list[Reply]:
        """Return the replies that can be added now that this one has arrived; duplicates are ignored."""
        clients = set(reply.clients)
        what = f"A reply to {reply.phase!r} of round {reply.round} is of"
        if unexpected := clients.difference(self._position):
            raise FederatedError(
                f"{what} the client with stored index {min(unexpected)}, which was not asked. Answer for the clients"
                " that the task names."
            )
        known = clients & self._answered
        if known and known != clients:
            raise FederatedError(
                f"{what} several clients, and some of them have answered before, such as the one with stored index"
                f" {min(known)}. Answer for each client once."
            )
        if known or not clients:
            return []
        self._answered |= clients
        first = min(map(self._position.__getitem__, clients))
        self._waiting[first] = reply if first == self._next else _copied(reply)
        ready = []
        while self._next in self._waiting:
            ready.append(self._waiting.pop(self._next))
            self._done.update(ready[-1].clients)
            while self._next < len(self._clients) and self._clients[self._next] in self._done:
                self._next += 1
        return ready

    def missing(self) -> list[int]:
        """Return the clients without a reply, by stored index, in order."""
        if len(self._answered) == len(self._clients):
            return []
        return [index for index in self._clients if index not in self._answered]

    def rest(self) -> list[Reply]:
        """Remove and return the replies that wait for missing clients, in order."""
        return list(map(self._waiting.pop, sorted(self._waiting)))


def _copied(reply: Reply) -> Reply:
    """Return a reply that shares no memory with the engine; messages that share a tensor still do."""
    copies: dict[tuple[Any, ...], Tensor] = {}

    def cloned(value: Tensor) -> Tensor:
        key = place_of(value)
        if value.numel() == 0 or key not in copies:
            copies[key] = value.clone()
        return copies[key]

    models, changes = (None if value is None else cloned(value) for value in (reply.models, reply.changes))
    send = {name: cloned(value) for name, value in reply.send.items()}
    buffers = [{name: cloned(value) for name, value in own.items()} for own in reply.buffers]
    return replace(reply, send=send, models=models, changes=changes, buffers=buffers)
