"""A phase over a transport: all clients are asked at once, and only valid replies count."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
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
    Message,
    check_message,
    printable,
    words_in,
)
from lightning_fed.deploy.registrations import Registrations
from lightning_fed.deploy.transport import Absent, Refusal, Transport

_SHOWN = 5  # clients that one error or one line of the log names
_WAIT = 60.0  # seconds until the log names who is missing; then twice as many, and so on
_log = logging.getLogger("lightning_fed.deploy")
T = TypeVar("T")


class Exchange:
    """Ask clients over a transport; of what comes, each client's first valid reply to the phase counts.

    A second copy is ignored. Anything else is logged by name, once, and changes nothing. A client whose reply to the
    phase is not valid is not waited for any longer; its valid reply still counts while others are awaited.

    ``run`` is the run's name on the sites. ``server_facts`` has the settings that the registration compares, "facts"
    and "optimizer".
    """

    def __init__(
        self,
        transport: Transport,
        trainer: Any,
        sites: Registrations,
        run: str,
        server_facts: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self.run, self.sites, self._of_run = run, sites, frozenset(sites.client_ids)
        self._transport, self._server_facts = transport, server_facts
        self._signals, settings = trainer._signal_connector, trainer.fit_loop.settings
        self._drops, self._max_failed_share = settings.drops_failed, settings.max_failed_share
        self._logged: set[str] = set()

    def agree(self, columns: Sequence[str]) -> dict[str, list[str]]:
        """Return the words in some columns of all clients that answer, in one order."""
        of_run = {"format": FORMAT, "run": self.run, "phase": WORDS, "round": 0, "attempt": 0, "columns": list(columns)}
        tasks = {client_id: Message({**of_run, "client": client_id}) for client_id in self.sites.client_ids}

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
        """Ask all clients for the sizes of their data, which are then in :attr:`sites`; give them the agreed words."""
        self._server_facts = {**self._server_facts, "words": words}
        tasks = {client_id: self._registration(client_id) for client_id in self.sites.client_ids}
        for _ in self.ask(tasks, lambda reply: self.sites.add(reply.client, reply.header)):
            pass
        self.sites.close()

    def _registration(self, client_id: ClientId) -> Message:
        header = {"format": FORMAT, "run": self.run, "phase": REGISTER, "round": 0, "attempt": 0, "client": client_id}
        return Message({**header, **self._server_facts, "clients": self.sites.client_ids})

    def ask(self, tasks: Mapping[ClientId, Message], read: Callable[[Message], T]) -> Iterator[T]:
        """Yield what ``read`` makes of each client's reply; it raises :class:`FederatedError` if that is not valid.

        Clients that have not registered are asked to meanwhile. Raise if clients do not answer and are not to be
        dropped.
        """
        if not tasks:
            return
        missing, awaited = dict.fromkeys(tasks), set(tasks)  # without a valid reply; without any, or a refusal
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
                    why = printable(str(error))  # it may quote the message
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
        """Return whether the run continues without clients. The words are agreed on once, so all are waited for."""
        is_allowed = self._drops and next(iter(tasks.values())).header["phase"] != WORDS
        return is_allowed and len(missing) < len(tasks) and len(missing) <= self._max_failed_share * len(tasks)

    def _sender(self, message: Message, tasks: Mapping[ClientId, Message]) -> ClientId | None:
        """Return the client whose reply a message is; None for a late registration, which is added.

        A message of anything else raises :class:`FederatedError`.
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
    """Lines of the log on a phase: who is asked, who is missing after a while, and how many have answered."""

    def __init__(self, tasks: Mapping[ClientId, Message], missing: Mapping[ClientId, None]) -> None:
        header = next(iter(tasks.values())).header
        is_before = header["phase"] in (WORDS, REGISTER)
        self._phase = header["phase"] if is_before else f"round {header['round']} {header['phase']}"
        self._asked, self._missing = len(tasks), missing
        self._ended = threading.Event()
        _log.info("%s: %d clients are asked: %s", self._phase, len(tasks), _named(list(tasks)))
        threading.Thread(target=self._log_missing, daemon=True).start()

    def _log_missing(self) -> None:
        waited = 0.0
        while not self._ended.wait(waited or _WAIT):
            waited = 2 * waited or _WAIT
            missing = list(self._missing)
            answered = self._asked - len(missing)
            _log.info(
                "%s: %d of %d have answered in %g s; missing: %s",
                self._phase, answered, self._asked, waited, _named(missing),
            )  # fmt: skip

    def end(self) -> None:
        """Log how many have answered; no more lines come."""
        self._ended.set()
        _log.info("%s: %d of %d have answered", self._phase, self._asked - len(self._missing), self._asked)


def _named(clients: Sequence[ClientId]) -> str:
    return ", ".join(map(repr, clients[:_SHOWN])) + (", ..." if len(clients) > _SHOWN else "")


def _unanswered(
    tasks: Mapping[ClientId, Message], missing: Sequence[ClientId], refused: Mapping[ClientId, str]
) -> FederatedError:
    phase = tasks[missing[0]].header["phase"]
    reasons = "".join(f" Client {client!r}: {refused[client]}" for client in missing[:_SHOWN] if client in refused)
    return FederatedError(
        f"{'1 client has' if len(missing) == 1 else f'{len(missing)} clients have'} not answered to {phase!r}:"
        f" {_named(missing)}. The run can continue from its"
        f" last checkpoint once they do; on_client_error='drop' lets it continue without them.{reasons}"
    )
