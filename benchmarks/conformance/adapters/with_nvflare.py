"""NVFlare: its controllers with the training script's client, and its simulator.

``run`` calls FedAvg's and SCAFFOLD's controllers in this process, with the transport, the events and the sampling of
clients replaced: what a client answers is handed to the controller at once. FedOpt and restarts run as jobs in the
simulator; the rounds before a restart must be those of ``run``.
"""

import contextlib
import copy
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_common.workflows.scaffold import Scaffold
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.app_opt.pt.recipes.fedopt import FedOptRecipe
from nvflare.app_opt.pt.recipes.fedprox import FedProxRecipe
from nvflare.app_opt.pt.recipes.scaffold import ScaffoldRecipe
from nvflare.recipe import SimEnv

from conformance.adapter import Adapter
from conformance.adapters.nvflare_client import CaseNetwork, Site
from conformance.adapters.torch_client import network, values_of
from conformance.cases import Case, Values

__all__ = ["adapter"]

_ROOT = str(Path(__file__).parents[2])
_SCRIPT = str(Path(__file__).with_name("nvflare_client.py"))
_SAID = {
    "": "clients report their local steps",
    "examples": "clients report their examples as NUM_STEPS_CURRENT_ROUND",
    "without": "clients report no NUM_STEPS_CURRENT_ROUND",
}


def adapter() -> "NVFlare":
    """Return the adapter."""
    return NVFlare()


class NVFlare(Adapter):
    """FedAvg, FedProx, SCAFFOLD option ii, and FedOpt with the server optimizers of PyTorch; in float64."""

    packages = ("nvflare", "torch")

    def offers(self, case: Case) -> Mapping[str, str]:
        """Return what computes the method, and what clients report: the server weighs them by that."""
        if case.method == "scaffold":
            ways = ("", "without") if case.options["option"] == "ii" else ()
            return {way: f"workflows.scaffold.Scaffold, PTScaffoldHelper; {_SAID[way]}" for way in ways}
        if case.method == "fedopt":
            name = {"adam": "Adam", "adagrad": "Adagrad"}.get(case.options["server"])
            return {"examples": f"FedOptRecipe with torch.optim.{name}; {_SAID['examples']}"} if name else {}
        loss = ", PTFedProxLoss" if case.method == "fedprox" else ""
        ways = ("", "examples") if case.method in ("fedavg", "fedprox", "batchnorm") else ()
        return {way: f"workflows.fedavg.FedAvg{loss}; {_SAID[way]}" for way in ways}

    def run(self, case: Case, way: str) -> list[Values]:
        """Run a controller, or a job for FedOpt."""
        torch.set_num_threads(1)
        if case.method != "fedopt":
            return _in_process(case, way)
        with tempfile.TemporaryDirectory() as folder:
            return _job(case, way, Path(folder), range(case.rounds))[0]

    def resume(self, case: Case, way: str, folder: Path) -> list[Values] | None:
        """Run a job of some rounds, and another one from the weights that it saved."""
        if case.is_partial:
            return None  # a job draws its own cohorts
        first, saved = _job(case, way, folder / "first", range(case.restart))
        if case.method != "fedopt":
            for values, others in zip(first, self.run(case, way), strict=False):
                for name, value in values.items():
                    np.testing.assert_allclose(value, others[name], atol=1e-6)
        # With PyTorch 2.6 and newer the saved file itself is not accepted as `initial_ckpt`, its weights are
        torch.save(torch.load(saved, weights_only=False)["model"], folder / "weights.pt")
        return _job(case, way, folder / "second", range(case.restart, case.rounds), str(folder / "weights.pt"))[0]


class _InProcess:
    """What stands between a controller and its clients: nothing but function calls."""

    def attach(self, case: Case, way: str) -> list[Values]:
        """Set the controller up, run it, and return the models that it saves."""
        self.case, self.found = case, []
        self.sites = {f"site-{i + 1}": Site(case, i, way) for i in range(len(case.problem.sizes))}
        self.fl_ctx, self.abort_signal, self.engine = FLContext(), Signal(), None
        if isinstance(self, Scaffold):
            self.initialize(self.fl_ctx)
        self.run()
        return self.found

    def load_model(self) -> FLModel:
        params = {name: value.numpy() for name, value in network(self.case.problem).state_dict().items()}
        return FLModel(params_type=ParamsType.FULL, params=params)

    def save_model(self, model: FLModel) -> None:
        self.found.append(values_of(model.params))

    def sample_clients(self, num_clients: int | None = None) -> list[str]:
        return [f"site-{i + 1}" for i in self.case.cohorts[self.current_round]]

    def send_model_and_wait(self, targets: list[str], data: FLModel, **kwargs: Any) -> list[FLModel]:
        return [self._answer(target, data) for target in targets]

    def send_model(self, targets: list[str], data: FLModel, callback: Callable[[FLModel], Any], **kwargs: Any) -> None:
        for target in targets:
            callback(self._answer(target, data))

    def _answer(self, target: str, data: FLModel) -> FLModel:
        reply = self.sites[target].answer(copy.deepcopy(data))
        reply.params = {name: value.numpy() for name, value in reply.params.items()}
        reply.current_round = self.current_round
        reply.meta["client_name"] = target
        return reply

    def get_num_standing_tasks(self) -> int:
        return 0

    def _ignore(self, *args: Any, **kwargs: Any) -> None:
        """Events and logs."""

    event = fire_event_with_data = info = debug = warning = _set_ctx_prop_preserving_attrs = _ignore


class _LocalFedAvg(_InProcess, FedAvg):
    pass


class _LocalScaffold(_InProcess, Scaffold):
    pass


def _in_process(case: Case, way: str) -> list[Values]:
    options = {"num_clients": len(case.problem.sizes), "num_rounds": case.rounds}
    if case.method == "fedprox":
        options["fedprox_mu"] = case.options["mu"]
    return (_LocalScaffold if case.method == "scaffold" else _LocalFedAvg)(**options).attach(case, way)


def _job(case: Case, way: str, folder: Path, rounds: range, start: str | None = None) -> tuple[list[Values], Path]:
    """Run a recipe. Its rounds are the models that clients receive, and the one that the server saves at the end."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
    notes, count = folder / "notes", len(case.problem.sizes)
    notes.mkdir(parents=True)
    common: dict[str, Any] = {
        "name": "job", "model": CaseNetwork(case.id), "initial_ckpt": start, "min_clients": count,
        "num_rounds": len(rounds), "train_script": _SCRIPT,
        "train_args": f"{case.id.replace(' ', '+')} {way or 'steps'} {notes}",
    }  # fmt: skip
    with contextlib.redirect_stdout(sys.stderr):
        workspace = folder / "workspace"
        _recipe(case, common).execute(SimEnv(num_clients=count, num_threads=count, workspace_root=str(workspace)))
    (saved,) = workspace.rglob("FL_global_model.pt")
    last = torch.load(saved, weights_only=False)["model"]
    received = [next(iter(sorted(notes.glob(f"*-{r}.pt")))) for r in range(1, len(rounds))]
    return [values_of(torch.load(file, weights_only=False)) for file in received] + [values_of(last)], saved


def _recipe(case: Case, common: dict[str, Any]) -> Any:
    options = case.options
    if case.method == "scaffold":
        return ScaffoldRecipe(**common)
    if case.method == "fedprox":
        return FedProxRecipe(**common, fedprox_mu=options["mu"])
    if case.method != "fedopt":
        return FedAvgRecipe(**common)
    if options["server"] == "adam":
        betas = [options["beta1"], options["beta2"]]
        server = {
            "path": "torch.optim.Adam",
            "args": {"lr": options["server_lr"], "betas": betas, "eps": options["tau"]},
        }
    else:
        more = {"initial_accumulator_value": options["tau"] ** 2, "eps": options["tau"]}
        server = {"path": "torch.optim.Adagrad", "args": {"lr": options["server_lr"], **more}}
    return FedOptRecipe(**common, optimizer_args=server, device="cpu")
