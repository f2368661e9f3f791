"""What adapters of PyTorch frameworks share: the network of a problem, and the training loop that users write."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.cases import Case, Problem, Values

__all__ = ["network", "train", "values_of"]


def network(problem: Problem) -> nn.Module:
    """Return the model of a problem at its start, in float64."""
    classes, features = next(value.shape for value in problem.start.values() if value.ndim == 2)
    net: nn.Module = nn.Linear(features, classes)
    if problem.kind == "batchnorm":
        net = nn.Sequential()
        net.add_module("norm", nn.BatchNorm1d(features))
        net.add_module("linear", nn.Linear(features, classes))
    net.load_state_dict({name: torch.tensor(value) for name, value in problem.start.items()})
    return net.double()


def train(
    net: nn.Module,
    case: Case,
    client: int,
    penalty: Callable[[], Any] = lambda: 0.0,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Run the local epochs of a client with SGD.

    Args:
        net: The network, with the parameters to start from.
        case: The case.
        client: The client.
        penalty: What is added to the loss of each batch.
        after_step: Called after each step.
    """
    options = case.options
    optimizer = torch.optim.SGD(net.parameters(), lr=options["client_lr"], momentum=options.get("client_momentum", 0.0))
    dtype = next(net.parameters()).dtype
    x, y = torch.tensor(case.problem.x[client], dtype=dtype), torch.tensor(case.problem.y[client])
    net.train()
    for rows in case.batches(client):
        optimizer.zero_grad()
        loss: Tensor = F.cross_entropy(net(x[rows]), y[rows]) + penalty()
        loss.backward()
        optimizer.step()
        after_step()


def values_of(state_dict: Mapping[str, Any]) -> Values:
    """Return a state dict as arrays that do not change any more."""
    return {name: torch.as_tensor(value).detach().cpu().numpy().copy() for name, value in state_dict.items()}
