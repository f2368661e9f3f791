"""The interface of a transport between a server and its sites, and a transport within the server's process."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.deploy.message import Message, quoted
from lightning_fed.deploy.site import FederatedSite

_MOST = 64 * 2**20  # bytes in one message of Flower or FLARE: every process on the way holds all of it


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a client sends no reply, as its site or the transport words it.

    Attributes:
        client: The client.
        reason: The reason.
    """

    client: ClientId
    reason: str


@dataclass(frozen=True, slots=True)
class Absent:
    """Clients without a connection for long, which may come back; each one replaces the previous one in its phase.

    A fit that drops failed clients waits for them no longer than for others, unless it would end without them.

    Attributes:
        clients: The clients, whether they were asked or not.
        reason: The reason, as the transport words it.
    """

    clients: Collection[ClientId]
    reason: str


def reply_from(client_id: ClientId, content: bytes) -> Message | Refusal:
    """Return the reply in the bytes from a client's site, or a refusal if they are not a reply of this client.

    Args:
        client_id: The client's id in the transport.
        content: The received bytes.
    """
    try:
        message = Message.from_bytes(content)
        sender, reason = message.header.get("client"), message.header.get("refused")
    except (FederatedError, AttributeError) as error:
        return Refusal(client_id, str(error))
    if reason is not None:
        return Refusal(client_id, reason if isinstance(reason, str) else quoted(reason))
    return message if sender == client_id else Refusal(client_id, f"The reply is from client {quoted(sender)}.")


def contents_of(tasks: Mapping[ClientId, Message]) -> tuple[tuple[ClientId, ...], dict[str, bytes]]:
    """Return the first clients that fit in one message to a site, and the bytes of their tasks by number."""
    contents = dict[str, bytes]()
    for number, task in enumerate(tasks.values()):
        content = task.to_bytes()
        if contents and sum(map(len, contents.values())) + len(content) > _MOST:
            break
        contents[str(number)] = content
    return tuple(tasks)[: len(contents)], contents


def replies_in(clients: Iterable[ClientId], answers: Mapping[str, bytes]) -> Iterator[Message | Refusal]:
    """Yield a site's replies for the clients of one message, by number."""
    for number, client_id in enumerate(clients):
        answer = answers.get(str(number))
        missing = Refusal(client_id, "The answer of its site has no reply of this client.")
        yield missing if answer is None else reply_from(client_id, answer)


class Transport(Protocol):
    """Carries tasks to clients and their replies back, for :class:`lightning_fed.deploy.RemoteClients`.

    Any class with this method is a transport. The fit checks the content of replies. Only the transport can verify the
    sender, see :func:`reply_from`.
    """

    def exchange(
        self, tasks: Mapping[ClientId, Message], registrations: Mapping[ClientId, Message]
    ) -> Iterator[Message | Refusal | Absent]:
        """Send messages to clients, and yield their replies, in any order.

        The iterator ends when all clients of ``tasks`` have replied, or at a deadline of the transport. Missing clients
        then leave the round, or stop the run. The fit closes the iterator early once it waits for no client, and when
        it ends with an error or is interrupted.

        Args:
            tasks: The task of each client. A task that may be lost can be sent again: the same task has the same
                answer.
            registrations: The requests to clients that have not registered yet. Do not wait for their replies.

        Returns:
            Yields replies, :class:`Refusal` for clients that will not reply, and :class:`Absent` for clients not there.
        """
        ...


class InProcess:
    """A :class:`Transport` to sites in this process, for trial runs; messages become bytes on the way.

    Args:
        sites: The sites.

    Example::

        trainer.fit(model, RemoteClients(InProcess(sites), client_ids=["clinic", "bank"]))
    """

    def __init__(self, sites: Iterable[FederatedSite]) -> None:
        self._site_of: dict[ClientId, FederatedSite] = {}
        for site in sites:
            for client_id in site.client_ids:
                if self._site_of.setdefault(client_id, site) is not site:
                    raise FederatedError(f"InProcess: two sites have client {client_id!r}. A client is at one site.")

    def exchange(
        self, tasks: Mapping[ClientId, Message], registrations: Mapping[ClientId, Message]
    ) -> Iterator[Message | Refusal]:
        """Yield each client's reply; see :class:`Transport`."""
        # registrations first: the fit reads nothing after the last reply to a task
        for client_id, task in (*registrations.items(), *tasks.items()):
            site = self._site_of.get(client_id)
            if site is None:
                yield Refusal(client_id, "no site here has it")
                continue
            try:
                reply = site.answer(Message.from_bytes(task.to_bytes()))
            except FederatedError as error:
                yield Refusal(client_id, str(error))
            else:
                yield reply_from(client_id, reply.to_bytes())
