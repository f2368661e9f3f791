"""Phases over a transport: track registrations, ask all clients at once, and accept only valid replies."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, TypeVar
from unicodedata import normalize

from lightning_fed.core.arguments import kind_of
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.data.files.tables import sorted_words
from lightning_fed.deploy.message import (
    FORMAT,
    NAMES,
    REGISTER,
    WORDS,
    Fields,
    Message,
    check_message,
    is_count,
    printable,
    quoted,
    words_in,
)
from lightning_fed.deploy.transport import Absent, Refusal, Transport

_SHOWN = 5  # clients named in one error or one line of the log
_WAIT = 60.0  # seconds until the log names missing clients; then twice as many, and so on
_log = logging.getLogger("lightning_fed.deploy")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Registration:
    """Facts that a site reports about a client's data.

    The numbers count its examples, the batches of a local epoch, the examples of a batch, and those for validation.
    ``columns`` describes inputs and targets in words, if the data module can.
    """

    size: int
    batches: int
    batch_size: int | None
    val_size: int = 0
    columns: tuple[str, ...] = ()


class Registrations:
    """The registrations of a run's clients.

    A client that has not registered in time still counts as one of N. It may be sampled, with the numbers of its
    ``earlier`` registration or else the mean number of examples of the others, and then fails in that round. It may
    register later. A client is refused if it has more than ``max_examples`` or another batch size than the required
    one. It is also refused if its inputs and targets mean something else than an earlier client's.
    """

    def __init__(
        self,
        client_ids: Sequence[ClientId],
        max_examples: int | None = None,
        batch_size: int | None = None,
        earlier: Mapping[ClientId, Mapping[str, Any]] | None = None,
    ) -> None:
        self.client_ids, self._max_examples, self._batch_size = client_ids, max_examples, batch_size
        self.known: dict[ClientId, Registration] = {}  # in the order of the ids once :meth:`close` was called
        self.unregistered: set[ClientId] = set()
        self._late: dict[ClientId, Registration] = {}
        self._earlier: dict[ClientId, Registration] = {}
        for client_id in client_ids:
            if earlier and client_id in earlier:
                with suppress(FederatedError):  # the limits are new ones
                    self._earlier[client_id] = self._read(client_id, earlier[client_id])

    def add(self, client_id: ClientId, header: Mapping[str, Any]) -> None:
        """Add a client's registration. A late one counts from :meth:`accept_late` on."""
        (self._late if client_id in self.unregistered else self.known)[client_id] = self._read(client_id, header)

    def _read(self, client_id: ClientId, header: Mapping[str, Any]) -> Registration:
        fields = Fields(f"The reply of client {client_id!r}", header)
        size = fields.count("size")
        if self._max_examples is not None and size > self._max_examples:
            raise FederatedError(
                f"The reply of client {client_id!r} says that it has {size:,} examples, more than"
                f" max_examples={self._max_examples:,} allows: its weight would be as large."
            )
        batches = fields.count("batches", most=size)  # a schedule of the run's steps depends on the most batches
        batch_size = header.get("batch_size")
        if self._batch_size is not None and batch_size != self._batch_size:
            raise FederatedError(
                f"The site of client {client_id!r} has batch_size={quoted(batch_size)}, and the run's is"
                f" {self._batch_size}. Give its data module the run's, or leave batch_size unset for the run."
            )
        columns = self._compare_columns(client_id, header.get("columns", []))
        batch_size = batch_size if is_count(batch_size, 1) else None
        return Registration(size, batches, batch_size, fields.count("val_size"), columns)

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
        self.unregistered = set(self.client_ids) - self.known.keys()
        self.known = {**self._earlier, **self.known}
        sizes = [known.size for known in self.known.values() if known.size]
        self._compare_batch_sizes()
        self._typical = Registration(max(1, round(sum(sizes) / max(1, len(sizes)))), 0, None)
        self.known = {client_id: self.known.get(client_id, self._typical) for client_id in self.client_ids}

    def numbers(self) -> dict[ClientId, dict[str, int | None]]:
        """Return the numbers of all clients that have ever registered: ``earlier`` of a restarted server."""
        return {
            client_id: {name: getattr(known, name) for name in ("size", "batches", "batch_size", "val_size")}
            for client_id, known in self.known.items()
            if known is not self._typical
        }

    def pending(self) -> list[ClientId]:
        """Return the clients that have not registered yet."""
        missing = self.unregistered - self._late.keys()
        return [client_id for client_id in self.client_ids if client_id in missing]

    def accept_late(self) -> bool:
        """Let the clients that registered late take part; return whether there are any."""
        late, self._late = self._late, {}
        self.known |= late
        self.unregistered -= late.keys()
        if late:
            self._compare_batch_sizes()
        return bool(late)

    def _compare_batch_sizes(self) -> None:
        """Warn if sites have several batch sizes, which may be on purpose."""
        of = {known.batch_size: client_id for client_id, known in self.known.items() if known.batch_size}
        if len(of) > 1:
            named = ", ".join(f"{size} (client {of[size]!r})" for size in sorted(of)[:5])
            _log.warning("Sites have different batch sizes: %s. RemoteClients(batch_size=...) allows one.", named)


class Exchange:
    """Ask clients over a transport; each client's first valid reply to the phase counts.

    A second copy is ignored. Anything else is logged once, with the client's name, and changes nothing. A client is no
    longer awaited after an invalid reply to the phase; a valid one still counts while others are awaited.

    ``run`` is the run's name on the sites, and ``facts`` are the settings that the registration compares.
    """

    def __init__(
        self, transport: Transport, trainer: Any, sites: Registrations, run: str, facts: Mapping[str, str]
    ) -> None:
        self.run, self.sites, self._of_run = run, sites, frozenset(sites.client_ids)
        self._transport, self._facts, self._words = transport, facts, dict[str, Sequence[str]]()
        self._signals, settings = trainer._signal_connector, trainer.fit_loop.settings
        self._drops, self._max_failed_share = settings.drops_failed, settings.max_failed_share
        self._logged: set[str] = set()

    def agree(self, columns: Sequence[str]) -> dict[str, list[str]]:
        """Return the words in some columns of all clients that answer, sorted."""
        header = {**self.head(WORDS), "columns": list(columns)}
        tasks = {client_id: Message({**header, "client": client_id}) for client_id in self.sites.client_ids}

        def read(reply: Message) -> tuple[ClientId, dict[str, list[str]]]:
            return reply.client, words_in(reply, f"The reply of client {reply.client!r}", columns)

        found = dict(self.ask(tasks, read))
        agreed = {name: sorted_words(chain.from_iterable(own[name] for own in found.values())) for name in columns}
        for name, own in agreed.items():
            if len(own) > NAMES:
                client_id = max(found, key=lambda client: len(found[client][name]))
                raise FederatedError(
                    f"The sites have {len(own):,} words of column {name!r} in all, and may agree on {NAMES:,}. Client"
                    f" {client_id!r} has the most, {len(found[client_id][name]):,}."
                )
            forms: dict[str, str] = {}
            alike = [(forms.setdefault(normalize("NFKC", word).casefold(), word), word) for word in own]
            if alike := [pair for pair in alike if pair[0] != pair[1]]:
                _log.warning(
                    "The sites have words of column %r that look alike and count as different ones: %a and %a%s.",
                    name, *alike[0], f", and {len(alike) - 1} more" if alike[1:] else "",
                )  # fmt: skip
        return agreed

    def register(self, words: Mapping[str, Sequence[str]]) -> None:
        """Send all clients the agreed words, and collect the sizes of their data in :attr:`sites`."""
        self._words = dict(words)
        tasks = {client_id: self._registration(client_id) for client_id in self.sites.client_ids}
        for _ in self.ask(tasks, lambda reply: self.sites.add(reply.client, reply.header)):
            pass
        self.sites.close()

    def _registration(self, client_id: ClientId) -> Message:
        own = {"client": client_id, "facts": self._facts, "words": self._words, "clients": self.sites.client_ids}
        return Message({**self.head(REGISTER), **own})

    def head(self, phase: str, round: int = 0, attempt: int = 0) -> dict[str, Any]:
        """Return the header that the tasks of a phase share."""
        return {"format": FORMAT, "run": self.run, "phase": phase, "round": round, "attempt": attempt}

    def ask(self, tasks: Mapping[ClientId, Message], read: Callable[[Message], T]) -> Iterator[T]:
        """Yield the result of ``read`` for each client's reply; it raises :class:`FederatedError` for an invalid one.

        Meanwhile, unregistered clients are asked to register. Raise if clients do not answer and may not be
        dropped.
        """
        if not tasks:
            return
        missing, awaited = dict.fromkeys(tasks), set(tasks)  # lacking a valid reply; lacking any reply or refusal
        refused, absent = dict[ClientId, str](), set[ClientId]()
        registrations = {client_id: self._registration(client_id) for client_id in self.sites.pending()}
        replies = iter(self._transport.exchange(tasks, registrations))
        progress = _Progress(tasks, missing)
        try:
            while awaited and not (awaited <= absent and self._can_lose(missing, tasks)):
                with self._signals.at_once():
                    come = next(replies, None)
                if come is None:
                    break
                if isinstance(come, (Refusal, Absent)):
                    told = [come.client] if isinstance(come, Refusal) else [c for c in come.clients if c in awaited]
                    if isinstance(come, Refusal):
                        awaited.discard(come.client)
                    else:
                        absent = set(told)
                    for client_id in told:
                        refused[client_id] = printable(come.reason)
                        self._log(f"Client {client_id!r} does not answer: {refused[client_id]}")
                    continue
                if not isinstance(come, Message):
                    raise FederatedError(
                        f"{type(self._transport).__name__}.exchange yields {kind_of(come)}, where messages and refusals"
                        " are expected. reply_from(client_id, content) makes one of them from bytes."
                    )
                sender: ClientId | None = None
                try:
                    sender = self._sender(come, tasks)
                    if sender not in missing:
                        continue
                    awaited.discard(sender)
                    value = read(come)
                except FederatedError as error:
                    why = printable(str(error))  # the error may quote the message
                    if sender is not None:
                        refused[sender] = why
                    self._log(why)
                    continue
                del missing[sender]
                yield value
        finally:
            progress.end()
            if (close := getattr(replies, "close", None)) is not None:
                close()
        if missing and not self._drops:
            raise _unanswered(tasks, list(missing), refused)

    def _can_lose(self, missing: Mapping[ClientId, None], tasks: Mapping[ClientId, Message]) -> bool:
        """Return whether the run continues without these clients; words need all, since they are agreed on once."""
        is_allowed = self._drops and next(iter(tasks.values())).header["phase"] != WORDS
        return is_allowed and len(missing) < len(tasks) and len(missing) <= self._max_failed_share * len(tasks)

    def _sender(self, message: Message, tasks: Mapping[ClientId, Message]) -> ClientId | None:
        """Return the client that sent a reply, or None for a late registration, which is added.

        Any other message raises :class:`FederatedError`.
        """
        who = check_message(message, "The reply of")
        header, asked = message.header, next(iter(tasks.values())).header
        client_id = header.get("client")
        if isinstance(client_id, bool) or not isinstance(client_id, (int, str)) or client_id not in self._of_run:
            raise FederatedError(f"{who} is of no client of this run.")
        if header["run"] != self.run:
            raise FederatedError(f"{who} is of run {header['run']}, and this is run {self.run}.")
        if header["phase"] == REGISTER and client_id in self.sites.unregistered:
            self.sites.add(client_id, header)
            return None
        there, here = ((of["phase"], of["round"], of["attempt"]) for of in (header, asked))
        if there != here:
            found, now = (f"{of[0]!r} of round {of[1]} (attempt {of[2]})" for of in (there, here))
            raise FederatedError(f"{who} is to {found}, and the current task is {now}.")
        if client_id not in tasks:
            raise FederatedError(f"{who}: it was not asked in this phase.")
        return client_id

    def _log(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            _log.error("%s", text)


class _Progress:
    """The log lines of a phase: clients asked, clients missing after a while, and the number that have answered."""

    def __init__(self, tasks: Mapping[ClientId, Message], missing: Mapping[ClientId, None]) -> None:
        header = next(iter(tasks.values())).header
        is_before = header["phase"] in (WORDS, REGISTER)
        self._phase = header["phase"] if is_before else f"round {header['round']} {header['phase']}"
        self._asked, self._missing = len(tasks), missing
        self._ended = threading.Event()
        _log.info("%s: %d clients are asked: %s", self._phase, len(tasks), named(list(tasks)))
        threading.Thread(target=self._log_missing, daemon=True).start()

    def _log_missing(self) -> None:
        waited = 0.0
        while not self._ended.wait(waited or _WAIT):
            waited = 2 * waited or _WAIT
            missing = list(self._missing)
            answered = self._asked - len(missing)
            _log.info(
                "%s: %d of %d have answered in %g s; missing: %s",
                self._phase, answered, self._asked, waited, named(missing),
            )  # fmt: skip

    def end(self) -> None:
        """Log the number of answers, and stop logging."""
        self._ended.set()
        _log.info("%s: %d of %d have answered", self._phase, self._asked - len(self._missing), self._asked)


def named(clients: Sequence[ClientId]) -> str:
    """Return the first clients as text for a line of the log."""
    return ", ".join(map(repr, clients[:_SHOWN])) + (", ..." if len(clients) > _SHOWN else "")


def _unanswered(
    tasks: Mapping[ClientId, Message], missing: Sequence[ClientId], refused: Mapping[ClientId, str]
) -> FederatedError:
    phase = tasks[missing[0]].header["phase"]
    reasons = "".join(f" Client {client!r}: {refused[client]}" for client in missing[:_SHOWN] if client in refused)
    return FederatedError(
        f"{'1 client has' if len(missing) == 1 else f'{len(missing)} clients have'} not answered to {phase!r}:"
        f" {named(missing)}. The run can continue from its"
        f" last checkpoint once they do; on_client_error='drop' lets it continue without them.{reasons}"
    )
