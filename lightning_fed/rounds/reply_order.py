"""Replies that come in any order, handed on in the order in which they are summed."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from lightning_fed.core.errors import FederatedError
from lightning_fed.rounds.messages import Reply

__all__ = ["ReplyOrder"]


class ReplyOrder:
    """The order of a sum of replies: that of the cohort, whoever answers first, or the sum would have other bits.

    A reply that comes before those of earlier clients waits as a copy. Where replies come in order, as in a simulation,
    nothing is copied.

    Args:
        order: The clients that are asked, by stored index.
    """

    def __init__(self, order: Iterable[int]) -> None:
        self._clients = list(order)
        self._place = {index: place for place, index in enumerate(self._clients)}
        self._answered: set[int] = set()
        self._waiting: dict[int, Reply] = {}  # by the first place that each answers for
        self._done: set[int] = set()  # clients whose replies have been handed on
        self._next = 0  # the first place that none of them has

    def rows(self, reply: Reply) -> list[int]:
        """Return the rows of a reply in the order of the sum, without those of clients that failed."""
        if len(reply.clients) == 1:
            return [] if reply.failed else [0]
        rows = (row for row, index in enumerate(reply.clients) if index not in reply.failed)
        return sorted(rows, key=lambda row: self._place[reply.clients[row]])

    def arrive(self, reply: Reply) -> list[Reply]:
        """Return the replies whose turn it is now that this one is here; a second copy of one is ignored.

        Raises:
            FederatedError: If it is of clients that were not asked, or of some that have answered and some that have
                not.
        """
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
        first = min(self._place[index] for index in clients)
        if first > self._next:
            self._waiting[first] = _copied(reply)
            return []
        ready = [reply]
        self._hand_on(reply)
        while self._next in self._waiting:
            ready.append(self._waiting.pop(self._next))
            self._hand_on(ready[-1])
        return ready

    def _hand_on(self, reply: Reply) -> None:
        self._done.update(reply.clients)
        while self._next < len(self._clients) and self._clients[self._next] in self._done:
            self._next += 1

    def missing(self) -> list[int]:
        """Return the clients that have not answered, by stored index, in order."""
        return [index for index in self._clients if index not in self._answered]

    def rest(self) -> list[Reply]:
        """Return the replies that still wait for clients which do not answer, in order."""
        return [self._waiting.pop(first) for first in sorted(self._waiting)]


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
