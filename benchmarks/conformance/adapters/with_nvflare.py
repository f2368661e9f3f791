"""NVFlare: the recipes of its jobs in its simulator, with the training script ``nvflare_client.py``.

The models of the rounds are those that clients receive, and the one that the server saves at the end.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from nvflare.app_common.workflows.scaffold import Scaffold
from nvflare.app_opt.pt.job_config.base_fed_job import BaseFedJob
from nvflare.app_opt.pt.job_config.model import PTModel
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.app_opt.pt.recipes.fedopt import FedOptRecipe
from nvflare.app_opt.pt.recipes.fedprox import FedProxRecipe
from nvflare.app_opt.pt.recipes.scaffold import ScaffoldRecipe
from nvflare.fuel.utils.constants import FrameworkType
from nvflare.job_config.script_runner import ScriptRunner
from nvflare.recipe import SimEnv

from conformance.adapter import Adapter
from conformance.adapters.torch_client import network, values_of
from conformance.cases import Case, Values

__all__ = ["CohortsOfCase", "adapter"]

_ROOT = str(Path(__file__).parents[2])
_SCRIPT = str(Path(__file__).with_name("nvflare_client.py"))
_STEPS, _EXAMPLES = "clients report their local steps", "clients report their examples as steps"


def adapter() -> "NVFlare":
    """Return the adapter."""
    return NVFlare()


class NVFlare(Adapter):
    """FedAvg, FedProx, SCAFFOLD option ii, and FedOpt with the server optimizers of PyTorch."""

    packages = ("nvflare", "torch")

    def offers(self, case: Case) -> Mapping[str, str]:
        """Return the recipe and what clients report as NUM_STEPS_CURRENT_ROUND, by which the server weighs them."""
        if case.method == "scaffold" and case.options["option"] == "ii":
            if case.is_partial:
                return {"": f"workflows.scaffold.Scaffold, its cohorts set; {_STEPS}"}
            ways = {"": f"ScaffoldRecipe; {_STEPS}", "without": "ScaffoldRecipe; clients report no number"}
            return ways if case.id == "scaffold ii" else {"": ways[""]}
        if case.is_partial:
            return {}
        if case.method == "fedavg":
            return {"": f"FedAvgRecipe; {_STEPS}", "examples": f"FedAvgRecipe; {_EXAMPLES}"}
        if case.method == "fedprox":
            return {"": f"FedProxRecipe, PTFedProxLoss; {_STEPS}", "examples": f"FedProxRecipe; {_EXAMPLES}"}
        if case.method == "fedopt" and case.options["server"] != "yogi":
            name = {"adam": "Adam", "adagrad": "Adagrad"}[case.options["server"]]
            return {"examples": f"FedOptRecipe with torch.optim.{name}; {_EXAMPLES}"}
        return {"examples": f"FedAvgRecipe; {_EXAMPLES}"} if case.method == "batchnorm" else {}

    def run(self, case: Case, way: str) -> list[Values]:
        """Run a job."""
        with tempfile.TemporaryDirectory() as folder:
            return _run(case, way, Path(folder), range(case.rounds))[0]

    def resume(self, case: Case, way: str, folder: Path) -> list[Values] | None:
        """Run a job of some rounds, and another one from the model that it saved."""
        if way and way != next(iter(self.offers(case))):
            return None
        _, saved = _run(case, way, folder / "first", range(case.restart))
        return _run(case, way, folder / "second", range(case.restart, case.rounds), str(saved))[0]


class CohortsOfCase(Scaffold):
    """The controller with the cohorts of a case in place of random ones."""

    def __init__(self, cohorts: list[list[int]], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.cohorts = cohorts

    def sample_clients(self, num_clients: int | None = None) -> list[str]:
        """Return the names of a round's clients."""
        return [f"site-{i + 1}" for i in self.cohorts[self.current_round]]


def _run(case: Case, way: str, folder: Path, rounds: range, start: str | None = None) -> tuple[list[Values], Path]:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
    notes, count = folder / "notes", len(case.problem.sizes)
    notes.mkdir(parents=True)
    arguments = f"{case.id.replace(' ', '+')} {way or 'steps'} {notes}"
    common: dict[str, Any] = {
        "name": "job", "model": network(case.problem), "initial_ckpt": start, "min_clients": count,
        "num_rounds": len(rounds), "train_script": _SCRIPT, "train_args": arguments,
    }  # fmt: skip
    environment = SimEnv(num_clients=count, num_threads=count, workspace_root=str(folder / "workspace"))
    with contextlib.redirect_stdout(sys.stderr):
        if case.method == "scaffold" and case.is_partial:
            environment.deploy(_cohorts_job(case, common, [case.cohorts[r] for r in rounds]))
        else:
            _recipe(case, common).execute(environment)
    (saved,) = (folder / "workspace").rglob("FL_global_model.pt")
    last = torch.load(saved, weights_only=False)["model"]
    received = [next(iter(sorted(notes.glob(f"*-{r}.pt")))) for r in range(1, len(rounds))]
    return [values_of(torch.load(file)) for file in received] + [values_of(last)], saved


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
        server = {"path": "torch.optim.Adam", "args": {"lr": options["server_lr"], "betas": betas, "eps": options["tau"]}}
    else:
        more = {"initial_accumulator_value": options["tau"] ** 2, "eps": options["tau"]}
        server = {"path": "torch.optim.Adagrad", "args": {"lr": options["server_lr"], **more}}
    return FedOptRecipe(**common, optimizer_args=server, device="cpu")


def _cohorts_job(case: Case, common: dict[str, Any], cohorts: list[list[int]]) -> Any:
    """Return the job that ScaffoldRecipe makes, with another controller."""
    job = BaseFedJob(initial_model=None, name="job", min_clients=common["min_clients"])
    model = PTModel(model=common["model"], initial_ckpt=common["initial_ckpt"])
    persistor = job.to_server(model, id="persistor")["persistor_id"]
    job.to_server(
        CohortsOfCase(
            cohorts, num_clients=len(cohorts[0]), num_rounds=common["num_rounds"], persistor_id=persistor
        )
    )
    script = {"script": common["train_script"], "script_args": common["train_args"]}
    job.to_clients(ScriptRunner(**script, framework=FrameworkType.PYTORCH))
    return job
