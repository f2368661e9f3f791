"""lightning_fed: its trainer, an ordinary module, and clients that do not shuffle."""

import logging
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning_fed
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from conformance.adapter import Adapter
from conformance.adapters.torch_client import network, values_of
from conformance.cases import Case, Values
from lightning_fed import algorithms, server

__all__ = ["adapter"]

_SERVERS = {"adam": server.FedAdam, "yogi": server.FedYogi, "adagrad": server.FedAdagrad}


def adapter() -> "LightningFed":
    """Return the adapter."""
    return LightningFed()


class LightningFed(Adapter):
    """All cases, in float64."""

    packages = ("lightning_fed", "torch")

    def versions(self) -> dict[str, str]:
        """Return the version of the code that runs, which may not be the installed one."""
        return {"lightning_fed": lightning_fed.__version__, "torch": torch.__version__}

    def offers(self, case: Case) -> Mapping[str, str]:
        """Return the class of the method."""
        return {"": f"algorithms.{type(_method(case)).__name__}"}

    def run(self, case: Case, way: str) -> list[Values]:
        """Train all rounds."""
        return _fit(case, case.rounds)[0]

    def resume(self, case: Case, way: str, folder: Path) -> list[Values] | None:
        """Save a checkpoint, and continue from it with a new trainer, module and data module."""
        _, trainer = _fit(case, case.restart)
        trainer.save_checkpoint(folder / "half.ckpt")
        return _fit(case, case.rounds, folder / "half.ckpt")[0]


def _method(case: Case) -> Any:
    options = case.options
    return {
        "fedavg": algorithms.FedAvg,
        "batchnorm": algorithms.FedAvg,
        "fedopt": algorithms.FedAvg,
        "fedprox": lambda: algorithms.FedProx(mu=options["mu"]),
        "scaffold": lambda: algorithms.Scaffold(option=options["option"]),
        "mime": lambda: algorithms.Mime(base=algorithms.SGDm(beta=options["beta"])),
        "mimelite": lambda: algorithms.MimeLite(base=algorithms.SGDm(beta=options["beta"])),
        "feddyn": lambda: algorithms.FedDyn(alpha=options["alpha"]),
        "fednova": algorithms.FedNova,
    }[case.method]()


def _server(case: Case) -> dict[str, Any]:
    if case.method != "fedopt":
        return {}
    options = case.options
    betas = ("beta1", "beta2") if options["server"] != "adagrad" else ("beta1",)
    arguments = {"lr": options["server_lr"], "tau": options["tau"], **{name: options[name] for name in betas}}
    return {"server_optimizer": partial(_SERVERS[options["server"]], **arguments)}


class _Module(pl.LightningModule):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.options = case.options
        self.net = network(case.problem)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        momentum = self.options.get("client_momentum", 0.0)
        return torch.optim.SGD(self.parameters(), lr=self.options["client_lr"], momentum=momentum)


class _Recorder(lightning_fed.FederatedCallback):
    def __init__(self) -> None:
        self.rounds: list[Values] = []

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round_report: Any) -> None:
        self.rounds.append(values_of(pl_module.net.state_dict()))


def _fit(
    case: Case, rounds: int, checkpoint: Path | None = None
) -> tuple[list[Values], lightning_fed.FederatedTrainer]:
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    recorder = _Recorder()
    trainer = lightning_fed.FederatedTrainer(
        algorithm=_method(case), max_rounds=rounds, local_epochs=case.options["local_epochs"],
        sampler=lambda seed, round, population=None: case.cohorts[round], seed=0, callbacks=[recorder],
        accelerator="cpu", precision="64-true", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **_server(case),
    )  # fmt: skip
    clients = [
        TensorDataset(torch.tensor(x), torch.tensor(y)) for x, y in zip(case.problem.x, case.problem.y, strict=True)
    ]
    data = lightning_fed.FederatedDataModule(clients=clients, batch_size=case.problem.batch_size, shuffle=False)
    trainer.fit(_Module(case), data, ckpt_path=checkpoint)
    return recorder.rounds, trainer
