"""The server of a run through Flower: the ServerApp, and the transport to nodes that come and go."""

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.app import Context, MessageType, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid, ServerApp

from lightning_fed.core.arguments import check_number
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId
from lightning_fed.deploy.flower.client import clients_in, packed, unpacked
from lightning_fed.deploy.message import Message, printable
from lightning_fed.deploy.saved_run import serve
from lightning_fed.deploy.site_process import STARTED_BY, Maker, end_with
from lightning_fed.deploy.transport import Absent, Refusal, contents_of, replies_in

_DEFAULTS = {"phase-timeout": 3600.0, "ask-again": 60.0, "absent-after": 300.0}  # options of a run, in seconds
_PAUSE = 0.5  # seconds between two polls for replies
_BACK_OFF = 5.0  # seconds before a node that has answered with an error is asked again
_log = logging.getLogger("lightning_fed.deploy")


def server_app(
    make_trainer: Maker,
    make_model: Maker,
    client_ids: Sequence[ClientId] | Maker,
    checkpoint: str | Path,
    make_val: Maker | None = None,
    max_examples: int | None = None,
    owners: Mapping[ClientId, str | PathLike[str]] | None = None,
    batch_size: int | None = None,
    agree_on: Sequence[str] = (),
) -> ServerApp:
    """Return the ServerApp of a run.

    ``flwr run`` starts the run, or continues it from the checkpoint. Its configuration may set ``phase-timeout``, the
    seconds after which a phase ends without the clients that have not answered (3600). ``ask-again`` sets the seconds
    after which the server checks the node of a task without a reply (60). With ``on_client_error="drop"``, a phase does
    not wait for clients that have had no node for ``absent-after`` seconds (300). The process ends with the Flower
    process that started it, and so with the SuperLink.

    Args:
        make_trainer: Makes the trainer, with the arguments of a simulation: a function or ``"module:function"``, like
            the others.
        make_model: Makes the module.
        client_ids: The clients' ids, in the order of their stored indices, or a function that returns them.
        checkpoint: The checkpoint's file. It is written after every round, and read if it exists. The previous round's
            checkpoint stays next to it, with ``.previous`` in its name. A relative path starts at the SuperLink's start
            folder.
        make_val: Makes the server's own validation set.
        max_examples: As for :class:`lightning_fed.deploy.RemoteClients`.
        owners: Files of public keys, by client, such as ``{"bank": "bank.pub"}``. Only the SuperNode with this key may
            have the client. Relative paths are as for ``checkpoint``. A client without a key belongs to the first
            SuperNode that names it, for as long as that SuperNode is there.
        batch_size: As for :class:`lightning_fed.deploy.RemoteClients`.
        agree_on: As for ``RemoteClients``. ``make_val`` then takes the words by column.

    Example::

        app = server_app(
            "hospital.task:make_trainer",
            "hospital.task:make_model",
            ["north", "south"],
            "hospital.ckpt",
        )
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        end_with(STARTED_BY)  # Flower itself would let it wait for an ended SuperLink, maybe forever
        _log.setLevel(logging.INFO)
        _log.handlers, _log.propagate = logging.getLogger("flwr").handlers, False  # so `flwr log` shows it
        timeout, ask_again, absent_after = seconds_in(context.run_config)

        def transport_to(ids: Sequence[ClientId]) -> FlowerTransport:
            return FlowerTransport(grid, ids, timeout, ask_again, owners, absent_after)

        serve(
            transport_to, make_trainer, make_model, client_ids, checkpoint,
            make_val, max_examples, batch_size, agree_on,
        )  # fmt: skip

    return app


def seconds_in(run_config: Mapping[str, Any]) -> list[float]:
    """Return the options of a run's configuration, in the order of their defaults."""
    who = "The run's configuration"
    return [check_number(who, name, run_config.get(name, value), "(0, inf)") for name, value in _DEFAULTS.items()]


class _Sent(NamedTuple):
    """A message that waits for its reply; a query for a node's clients has no clients."""

    node: int
    clients: tuple[ClientId, ...]
    at: float


class FlowerTransport:
    """A :class:`lightning_fed.deploy.Transport` through Flower. Nodes name their clients.

    A message may be lost with the process that had it. A node handles its messages in order. If it answers a query that
    was sent after a task, and the task has no reply, the task is lost and is sent again.

    A client belongs to the first node that names it, for as long as Flower lists that node. Another node that names it
    is logged and not asked for it. For the arguments, see :func:`server_app` and its configuration.
    """

    def __init__(
        self,
        grid: Grid,
        client_ids: Sequence[ClientId],
        timeout: float,
        ask_again: float,
        owners: Mapping[ClientId, str | PathLike[str]] | None = None,
        absent_after: float = 300.0,
    ) -> None:
        self._grid, self._timeout, self._ask_again, self._absent_after = grid, timeout, ask_again, absent_after
        self._group = ""  # the label of messages in Flower
        self._by_text = {str(client): client for client in client_ids}
        if len(self._by_text) < len(client_ids):
            raise FederatedError("Two of client_ids read alike, such as 1 and '1': nodes name theirs as text.")
        if unexpected := [client for client in owners or () if client not in client_ids]:
            raise FederatedError(f"owners names client {unexpected[0]!r}, which is not one of client_ids.")
        self._owners = {client: (str(file), _key_in(client, file)) for client, file in (owners or {}).items()}
        self._node_of: dict[ClientId, int] = {}
        self._without_since: dict[ClientId, float] = {}  # when a client was first seen without a node
        self._named: dict[int, list[ClientId]] = {}  # the clients of each node that has named them
        self._sent: dict[str, _Sent] = {}
        self._not_before: dict[int, float] = {}
        self._said: dict[int, str] = {}  # the last error of each node, to log it once
        self._refused: set[tuple[int, ClientId, str]] = set()  # claims that were logged

    def exchange(
        self, tasks: Mapping[ClientId, Message], registrations: Mapping[ClientId, Message]
    ) -> Iterator[Message | Refusal | Absent]:
        """Yield the clients' replies until the timeout; see :class:`lightning_fed.deploy.Transport`."""
        header = next(iter(tasks.values())).header
        self._group = f"{header['phase']} {header['round']}"
        self._sent = {key: sent for key, sent in self._sent.items() if not sent.clients}  # drop earlier phases' tasks
        missing, end = {**registrations, **tasks}, time.monotonic() + self._timeout
        while missing.keys() & tasks.keys():
            yield Absent(self._query_nodes(), f"no node was connected for {self._absent_after:g} s")
            self._send(missing)
            # registrations first: the fit reads nothing after the last reply to a task
            found = sorted(self._pull(), key=lambda come: come.client in tasks)
            for come in found:
                missing.pop(come.client, None)
                yield come
            if time.monotonic() > end:
                for client in tasks.keys() & missing.keys():
                    what = "no reply arrived" if client in self._node_of else "no node was connected"
                    yield Refusal(client, f"{what} for {self._timeout:g} s")
                return
            if not found:
                time.sleep(_PAUSE)

    def _query_nodes(self) -> list[ClientId]:
        """Query new nodes, and nodes long at a task, for their clients; return the clients long without a node."""
        keys, now = {node.node_id: node.public_key for node in self._grid.get_nodes()}, time.monotonic()
        self._sent = {key: sent for key, sent in self._sent.items() if sent.node in keys}
        self._assign(keys)
        long = {sent.node for sent in self._sent.values() if sent.clients and now - sent.at > self._ask_again}
        for node in (keys.keys() - self._named.keys()) | long:
            asked = [sent.at for sent in self._sent.values() if sent.node == node and not sent.clients]
            wait = self._ask_again * 2 ** len(asked)  # queries may be lost, too; back off, since a node may be busy
            if self._not_before.get(node, now) <= now and (not asked or now - max(asked) > wait):
                self._push(node, RecordDict(), MessageType.QUERY, ())
        without = [client for client in self._by_text.values() if client not in self._node_of]
        self._without_since = {client: self._without_since.get(client, now) for client in without}
        may_come = keys.keys() - self._named.keys() - self._said.keys()  # nodes that have not answered yet
        limit = math.inf if may_come else self._absent_after
        return [client for client, since in self._without_since.items() if now - since > limit]

    def _assign(self, keys: Mapping[int, bytes]) -> None:
        """Assign each client to the first node that names it and may have it, until that node is gone."""
        self._named = {node: clients for node, clients in self._named.items() if node in keys}
        held = self._node_of
        self._node_of = {client: node for client, node in held.items() if client in self._named.get(node, ())}
        for node, clients in self._named.items():
            new = []
            for client in clients:
                file, key = self._owners.get(client, ("", keys[node]))
                if key != keys[node]:
                    why = f"whose owner has the key {file}, and the node has another key"
                elif (owner := self._node_of.setdefault(client, node)) != node:
                    why = f"which belongs to node {owner} for as long as that one is there"
                else:
                    new += [client] if held.get(client) != node else []
                    continue
                if (claim := (node, client, why)) not in self._refused:
                    self._refused.add(claim)
                    _log.warning("Node %d is not asked for client %r, %s.", *claim)
            if new:
                _log.info("Node %d has the clients %s.", node, new)

    def _send(self, tasks: Mapping[ClientId, Message]) -> None:
        busy = {sent.node for sent in self._sent.values() if sent.clients}
        by_node: dict[int, dict[ClientId, Message]] = {}
        for client, task in tasks.items():
            node = self._node_of.get(client)
            if node is not None and node not in busy and self._not_before.get(node, 0.0) <= time.monotonic():
                by_node.setdefault(node, {})[client] = task
        for node, own in by_node.items():
            clients, contents = contents_of(own)
            self._push(node, packed(contents), MessageType.TRAIN, clients)

    def _push(self, node: int, content: RecordDict, kind: str, clients: tuple[ClientId, ...]) -> None:
        message = FlowerMessage(content, node, kind, ttl=self._timeout, group_id=self._group)
        for key in self._grid.push_messages([message]):
            if key:  # otherwise the SuperLink has refused it, such as for a node that is gone
                self._sent[key] = _Sent(node, clients, time.monotonic())

    def _pull(self) -> Iterator[Message | Refusal]:
        if not self._sent:
            return
        try:
            pulled = list(self._grid.pull_messages(list(self._sent)))
        except (httpx.HTTPError, OSError, RuntimeError):  # a connection error, after Flower's own retries
            raise
        except Exception as error:  # a node may send anything; the message is lost, so its node is queried
            _log.warning("Flower cannot read a message of a node: %s", printable(f"{type(error).__name__}: {error}"))
            return
        come = [message for message in pulled if message.metadata.reply_to_message_id in self._sent]
        answers = [(self._sent.pop(message.metadata.reply_to_message_id), message) for message in come]
        for sent, message in sorted(answers, key=lambda answer: not answer[0].clients):  # tasks before queries
            if message.has_error():
                self._note_error(sent.node, str(message.error.reason))
            elif sent.clients:
                self._said.pop(sent.node, None)
                yield from replies_in(sent.clients, unpacked(message.content))
            else:
                self._note_clients(sent, clients_in(message.content))

    def _note_clients(self, asked: _Sent, names: Sequence[str]) -> None:
        unexpected = [name for name in names if name not in self._by_text]
        if unexpected or not names:
            has = f"client {', '.join(unexpected)}" if unexpected else "no client"
            self._note_error(asked.node, f"it has {has}, and the run's client_ids are {', '.join(self._by_text)}.")
        told = {*names}
        self._named[asked.node] = [client for name, client in self._by_text.items() if name in told]
        earlier = [key for key, sent in self._sent.items() if sent.node == asked.node and sent.at < asked.at]
        for key in earlier:
            if clients := self._sent.pop(key).clients:
                _log.warning("Node %d has lost its task for %s; it is asked again.", asked.node, clients)

    def _note_error(self, node: int, reason: str) -> None:
        self._not_before[node] = time.monotonic() + _BACK_OFF
        if self._said.get(node) != (reason := printable(reason)):
            self._said[node] = reason
            _log.warning("Node %d: %s", node, reason)


def _key_in(client: ClientId, file: str | PathLike[str]) -> bytes:
    """Return the public key in a file of ``ssh-keygen``, in the format of Flower's registered keys."""
    try:
        with open(file, "rb") as content:
            key = load_ssh_public_key(content.read())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise FederatedError(
            f"owners[{client!r}] = {str(file)!r} is not the file of a public key: {error}. Give the one that `flwr"
            " supernode register` was given."
        ) from error
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
