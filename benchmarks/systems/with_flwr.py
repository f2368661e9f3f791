"""Flower's simulation engine (Ray) with FedAvg and a plain PyTorch client, one actor per core by default."""

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
_HERE = str(Path(__file__).parent.parent)  # from where Ray's workers import the client
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_HERE, os.environ.get("PYTHONPATH"))))

import flwr  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from flwr.common import FitIns, ndarrays_to_parameters, parameters_to_ndarrays  # noqa: E402
from flwr.server import ServerApp, ServerAppComponents, ServerConfig  # noqa: E402
from flwr.server.strategy import FedAvg  # noqa: E402
from flwr.simulation import run_simulation  # noqa: E402

from systems.flower_client import client_app  # noqa: E402
from systems.measure import Outcome, Settings, Stopwatch, usable_cores  # noqa: E402
from systems.networks import build, logits_of  # noqa: E402
from systems.problem import Problem  # noqa: E402

__all__ = ["run"]


def run(problem: Problem, settings: Settings, stopwatch: Stopwatch) -> Outcome:
    """Train through Flower's own loop."""
    cores = usable_cores()
    actors = settings.devices or cores
    net = build(problem)
    strategy = _FixedCohorts(problem, stopwatch, ndarrays_to_parameters([p.detach().numpy() for p in net.parameters()]))

    def server(context: Any) -> ServerAppComponents:
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=settings.total))

    run_simulation(
        ServerApp(server_fn=server),
        client_app(problem.name, str(problem.folder.resolve())),
        num_supernodes=problem.num_clients,
        backend_config={
            "client_resources": {"num_cpus": cores / actors, "num_gpus": 0.0},
            "init_args": {"num_cpus": cores, "include_dashboard": False},
        },
    )
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), parameters_to_ndarrays(strategy.final), strict=True):
            parameter.copy_(torch.from_numpy(np.array(value)))
    config = {"version": f"{flwr.__version__}, torch {torch.__version__}", "processes": actors, "threads": 1}
    return Outcome(logits_of(net), config)


class _FixedCohorts(FedAvg):
    """FedAvg with the cohorts of the problem. Names of nodes are random, so that the client's travels along."""

    def __init__(self, problem: Problem, stopwatch: Stopwatch, initial: Any) -> None:
        super().__init__(fraction_fit=1.0, fraction_evaluate=0.0, min_available_clients=1, initial_parameters=initial)
        self.problem, self.stopwatch, self.final = problem, stopwatch, initial
        self._nodes: list[str] = []

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> list[tuple[Any, FitIns]]:
        if server_round == 1:
            client_manager.wait_for(self.problem.num_clients)
            self._nodes = sorted(client_manager.all(), key=int)
            self.stopwatch.tick()
        nodes = client_manager.all()
        cohort = self.problem.cohort(server_round - 1)
        return [(nodes[self._nodes[c]], FitIns(parameters, {"client": c})) for c in cohort]

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        if failures:
            raise RuntimeError(f"A client failed: {failures[0]}")
        parameters, metrics = super().aggregate_fit(server_round, results, failures)
        self.final = parameters
        self.stopwatch.tick()
        return parameters, metrics
