"""fluke's FedAvg, by its own Client, Server and CentralizedFL, in one process."""

import contextlib
from importlib.metadata import version
from typing import Any

import torch

from systems.measure import Outcome, Settings, Stopwatch
from systems.networks import build, logits_of
from systems.problem import Problem

__all__ = ["run"]

# fluke imports torchvision for its data sets alone, and some builds of it do not import beside a CPU build of PyTorch
# unless the operators that they fail to load are at least declared.
_OPERATORS = torch.library.Library("torchvision", "DEF")
with contextlib.suppress(RuntimeError):
    for _name in ("nms", "qnms"):
        _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from fluke import FlukeENV  # noqa: E402
from fluke.algorithms import CentralizedFL  # noqa: E402
from fluke.client import Client  # noqa: E402
from fluke.config import OptimizerConfigurator  # noqa: E402
from fluke.data import FastDataLoader  # noqa: E402
from fluke.server import Server  # noqa: E402


def run(problem: Problem, settings: Settings, stopwatch: Stopwatch) -> Outcome:
    """Train through fluke's own loop."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_device("cpu")
    clients = _clients(problem)
    server = _FixedCohorts(build(problem), clients, problem, stopwatch)
    algorithm = CentralizedFL(problem.num_clients, None, {}, clients=clients, server=server)
    algorithm.run(settings.total, problem.workload.cohort / problem.num_clients)
    config = {"version": f"{version('fluke-fl')}, torch {torch.__version__}", "processes": 1, "threads": 1}
    return Outcome(logits_of(server.model), config)


def _clients(problem: Problem) -> list[Client]:
    workload = problem.workload
    inputs, targets = torch.from_numpy(problem.x), torch.from_numpy(problem.y)
    optimizer = OptimizerConfigurator(
        optimizer_cfg={"name": torch.optim.SGD, "lr": workload.lr},
        scheduler_cfg={"name": torch.optim.lr_scheduler.StepLR, "step_size": 10**6, "gamma": 1.0},
    )
    clients = []
    for name in range(problem.num_clients):
        rows = slice(*problem.rows(name))
        loader = FastDataLoader(
            inputs[rows], targets[rows], num_labels=problem.num_classes, batch_size=workload.batch, shuffle=True,
            skip_singleton=False,
        )  # fmt: skip
        loss = torch.nn.CrossEntropyLoss()
        clients.append(Client(name, loader, None, optimizer, loss, local_epochs=workload.epochs))
    return clients


class _FixedCohorts(Server):
    """A server that takes the cohorts of the problem."""

    def __init__(self, model: torch.nn.Module, clients: list[Client], problem: Problem, stopwatch: Stopwatch) -> None:
        super().__init__(model, None, clients, weighted=True)
        self.problem, self.stopwatch, self.round = problem, stopwatch, 0

    def get_eligible_clients(self, eligible_perc: float) -> list[Client]:
        if self.round == 0:
            self.stopwatch.tick()
        cohort = self.problem.cohort(self.round)
        self.round += 1
        return [self.clients[c] for c in cohort]

    def aggregate(self, *args: Any, **kwargs: Any) -> None:
        super().aggregate(*args, **kwargs)
        self.stopwatch.tick()
