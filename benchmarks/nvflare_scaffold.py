"""Compare NVFlare's automatic SCAFFOLD for Lightning, and lightning_fed, with SCAFFOLD's formula.

    python benchmarks/nvflare_scaffold.py

Both train the same LightningModule on the same batches in float32. Three clients have 24 examples each, or 40, 24 and
16. They take two local epochs in unshuffled batches of 8, and all take part in three rounds. The reference is the
paper's algorithm in float64: a client corrects each gradient by c - c_i, and its new c_i is the mean of its gradients.
With plain SGD, this is option ii. The server takes plain means.

NVFlare runs in its simulator, with its ScaffoldRecipe and ``nvflare.client.lightning.patch``. An error is the distance
from the reference, divided by the distance that the reference has moved. ``docs/coming_from.md`` has the figures.
"""

import argparse
import copy
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning_fed  # first: see lightning_fed.compat.torchvision
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import FederatedDataModule, FederatedTrainer
from lightning_fed.algorithms import Scaffold

SITES, ROUNDS, EPOCHS, BATCH, LR = ("site-1", "site-2", "site-3"), 3, 2, 8, 0.1
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Net(pl.LightningModule):
    """A small network, optionally with BatchNorm and momentum."""

    def __init__(self, norm: bool = False, momentum: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        middle = [torch.nn.BatchNorm1d(8)] if norm else []
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), *middle, torch.nn.ReLU(), torch.nn.Linear(8, 2))
        self.momentum = momentum

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=LR, momentum=self.momentum)


UNEQUAL = (40, 24, 16)
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "equal clients": ((24, 24, 24), {}),
    "unequal clients": (UNEQUAL, {}),
    "unequal clients, BatchNorm, momentum 0.9": (UNEQUAL, {"norm": True, "momentum": 0.9}),
}


def examples(case: str, site: str) -> TensorDataset:
    """Return the examples of a client. Their labels depend on the client."""
    number = SITES.index(site)
    x = torch.randn(CASES[case][0][number], 4, generator=torch.Generator().manual_seed(number))
    return TensorDataset(x, (x[:, number] > 0).long())


def formula(case: str, net: Net) -> dict[str, Tensor]:
    """Return the parameters after all rounds of the paper's algorithm, in float64."""
    x = {name: value.detach().double() for name, value in net.named_parameters()}
    zeros = {name: torch.zeros_like(value) for name, value in x.items()}
    c, kept = dict(zeros), {site: dict(zeros) for site in SITES}
    for _ in range(ROUNDS):
        models, changes = [], []
        for site, own in kept.items():
            local = copy.deepcopy(net).double()
            local.load_state_dict(x, strict=False)
            optimizer, steps, total = local.configure_optimizers(), 0, dict(zeros)
            for _ in range(EPOCHS):
                for batch in DataLoader(examples(case, site), BATCH):
                    optimizer.zero_grad()
                    local.training_step([batch[0].double(), batch[1]], steps).backward()
                    for name, value in local.named_parameters():
                        assert value.grad is not None
                        total[name] = total[name] + value.grad
                        value.grad += c[name] - own[name]
                    optimizer.step()
                    steps += 1
            y = {name: value.detach() for name, value in local.named_parameters()}
            new = {name: value / steps for name, value in total.items()}
            models.append(y)
            changes.append({name: new[name] - own[name] for name in x})
            kept[site] = new
        x = {name: torch.stack([y[name] for y in models]).mean(0) for name in x}
        c = {name: c[name] + torch.stack([change[name] for change in changes]).mean(0) for name in x}
    return x


def of_lightning_fed(case: str, net: Net) -> Mapping[str, Tensor]:
    """Return lightning_fed's final parameters."""
    data = FederatedDataModule(clients={site: examples(case, site) for site in SITES}, batch_size=BATCH, shuffle=False)
    rounds = {"max_rounds": ROUNDS, "clients_per_round": len(SITES), "local_epochs": EPOCHS, "seed": 0}
    FederatedTrainer(algorithm=Scaffold(), accelerator="cpu", **rounds, **QUIET).fit(net, data)
    return dict(net.state_dict())


def scaffold_recipe(model: Mapping[str, Any], sites: int, rounds: int, script: Path, **more: Any) -> Any:
    """Return NVFlare's recipe for a job with all sites.

    Args:
        model: The model's class path and arguments.
        sites: The number of sites.
        rounds: The number of rounds.
        script: The script that each site runs.
        more: More arguments of the recipe.
    """
    from nvflare.app_opt.pt.recipes.scaffold import ScaffoldRecipe

    return ScaffoldRecipe(model=dict(model), min_clients=sites, num_rounds=rounds, train_script=str(script), **more)


def train_as_client(
    trainer: pl.Trainer, net: pl.LightningModule, loader: Iterable[Any], done: Callable[[], None] | None = None
) -> None:
    """Train as a client of NVFlare, like its examples for Lightning.

    Args:
        trainer: The trainer to patch.
        net: The module.
        loader: The client's batches.
        done: A function to call after the client's work in each round.
    """
    import nvflare.client.lightning as flare

    flare.patch(trainer)
    while flare.is_running():
        trainer.fit(net, loader)
        if done is not None:
            done()


def of_nvflare(case: str, folder: Path) -> Mapping[str, Tensor]:
    """Return NVFlare's final parameters, from its simulator."""
    from nvflare.recipe import SimEnv

    model = {"class_path": "nvflare_scaffold.Net", "args": CASES[case][1]}
    words = f"--client {list(CASES).index(case)}"
    external = {"launch_external_process": True, "command": f"{sys.executable} -u"}
    recipe = scaffold_recipe(model, len(SITES), ROUNDS, Path(__file__), train_args=words, **external)
    recipe.execute(SimEnv(num_clients=len(SITES), workspace_root=str(folder)))
    saved = next(folder.rglob("FL_global_model.pt"))
    found: dict[str, Any] = torch.load(saved, weights_only=False)["model"]
    return {name: torch.as_tensor(value) for name, value in found.items()}


def serve(case: str) -> None:
    """Train as a client of a case."""
    import nvflare.client as flare

    flare.init()
    trainer = pl.Trainer(max_epochs=EPOCHS, accelerator="cpu", **QUIET)
    train_as_client(trainer, Net(**CASES[case][1]), DataLoader(examples(case, flare.get_site_name()), BATCH))


def error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> float:
    """Return the distance from the expected parameters, divided by their distance from the start."""
    off = sum(float((found[name].double() - value).square().sum()) for name, value in expected.items())
    way = sum(float((value - start[name].double()).square().sum()) for name, value in expected.items())
    return float((off / way) ** 0.5)


def main() -> None:
    """Print the errors of both, or run as a client."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    client = parser.parse_args().client
    if client is not None:
        serve(list(CASES)[client])
        return
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    lines = []
    for case, (_, options) in CASES.items():
        start, expected = Net(**options).state_dict(), formula(case, Net(**options))
        ours = of_lightning_fed(case, Net(**options))
        with tempfile.TemporaryDirectory() as folder:
            theirs = of_nvflare(case, Path(folder))
        off = [error(found, expected, start) for found in (ours, theirs)]
        counts = [float(v) for name, v in theirs.items() if name.endswith("num_batches_tracked")]
        lines.append(f"{case}: lightning_fed {off[0]:.1e}, NVFlare {off[1]:.1%}; num_batches_tracked {counts}")
    print(f"lightning_fed {lightning_fed.__version__}", *lines, sep="\n")


if __name__ == "__main__":
    main()
