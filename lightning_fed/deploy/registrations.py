"""The registrations of a run's clients: the sizes of their data, and which clients have not registered."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.deploy.message import Fields, is_count, printable, quoted

_log = logging.getLogger("lightning_fed.deploy")


@dataclass(frozen=True, slots=True)
class Registration:
    """Facts that a site reports about a client's data.

    These are the numbers of examples, of batches in a local epoch, of examples in a batch and for validation, and the
    meaning of inputs and targets in words, if the data module knows it.
    """

    size: int
    batches: int
    batch_size: int | None
    val_size: int = 0
    columns: tuple[str, ...] = ()


class Registrations:
    """The registrations of a run's clients.

    A client that has not registered in time still counts as one of N and may be sampled, with the mean
    number of examples of the others. If it is sampled, it fails in that round. It may register later. A client with
    more than ``max_examples``, with another batch size than the required one, or whose inputs and targets mean
    something else than those of an earlier one, is refused.
    """

    def __init__(
        self, client_ids: Sequence[ClientId], max_examples: int | None = None, batch_size: int | None = None
    ) -> None:
        self.client_ids, self._max_examples, self._batch_size = client_ids, max_examples, batch_size
        self.known: dict[ClientId, Registration] = {}  # in the order of the ids once :meth:`close` was called
        self.unregistered: set[ClientId] = set()
        self._late: dict[ClientId, Registration] = {}

    def add(self, client_id: ClientId, header: Mapping[str, Any]) -> None:
        """Add a client's registration. A late one counts from :meth:`accept_late` on."""
        fields = Fields(f"The reply of client {client_id!r}", header)
        counts = {name: fields.count(name) for name in ("size", "batches", "val_size")}
        if self._max_examples is not None and counts["size"] > self._max_examples:
            raise FederatedError(
                f"The reply of client {client_id!r} says that it has {counts['size']:,} examples, more than"
                f" max_examples={self._max_examples:,} allows: its weight would be as large."
            )
        if counts["batches"] > counts["size"]:  # a schedule of the run's steps goes by the most batches
            raise FederatedError(
                f"The reply of client {client_id!r} says that it has {counts['batches']:,} batches of"
                f" {counts['size']:,} examples."
            )
        batch_size = header.get("batch_size")
        if self._batch_size is not None and batch_size != self._batch_size:
            raise FederatedError(
                f"The site of client {client_id!r} has batch_size={quoted(batch_size)}, and the run's is"
                f" {self._batch_size}. Give its data module the run's, or leave batch_size unset for the run."
            )
        columns = self._compare_columns(client_id, header.get("columns", []))
        found = Registration(**counts, batch_size=batch_size if is_count(batch_size, 1) else None, columns=columns)
        (self._late if client_id in self.unregistered else self.known)[client_id] = found

    def _compare_columns(self, client_id: ClientId, found: Any) -> tuple[str, ...]:
        """Return the meaning of a client's columns; raise if an earlier client's differ."""
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            raise FederatedError(f"The reply of client {client_id!r} says that its columns are {quoted(found)}.")
        mine = tuple(printable(name, 200) for name in found)
        for other, known in {**self.known, **self._late}.items():
            if not mine or not known.columns or mine == known.columns or other == client_id:
                continue
            pairs = zip_longest(mine, known.columns, fillvalue="nothing")
            number, (own, its) = next((n, pair) for n, pair in enumerate(pairs) if pair[0] != pair[1])
            raise FederatedError(
                f"The sites of clients {client_id!r} and {other!r} do not mean the same by their inputs and targets:"
                f" column {number} is {own!r} at the first and {its!r} at the second. Declare the same features,"
                " categories and classes in the data module of every site."
            )
        return mine

    def close(self) -> None:
        """End the registration, and record the clients that have not registered."""
        sizes = [known.size for known in self.known.values() if known.size]
        self._compare_batch_sizes()
        typical = Registration(max(1, round(sum(sizes) / max(1, len(sizes)))), 0, None)
        self.unregistered = set(self.client_ids) - self.known.keys()
        self.known = {client_id: self.known.get(client_id, typical) for client_id in self.client_ids}

    def pending(self) -> list[ClientId]:
        """Return the clients that have not registered yet."""
        missing = self.unregistered - self._late.keys()
        return [client_id for client_id in self.client_ids if client_id in missing]

    def accept_late(self) -> bool:
        """Add the clients that registered late; return whether there are any."""
        late, self._late = self._late, {}
        self.known |= late
        self.unregistered -= late.keys()
        if late:
            self._compare_batch_sizes()
        return bool(late)

    def _compare_batch_sizes(self) -> None:
        """Warn if sites have several: on purpose, perhaps."""
        of = {known.batch_size: client_id for client_id, known in self.known.items() if known.batch_size}
        if len(of) > 1:
            named = ", ".join(f"{size} (client {of[size]!r})" for size in sorted(of)[:5])
            _log.warning("Sites have different batch sizes: %s. RemoteClients(batch_size=...) allows one.", named)
