"""The client of ``with_flwr``, in a module of its own: pickled by value, it would carry its cache in every message."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from flwr.client import ClientApp, NumPyClient

from systems.networks import build
from systems.problem import Problem

__all__ = ["client_app"]


def client_app(name: str, folder: str) -> ClientApp:
    """Return the application that runs the clients of a workload."""
    return ClientApp(client_fn=functools.partial(_client, name, folder))


def _client(name: str, folder: str, context: Any) -> Any:
    return _Client(name, folder).to_client()


@functools.cache
def _held(name: str, folder: str) -> tuple[Problem, torch.Tensor, torch.Tensor, torch.nn.Module]:
    """Return the data and the network that a worker process keeps."""
    torch.set_num_threads(1)
    problem = Problem(name, Path(folder))
    return problem, torch.from_numpy(problem.x), torch.from_numpy(problem.y), build(problem)


class _Client(NumPyClient):
    """A plain PyTorch client; the server says whose data it trains on."""

    def __init__(self, name: str, folder: str) -> None:
        self.held = _held(name, folder)

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        problem, inputs, targets, net = self.held
        params = list(net.parameters())
        with torch.no_grad():
            for parameter, value in zip(params, parameters, strict=True):
                parameter.copy_(torch.from_numpy(np.array(value)))
        optimizer = torch.optim.SGD(params, lr=problem.workload.lr)
        first, end = problem.rows(config["client"])
        for _ in range(problem.workload.epochs):
            for rows in (torch.randperm(end - first) + first).split(problem.workload.batch):
                optimizer.zero_grad()
                F.cross_entropy(net(inputs[rows]), targets[rows]).backward()
                optimizer.step()
        return [p.detach().numpy() for p in params], end - first, {}
