"""pfl-research: its algorithms on its SimulatedBackend, in one process."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.algorithm.fedprox import FedProx, FedProxParams
from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
from pfl.callback.base import TrainingProcessCallback
from pfl.callback.restore_training import RestoreTrainingCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.user_state import DiskUserStateStorage, InMemoryUserStateStorage
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from conformance.adapter import Adapter
from conformance.adapters.torch_client import network, values_of
from conformance.cases import Case, Values

__all__ = ["adapter"]


def adapter() -> "PFL":
    """Return the adapter."""
    return PFL()


class PFL(Adapter):
    """FedAvg, FedProx, SCAFFOLD, and server optimizers of PyTorch. Differences of models are float32 in pfl."""

    packages = ("pfl", "torch")

    def offers(self, case: Case) -> Mapping[str, str]:
        """Return the algorithm, and how users are weighed."""
        weighed = "WeightByDatapoints"
        if case.method == "scaffold":
            return {"": "algorithm.scaffold.SCAFFOLD, users weighed equally"}
        if case.method == "fedprox":
            return {"": f"algorithm.fedprox.FedProx; {weighed}"}
        name = {"adam": "Adam", "adagrad": "Adagrad"}.get(case.options.get("server", ""))
        if case.method == "fedopt":
            return {"": f"FederatedAveraging, central torch.optim.{name}; {weighed}"} if name else {}
        return {"": f"algorithm.FederatedAveraging; {weighed}"} if case.method in ("fedavg", "batchnorm") else {}

    def run(self, case: Case, way: str) -> list[Values]:
        """Run the algorithm."""
        return _play(case, None, range(case.rounds))

    def resume(self, case: Case, way: str, folder: Path) -> list[Values] | None:
        """Restore model and algorithm by RestoreTrainingCallback; users' states are on disk."""
        with contextlib.suppress(_InterruptedError):
            _play(case, folder, range(case.restart))
        return _play(case, folder, range(case.restart, case.rounds))


class _Module(nn.Module):
    """The network of a case with the methods that pfl calls."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.net = network(case.problem)

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return F.cross_entropy(self.net(torch.as_tensor(x).double()), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {}


class _Recorder(TrainingProcessCallback):
    def __init__(self, module: _Module) -> None:
        self.module, self.rounds = module, []

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.rounds.append(values_of(self.module.net.state_dict()))
        return False, Metrics()


class _InterruptedError(Exception):
    """Ends a run when the clients of the next round are asked for."""


def _play(case: Case, folder: Path | None, rounds: range) -> list[Values]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    options, module = case.options, _Module(case)
    common: dict[str, Any] = {
        "central_num_iterations": case.rounds, "evaluation_frequency": 10**9,
        "train_cohort_size": len(case.cohorts[0]), "val_cohort_size": 0,
    }  # fmt: skip
    algorithm: Any = FederatedAveraging()
    params: Any = NNAlgorithmParams(**common)
    if case.method == "fedprox":
        algorithm, params = FedProx(), FedProxParams(**common, mu=options["mu"])
    if case.method == "scaffold":
        states = InMemoryUserStateStorage()
        if folder is not None:
            (folder / "users").mkdir(exist_ok=True)
            states = DiskUserStateStorage(str(folder / "users"))
        algorithm = SCAFFOLD()
        params = SCAFFOLDParams(
            **common, population=len(case.problem.sizes), use_gradient_as_control_variate=options["option"] == "i",
            user_state_storage=states,
        )  # fmt: skip
    postprocessors = [] if case.method == "scaffold" else [WeightByDatapoints()]
    model = PyTorchModel(module, _local_optimizer(case), _central_optimizer(case, module))
    recorder = _Recorder(module)
    callbacks: list[Any] = [recorder]
    if folder is not None:
        checkpoints = folder / "checkpoints"
        checkpoints.mkdir(exist_ok=True)
        callbacks.append(RestoreTrainingCallback([model, algorithm], str(checkpoints)))
    algorithm.run(
        params,
        SimulatedBackend(training_data=_data(case, rounds), val_data=None, postprocessors=postprocessors),
        model,
        NNTrainHyperParams(
            local_num_epochs=options["local_epochs"], local_learning_rate=options["client_lr"],
            local_batch_size=case.problem.batch_size,
        ),
        callbacks=callbacks,
        send_metrics_to_platform=False,
    )  # fmt: skip
    return recorder.rounds


def _local_optimizer(case: Case) -> Any:
    momentum = case.options.get("client_momentum", 0.0)

    def create(parameters: Iterator[Tensor], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr, momentum=momentum)

    return create


def _central_optimizer(case: Case, module: _Module) -> torch.optim.Optimizer:
    options, parameters = case.options, module.parameters()
    if options.get("server") == "adam":
        betas = options["beta1"], options["beta2"]
        return torch.optim.Adam(parameters, lr=options["server_lr"], betas=betas, eps=options["tau"])
    if options.get("server") == "adagrad":
        first = options["tau"] ** 2
        return torch.optim.Adagrad(
            parameters, lr=options["server_lr"], eps=options["tau"], initial_accumulator_value=first
        )
    return torch.optim.SGD(parameters, lr=1.0)


def _data(case: Case, rounds: range) -> FederatedDataset:
    def client(name: int) -> Dataset:
        if name < 0:
            raise _InterruptedError
        raw = (torch.tensor(case.problem.x[name]), torch.tensor(case.problem.y[name]))
        return Dataset(raw, user_id=str(name))

    # pfl asks for one cohort more than it trains
    after = case.cohorts[0] if rounds[-1] == case.rounds - 1 else [-1] * len(case.cohorts[0])
    names = iter([c for r in rounds for c in case.cohorts[r]] + after)
    return FederatedDataset(client, lambda: next(names))
