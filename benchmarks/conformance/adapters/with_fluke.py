"""fluke: its algorithms' own clients and servers under CentralizedFL, in this process."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

# fluke imports torchvision for its data sets alone, and some builds of it do not import beside a CPU build of PyTorch
# unless the operators that they fail to load are at least declared.
_OPERATORS = torch.library.Library("torchvision", "DEF")
with contextlib.suppress(RuntimeError):
    for _name in ("nms", "qnms"):
        _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from fluke import FlukeENV  # noqa: E402
from fluke.algorithms.fedavg import FedAVG  # noqa: E402
from fluke.algorithms.feddyn import FedDyn  # noqa: E402
from fluke.algorithms.fednova import FedNova  # noqa: E402
from fluke.algorithms.fedopt import FedOpt  # noqa: E402
from fluke.algorithms.fedprox import FedProx  # noqa: E402
from fluke.algorithms.scaffold import SCAFFOLD  # noqa: E402
from fluke.config import OptimizerConfigurator  # noqa: E402
from fluke.data import FastDataLoader  # noqa: E402

from conformance.adapter import Adapter  # noqa: E402
from conformance.adapters.torch_client import network, values_of  # noqa: E402
from conformance.cases import Case, Values  # noqa: E402

__all__ = ["adapter"]

_CLASSES = {
    "fedavg": FedAVG,
    "batchnorm": FedAVG,
    "fedprox": FedProx,
    "scaffold": SCAFFOLD,
    "fedopt": FedOpt,
    "feddyn": FedDyn,
    "fednova": FedNova,
}


def adapter() -> "Fluke":
    """Return the adapter."""
    return Fluke()


class Fluke(Adapter):
    """FedAvg, FedProx, SCAFFOLD option ii, FedOpt, FedDyn and FedNova, in float64."""

    packages = ("fluke-fl", "torch")

    def offers(self, case: Case) -> Mapping[str, str]:
        """Return the class; servers take ``weighted``, whether clients count by their examples."""
        cls = _CLASSES.get(case.method)
        if cls is None or case.options.get("option") == "i":
            return {}
        name = f"{cls.__module__.removeprefix('fluke.')}.{cls.__name__}"
        if case.method in ("scaffold", "feddyn") and case.id != "scaffold, equal clients":
            return {"": f"{name}; weighted=True, its default", "weighted=False": f"{name}; weighted=False"}
        if "client_momentum" in case.options:
            return {"": name, "persistency=False": f"{name}; clients with persistency=False"}
        return {"": f"{name}; weighted=True"}

    def run(self, case: Case, way: str) -> list[Values]:
        """Run the algorithm."""
        return _Run(case, way).play(range(case.rounds))

    def resume(self, case: Case, way: str, folder: Path) -> list[Values] | None:
        """Save the federation, and load it into a new one."""
        first = _Run(case, way)
        first.play(range(case.restart))
        saved = first.federation.save(str(folder / "federation"), round=case.restart)
        second = _Run(case, way)
        second.federation.load(saved, round=case.restart)
        return second.play(range(case.restart, case.rounds))


class _Run:
    def __init__(self, case: Case, way: str) -> None:
        environment = FlukeENV()
        environment.set_seed(0)
        environment.set_device("cpu")
        torch.set_default_dtype(torch.float64)  # of the zeros that servers and clients make
        self.case, options = case, case.options
        cls = _CLASSES[case.method]
        optimizer = {"name": torch.optim.SGD, "lr": options["client_lr"]}
        if "client_momentum" in options:
            optimizer["momentum"] = options["client_momentum"]
        configured = OptimizerConfigurator(
            optimizer_cfg=optimizer,
            scheduler_cfg={"name": torch.optim.lr_scheduler.StepLR, "step_size": 10**6, "gamma": 1.0},
        )
        own = {"fedprox": {"mu": options.get("mu")}, "feddyn": {"alpha": options.get("alpha"), "clipping": 0}}
        made = object.__new__(cls)
        clients = [
            made.get_client_class()(
                index=i, train_set=self._loader(i), test_set=None, optimizer_cfg=configured,
                loss_fn=torch.nn.CrossEntropyLoss(), local_epochs=options["local_epochs"],
                persistency=way != "persistency=False", **own.get(case.method, {}),
            )
            for i in range(len(case.problem.sizes))
        ]  # fmt: skip
        more: dict[str, Any] = {}
        if case.method == "fedopt":
            names = {"lr": "server_lr", "beta1": "beta1", "beta2": "beta2", "tau": "tau"}
            more = {"mode": options["server"], **{theirs: options[ours] for theirs, ours in names.items()}}
        if case.method == "feddyn":
            more = {"alpha": options["alpha"]}
        server = made.get_server_class()(
            model=network(case.problem), test_set=None, clients=clients, weighted=way != "weighted=False", **more
        )
        self.federation = cls(len(clients), None, {}, clients=clients, server=server)

    def _loader(self, i: int) -> FastDataLoader:
        problem = self.case.problem
        classes = len(problem.start[problem.trained[-1]])
        return FastDataLoader(
            torch.tensor(problem.x[i]), torch.tensor(problem.y[i]), num_labels=classes, batch_size=problem.batch_size,
            shuffle=False, skip_singleton=False,
        )  # fmt: skip

    def play(self, rounds: range) -> list[Values]:
        """Return the server's model after each round; FedDyn's is the one that clients start from."""
        server, found = self.federation.server, []
        cohorts = iter([self.case.cohorts[r] for r in rounds])

        def eligible(share: float) -> Sequence[Any]:
            return [self.federation.clients[i] for i in next(cohorts)]

        server.get_eligible_clients = eligible
        plain = server.aggregate

        def aggregate(*args: Any, **kwargs: Any) -> None:
            plain(*args, **kwargs)
            model = server.cld_mdl if self.case.method == "feddyn" else server.model
            found.append(values_of(model.state_dict()))

        server.aggregate = aggregate
        self.federation.run(len(rounds), 1.0)
        return found
