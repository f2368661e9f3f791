"""Flower's grid in one process. Nodes answer when the server pulls replies, and can lose messages."""

import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from lightning_fed.deploy import RemoteClients, saved_run
from lightning_fed.deploy.flower.server import FlowerTransport
from lightning_fed.deploy.site_process import SiteWorker
from tests.deploy.site_models import model
from tests.deploy.wire import make_trainer, parameters, simulated


class NodesHere(Grid):
    """Nodes in this process.

    Args:
        app: The ClientApp of the nodes.
        nodes: Their configurations by id.
    """

    def __init__(self, app: ClientApp, nodes: Mapping[int, dict[str, Any]]) -> None:
        self.app, self.nodes = app, dict(nodes)
        self.waiting: dict[str, Message] = {}
        self.to_lose: list[str] = []  # kinds of messages to lose, once per entry
        self.to_fail: list[str] = []  # kinds of messages to answer with an error, once per entry
        self.asked: list[tuple[int, str]] = []

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        keys = []
        for message in messages:
            key = message.object_id
            message.metadata.__dict__["_message_id"] = key
            self.asked.append((message.metadata.dst_node_id, message.metadata.message_type))
            self.waiting[key] = message
            keys.append(key)
        return keys

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [reply for key in message_ids for reply in self._replies(key)]

    def _replies(self, key: str) -> list[Message]:
        message = self.waiting.pop(key, None)
        node = None if message is None else message.metadata.dst_node_id
        if message is None or node not in self.nodes:
            return []
        kind = message.metadata.message_type
        if kind in self.to_lose:
            self.to_lose.remove(kind)
            return []
        if kind in self.to_fail:
            self.to_fail.remove(kind)
            return [Message(Error(code=0, reason="crashed"), reply_to=message)]
        context = Context(
            run_id=1, node_id=node, node_config=self.nodes[node], state=RecordDict(), run_config={}, series_id=1
        )
        try:
            return [self.app(message, context)]
        except Exception as error:  # Flower also replies with an error
            return [Message(Error(code=2, reason=str(error)), reply_to=message)]


class SitesHere:
    """Stand-ins for resident processes that answer in this process."""

    open: dict[str, SiteWorker] = {}
    ends_with: set[int] = set()

    def __init__(self, makers: Any, node_config: Any) -> None:
        spec = {"makers": makers, "node_config": dict(node_config), "parent": 0, "paths": []}
        key = json.dumps(spec, sort_keys=True)
        self.resident = self.open.setdefault(key, SiteWorker(spec))

    def answer(self, tasks: dict[str, bytes]) -> dict[str, bytes]:
        return {key: self.resident.answer(task) for key, task in tasks.items()}

    @classmethod
    def end(cls) -> None:
        for resident in cls.open.values():
            resident._leave()
        cls.open = {}


def run(
    grid: NodesHere,
    checkpoint: Path,
    timeout: float = 600.0,
    ask_again: float = 0.0,
    owners: Mapping[Any, Path] | None = None,
    absent_after: float = 300.0,
    **trainer: Any,
) -> Any:
    transport = FlowerTransport(grid, range(4), timeout, ask_again, owners, absent_after)
    module, clients = model(), RemoteClients(transport, range(4))
    saved_run.fit(make_trainer("Scaffold ii", **trainer), module, clients, checkpoint)
    return module


def expected(**options: Any) -> torch.Tensor:
    return parameters(simulated(partial(make_trainer, "Scaffold ii", **options)).lightning_module)
