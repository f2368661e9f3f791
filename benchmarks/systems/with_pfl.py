"""pfl-research's FedAvg on its SimulatedBackend, in one process."""

from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from systems.measure import Outcome, Settings, Stopwatch
from systems.networks import build, logits_of
from systems.problem import Problem

__all__ = ["run"]

_NEVER = 10**9


def run(problem: Problem, settings: Settings, stopwatch: Stopwatch) -> Outcome:
    """Train through pfl's own loop."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    workload = problem.workload
    module = _Module(build(problem))
    backend = SimulatedBackend(
        training_data=_data(problem, settings), val_data=None, postprocessors=[WeightByDatapoints()]
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=settings.total, evaluation_frequency=_NEVER,
            train_cohort_size=workload.cohort, val_cohort_size=0,
        ),
        backend,
        PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0)),
        NNTrainHyperParams(
            local_num_epochs=workload.epochs, local_learning_rate=workload.lr, local_batch_size=workload.batch
        ),
        callbacks=[_Ticks(stopwatch)],
        send_metrics_to_platform=False,
    )  # fmt: skip
    config = {"version": f"{version('pfl')}, torch {torch.__version__}", "processes": 1, "threads": 1}
    return Outcome(logits_of(module.net), config)


def _data(problem: Problem, settings: Settings) -> FederatedDataset:
    inputs, targets = torch.from_numpy(problem.x), torch.from_numpy(problem.y)

    def client(name: int) -> Dataset:
        first, end = problem.rows(name)
        order = torch.randperm(end - first) + first  # pfl does not shuffle; this is one order per client and round
        return Dataset((inputs[order], targets[order]), user_id=str(name))

    # pfl asks for one cohort more than it trains
    names = iter([c for r in range(settings.total + 1) for c in problem.cohort(r)])
    return FederatedDataset(client, lambda: next(names))


class _Module(nn.Module):
    """A network with the methods that pfl calls."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {}


class _Ticks(TrainingProcessCallback):
    """Tick before the first round and after every one."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch

    def on_train_begin(self, *, model: Any) -> Metrics:
        self.stopwatch.tick()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.stopwatch.tick()
        return False, Metrics()
