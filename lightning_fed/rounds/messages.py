"""All that passes between the two halves of a round, tasks and replies as plain data; and the order of their sums."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_fed.core.errors import ClientError, FederatedError
from lightning_fed.core.rounds import ClientReport
from lightning_fed.core.types import State, Vector

__all__ = ["GRADIENTS", "LOSS", "TRAIN", "Reply", "ReplyOrder", "Task"]

GRADIENTS, LOSS, TRAIN = "gradients", "loss", "train"  # the phases of a round, in their order


@dataclass(frozen=True, slots=True)
class Task:
    """What the server asks of clients in one phase of a round; the same for all of them.

    Attributes:
        round: The round, from 0.
        phase: ``GRADIENTS``: full-batch gradients at the points that the method names, before any local work. ``LOSS``:
            the training loss at x. ``TRAIN``: local work.
        clients: Who is asked, by stored index, in the cohort's order.
        steps: The local steps asked of each of them, where some are; by stored index.
        x: The server parameters [P].
        server: The server state.
        cohort_grad: The cohort's mean full-batch gradients by point, once they are known.
        buffers: The server's buffers.
        mean_examples: The mean of n_i over the clients that have examples, where the method may ask for it, else nan.
    """

    round: int
    phase: str
    clients: Sequence[int]
    steps: Mapping[int, int]
    x: Vector
    server: State
    cohort_grad: State = field(default_factory=dict)
    buffers: State = field(default_factory=dict)
    mean_examples: float = math.nan


@dataclass(frozen=True, slots=True)
class Reply:
    """What S clients answer to a task; a client alone answers with S = 1.

    What clients keep is no part of it: it stays where they are. In a simulation the tensors are the engine's own, and
    valid until the next clients are asked.

    Attributes:
        round: The round.
        phase: The phase of the task.
        clients: Who answers, by stored index: first those of the rows, in their order.
        send: The messages [S, ...] by name; full-batch gradients by point.
        reports: What each did in its local work, in the order of the rows.
        models: The parameters y [S, P] that each ended with, where the message "delta" is ``y - x`` itself.
        changes: ``y - x`` [S, P], whatever the messages are; None where the sender does not tell.
        buffers: The module's buffers after each client's work; none where no client changes any.
        norms: Norms of the clients' own full-batch gradients, by point and stored index; as 0-dim tensors if they are
            still on an accelerator.
        examples: The examples that each went through in its local epochs.
        own_examples: Those that each went through before, in an own solve.
        loss: The sum of the loss over :attr:`loss_examples` examples of all these clients.
        loss_examples: How many these are.
        implied: The names of messages that need not travel: the server works them out where they are left out.
        message_bytes: What the messages come to on their way, where they are compressed.
        server_read: The entries of the server state that clients have read so far in the round.
        cohort_grad_read: The mean gradients that they have read so far.
        failed: Those of these clients that have no answer, and why, by stored index; their rows, if there are any, are
            of no use.
    """

    round: int
    phase: str
    clients: Sequence[int] = ()
    send: State = field(default_factory=dict)
    reports: Sequence[ClientReport] = ()
    models: Tensor | None = None
    changes: Tensor | None = None
    buffers: Sequence[State] = ()
    norms: Mapping[str, Mapping[int, float | Tensor]] = field(default_factory=dict)
    examples: Sequence[int] = ()
    own_examples: Sequence[int] = ()
    loss: float = 0.0
    loss_examples: int = 0
    implied: tuple[str, ...] = ()
    message_bytes: int | None = None
    server_read: frozenset[str] = frozenset()
    cohort_grad_read: frozenset[str] = frozenset()
    failed: Mapping[int, ClientError] = field(default_factory=dict)


class ReplyOrder:
    """The order of a sum of replies: that of the cohort, whoever answers first, or the sum would have other bits.

    A reply that comes before those of earlier clients waits as a copy. Where replies come in order, as in a simulation,
    nothing is copied.

    Args:
        clients: Those that are asked, by stored index.
    """

    def __init__(self, clients: Iterable[int]) -> None:
        self._clients = list(clients)
        self._place = dict(zip(self._clients, range(len(self._clients)), strict=True))
        self._answered: set[int] = set()
        self._waiting: dict[int, Reply] = {}  # by the first place that each answers for
        self._done: set[int] = set()  # clients whose replies have been handed on
        self._next = 0  # the first place that none of them has

    def rows(self, reply: Reply) -> list[int]:
        """Return the rows of a reply in the order of the sum, without those of clients that failed."""
        row_of = dict(zip(reply.clients, range(len(reply.clients)), strict=True))
        ordered = sorted(row_of.keys() - reply.failed.keys(), key=self._place.__getitem__)
        return list(map(row_of.__getitem__, ordered))

    def arrive(self, reply: Reply) -> list[Reply]:
        """Return the replies whose turn it is now that this one is here; a second copy of one is ignored."""
        clients = set(reply.clients)
        what = f"A reply to {reply.phase!r} of round {reply.round} is of"
        if strangers := clients - self._place.keys():
            raise FederatedError(
                f"{what} the client with stored index {min(strangers)}, which was not asked. Answer for the clients"
                " that the task names."
            )
        known = clients & self._answered
        if known and known != clients:
            raise FederatedError(
                f"{what} several clients, some of which have answered before, such as the one with stored index"
                f" {min(known)}. Answer for each client once."
            )
        if known or not clients:
            return []
        self._answered |= clients
        first = min(map(self._place.__getitem__, clients))
        self._waiting[first] = reply if first == self._next else _copied(reply)
        ready = []
        while self._next in self._waiting:
            ready.append(self._waiting.pop(self._next))
            self._done.update(ready[-1].clients)
            while self._next < len(self._clients) and self._clients[self._next] in self._done:
                self._next += 1
        return ready

    def missing(self) -> list[int]:
        """Return the clients that have not answered, by stored index, in order."""
        if len(self._answered) == len(self._clients):
            return []
        return [index for index in self._clients if index not in self._answered]

    def rest(self) -> list[Reply]:
        """Return the replies that still wait for clients which do not answer, in order."""
        return list(map(self._waiting.pop, sorted(self._waiting)))


def _copied(reply: Reply) -> Reply:
    """Return a reply that shares no memory with the engine that made it; what is sent under two names stays one."""
    copies: dict[tuple[int, torch.Size], Tensor] = {}

    def cloned(value: Tensor) -> Tensor:
        key = value.data_ptr(), value.shape
        if value.numel() == 0 or key not in copies:
            copies[key] = value.clone()
        return copies[key]

    models, changes = (None if value is None else cloned(value) for value in (reply.models, reply.changes))
    send = {name: cloned(value) for name, value in reply.send.items()}
    buffers = [{name: cloned(value) for name, value in own.items()} for own in reply.buffers]
    return replace(reply, send=send, models=models, changes=changes, buffers=buffers)
