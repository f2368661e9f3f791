"""The transport through FLARE: a task per site, sent again if it is lost, until a deadline or an abort."""

import logging
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.deploy.flare.arrays import packed, unpacked
from lightning_fed.deploy.message import Message, printable
from lightning_fed.deploy.transport import Absent, Refusal, contents_of, replies_in

_LOOK = 0.2  # seconds between two checks for an abort
_TRIES = 3  # retries of a site in a phase after errors on its side of FLARE
_BACK_OFF = 5.0  # seconds before a retry
_log = logging.getLogger("lightning_fed.deploy")


class AbortedError(Exception):
    """The job was aborted. The checkpoint of the last round stays."""


@dataclass
class _Site:
    """A site in a phase: its current task, and the number of errors on its side of FLARE."""

    clients: tuple[ClientId, ...] = ()
    task: Any = None
    errors: int = 0
    not_before: float = 0.0


class FlareTransport:
    """A :class:`lightning_fed.deploy.Transport` through FLARE. A site has one task at a time, for several clients.

    FLARE itself sends a task again to a site whose connection was lost.

    Args:
        send: Sends arrays to a site and returns the task. Calls the third argument once, from any thread, with the
            arrays of the reply, or with the reason for a missing reply.
        cancel: Cancels a task.
        sites: The clients of each site, by its name, which its certificate proves.
        timeout: The seconds after which a phase ends without the clients that have not answered.
        is_aborted: Returns whether the job was aborted.
        silent_for: Returns the seconds since a site was last heard from.
        absent_after: The seconds after which the clients of a silent site count as absent.

    Raises:
        FederatedError: If a client is on two sites.
    """

    def __init__(
        self,
        send: Callable[[str, dict[str, Any], Callable[[dict[str, Any] | str], None]], Any],
        cancel: Callable[[Any], None],
        sites: Mapping[str, Sequence[ClientId]],
        timeout: float,
        is_aborted: Callable[[], bool],
        silent_for: Callable[[str], float] = lambda site: 0.0,
        absent_after: float = 300.0,
    ) -> None:
        self._silent_for, self._absent_after = silent_for, absent_after
        self._give, self._cancel, self._timeout, self._is_aborted = send, cancel, timeout, is_aborted
        self._site_of = {client: site for site, clients in sites.items() for client in clients}
        if len(self._site_of) < sum(map(len, sites.values())):
            raise FederatedError(f"sites={dict(sites)!r} names a client twice.")

    def exchange(
        self, tasks: Mapping[ClientId, Message], registrations: Mapping[ClientId, Message]
    ) -> Iterator[Message | Refusal | Absent]:
        """Yield the clients' replies until the timeout; see :class:`lightning_fed.deploy.Transport`."""
        missing, end = {**registrations, **tasks}, time.monotonic() + self._timeout
        sites = {self._site_of[client]: _Site() for client in missing}
        come: queue.SimpleQueue[tuple[str, int, dict[str, Any] | str]] = queue.SimpleQueue()
        try:
            while missing.keys() & tasks.keys():
                if self._is_aborted():
                    raise AbortedError
                for name, site in sites.items():
                    if site.task is None and site.not_before <= time.monotonic():
                        self._send(name, site, missing, come)
                silent = [
                    client for client, site in self._site_of.items() if self._silent_for(site) > self._absent_after
                ]
                yield Absent(silent, f"its site was not connected for {self._absent_after:g} s")
                for answer in self._replies_in(sites, come):
                    missing.pop(answer.client, None)
                    yield answer
                if come.empty() and time.monotonic() > end:
                    for client in missing.keys() & tasks.keys():
                        yield Refusal(client, f"no reply arrived for {self._timeout:g} s")
                    return
        finally:
            for site in sites.values():
                if site.task is not None:
                    self._cancel(site.task)

    def _send(self, name: str, site: _Site, missing: Mapping[ClientId, Message], come: Any) -> None:
        """Ask a site for as many of its missing clients as fit in one FLARE task."""
        if own := {client: task for client, task in missing.items() if self._site_of[client] == name}:
            site.clients, contents = contents_of(own)
            site.task = self._give(name, packed(contents), lambda found: come.put((name, found)))

    def _replies_in(self, sites: Mapping[str, _Site], come: Any) -> Iterator[Message | Refusal]:
        """Yield the replies of the next task that ends, if one ends soon."""
        try:
            name, found = come.get(timeout=_LOOK)
        except queue.Empty:
            return
        site = sites[name]
        clients, site.clients, site.task = site.clients, (), None
        if isinstance(found, str):
            site.errors += 1
            site.not_before = time.monotonic() + _BACK_OFF
            _log.warning("Site %s, asked for %s: %s", name, list(clients), printable(found))
            if site.errors > _TRIES:
                yield from (Refusal(client, f"its site {name!r}: {found}") for client in clients)
            return
        yield from replies_in(clients, unpacked(found))
