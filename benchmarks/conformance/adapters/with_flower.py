"""Flower: its strategies of the message API and a ClientApp with a plain PyTorch loop, on a grid within this process.

The grid replaces the transport alone: ``Strategy.start`` drives it, and it hands each message to the ClientApp.
"""

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import Grid  # noqa: E402
from flwr.serverapp import strategy as strategies  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from conformance.adapter import Adapter  # noqa: E402
from conformance.adapters.torch_client import network, train, values_of  # noqa: E402
from conformance.cases import Case, Values  # noqa: E402

__all__ = ["adapter"]

_SERVERS = {"adam": strategies.FedAdam, "yogi": strategies.FedYogi, "adagrad": strategies.FedAdagrad}


def adapter() -> "Flower":
    """Return the adapter."""
    return Flower()


class Flower(Adapter):
    """FedAvg, FedProx and the FedOpt strategies, in float64."""

    packages = ("flwr", "torch")

    def offers(self, case: Case) -> Mapping[str, str]:
        """Return the strategy."""
        if case.method == "fedprox":
            return {
                "": "strategy.FedProx; the client's loss as its docstring prints it",
                "squared": "strategy.FedProx; a client's loss with the squared norm",
            }
        if case.method == "fedopt":
            return {"": f"strategy.{_SERVERS[case.options['server']].__name__}"}
        return {"": "strategy.FedAvg"} if case.method in ("fedavg", "batchnorm") else {}

    def run(self, case: Case, way: str) -> list[Values]:
        """Run a strategy over all rounds."""
        start = ArrayRecord(network(case.problem).state_dict())
        return _run(case, way, start, range(case.rounds))

    def resume(self, case: Case, way: str, folder: Path) -> list[Values] | None:
        """Save the arrays of the last round, and start a new strategy from them."""
        first = self.run(case, way)[case.restart - 1]
        torch.save({name: torch.tensor(value) for name, value in first.items()}, folder / "final_model.pt")
        start = ArrayRecord(torch.load(folder / "final_model.pt"))
        return _run(case, way, start, range(case.restart, case.rounds))


def _run(case: Case, way: str, start: ArrayRecord, rounds: range) -> list[Values]:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1  # which Flower's own processes set
    grid, found = _Grid(case, way, rounds), []
    options = {"fraction_evaluate": 0.0, "min_train_nodes": 1, "min_available_nodes": 1}
    strategy: Any
    if case.method == "fedprox":
        strategy = strategies.FedProx(proximal_mu=case.options["mu"], **options)
    elif case.method == "fedopt":
        names = {"eta": "server_lr", "tau": "tau"}
        if case.options["server"] != "adagrad":
            names |= {"beta_1": "beta1", "beta_2": "beta2"}
        more = {theirs: case.options[ours] for theirs, ours in names.items()}
        strategy = _SERVERS[case.options["server"]](eta_l=case.options["client_lr"], **more, **options)
    else:
        strategy = strategies.FedAvg(**options)

    def evaluate(server_round: int, arrays: ArrayRecord) -> None:
        if server_round:
            found.append({name: np.array(array.numpy()) for name, array in arrays.items()})

    strategy.start(grid=grid, initial_arrays=start, num_rounds=len(rounds), evaluate_fn=evaluate)
    return found


class _Grid(Grid):
    """Hands messages to the ClientApp; the nodes that it shows are the cohort of the round."""

    def __init__(self, case: Case, way: str, rounds: range) -> None:
        self.case, self.rounds, self.played = case, rounds, 0
        self.app = _client_app(case, way)
        self.contexts = {
            i: Context(run_id=1, node_id=i + 1, node_config={}, state=RecordDict(), run_config={})
            for i in range(len(case.problem.sizes))
        }

    def set_run(self, run: Any) -> None:
        """Nothing to do: there is one run."""

    @property
    def run(self) -> Any:
        """Nothing: there is one run."""
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Return a message."""
        return Message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        """Return the clients of the round; a node's id is above 0."""
        return [i + 1 for i in self.case.cohorts[self.rounds[self.played]]]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Not used by strategies."""
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Not used by strategies."""
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Let the ClientApp answer."""
        replies = []
        for message in sorted(messages, key=lambda message: message.metadata.dst_node_id):
            node = message.metadata.dst_node_id
            replies.append(self.app(message, self.contexts[node - 1]))
        self.played += bool(replies) and self.played + 1 < len(self.rounds)
        return replies


def _client_app(case: Case, way: str) -> ClientApp:
    app = ClientApp()

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        client = context.node_id - 1
        net = network(case.problem)
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        anchor = [p.detach().clone() for p in net.parameters()]

        def penalty() -> Any:
            if case.method != "fedprox":
                return 0.0
            mu = message.content["config"]["proximal-mu"]
            pairs = zip(net.parameters(), anchor, strict=True)
            if way == "squared":
                return mu / 2 * sum((p - a).square().sum() for p, a in pairs)
            return mu / 2 * sum((p - a).norm(2) for p, a in pairs)

        train(net, case, client, penalty)
        metrics = MetricRecord({"num-examples": case.problem.sizes[client]})
        content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    return app
