"""Runs in two processes, each on its own test device: ``python -m tests.devices.pair FOLDER`` writes their outcomes.

They are forked from a process without devices, since PyTorch cannot fork a process that has used a device.
"""

import lightning_fed  # noqa: F401  # isort: skip: torchvision with a CPU build; see docs/platforms.md
import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_fed import FederatedCallback
from lightning_fed.algorithms import Scaffold
from lightning_fed.strategies import ClientsStrategy
from tests.helpers.processes import in_processes
from tests.helpers.training import FEATURES, Net, data, parameters, seeded, trainer

__all__ = ["RUNS", "Overflows", "main", "run_of"]

SIZES = (80, 8, 80, 8)
"""Numbers of examples: the first process owns both large clients, and the other one trains one of them."""


class Kept(Net):
    """Has an optimizer whose state clients keep, and averaged buffers."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Gathers(FederatedCallback):
    """Gathers a tensor of each process, as a measuring callback may."""

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        self.found = trainer.fit_loop.gather(pl_module.head.bias.detach() + trainer.global_rank)


class Overflows(Net):
    """Overflows in float16 on the clients of the second process."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (30.0 if self.trainer.global_rank else 1.0)


RUNS: dict[str, tuple[type[Net], dict[str, Any]]] = {
    "kept optimizers": (Kept, {"local_optimizer_state": "keep"}),
    "client states": (Net, {"algorithm": Scaffold()}),
}


def run_of(module: Net, ckpt_path: Any = None, **options: Any) -> Any:
    """Return a trainer after two rounds of all clients."""
    run = trainer(clients_per_round=1.0, local_epochs=4, max_rounds=2, **options)
    run.fit(module, data(SIZES, batch_size=8), ckpt_path=ckpt_path)
    return run


def in_this_pair() -> dict[str, Any]:
    """Return the arguments of a trainer on this process's device that finds the other process."""
    from tests.devices.mini.collectives import stage_collectives
    from tests.devices.mini.lightning import MiniAccelerator

    stage_collectives()
    strategy = ClientsStrategy(process_group_backend="cpu:gloo,mini:gloo")
    return {"accelerator": MiniAccelerator(), "devices": 2, "strategy": strategy}


def end(kind: type[Net], **options: Any) -> dict[str, Any]:
    """Return the outcome of a run."""
    place, gathers, module = in_this_pair(), Gathers(), seeded(kind)
    run = run_of(module, callbacks=[gathers], **place, **options)
    import tests.devices.mini as mini
    from tests.devices.mini.collectives import LOG

    return {
        "parameters": parameters(module).cpu(),
        "exchanges of states": sum(name == "all_to_all_single" for name, _, _ in LOG),
        "bytes on the other's device": mini.core.memory(1 - run.global_rank)["peak"],
        "gathered": [part.cpu() for part in gathers.found],
    }


def scaled(folder: Path) -> dict[str, Any]:
    """Return the parameters and scales of a mixed-precision run, and of one that resumes halfway."""
    whole, resumed = seeded(Overflows, dropout=0.0), seeded(Overflows, dropout=0.0)
    saving = ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{epoch}")
    found = {}
    for name, module, options in (
        ("whole", whole, {"callbacks": [saving], "enable_checkpointing": True}),
        ("resumed", resumed, {"ckpt_path": folder / "epoch=0.ckpt"}),
    ):
        place = in_this_pair()
        run = run_of(module, plugins=[MixedPrecision("16-mixed", device="mini")], **place, **options)
        found[name] = parameters(module).cpu(), run.precision_plugin.state_dict()["scale"]
    return found


def main(folder: Path) -> None:
    """Write the outcomes of all runs."""
    works = {name: partial(end, kind, **options) for name, (kind, options) in RUNS.items()}
    works["scaled"] = partial(scaled, folder)
    outcomes = {name: in_processes(work, folder) for name, work in works.items()}
    (folder / "outcomes").write_bytes(pickle.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
