"""``lightning-fed diagnose`` of a small configuration, and modules and methods with a fault."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import Algorithm, FedAvg
from lightning_fed.cli.main import main
from lightning_fed.core.rounds import Step
from lightning_fed.data import Iid
from lightning_fed.data.datasets.digits import _load as load_digits
from lightning_fed.data.skew_report import SkewTable
from lightning_fed.lab.diagnosis.measurement import Measured
from lightning_fed.lab.diagnosis.self_check import SelfCheck
from lightning_fed.lab.diagnosis.theory import suggest
from lightning_fed.lab.diagnosis.trials import Trial
from lightning_fed.lab.diagnosis.verdicts import Findings
from lightning_fed.lab.overlays import overlay
from lightning_fed.models import MLPClassifier

BASE: dict[str, Any] = {
    "seed_everything": 0,
    "model": {
        "class_path": "lightning_fed.models.MLPClassifier",
        "init_args": {"in_features": 64, "num_classes": 10, "hidden": [], "lr": 0.1},
    },
    "data": {
        "class_path": "lightning_fed.data.Digits",
        "init_args": {"num_clients": 6, "alpha": 100.0, "batch_size": 32},
    },
    "trainer": {"algorithm": "FedAvg", "max_rounds": 20, "local_steps": 4},
}


class Uphill(FedAvg):
    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        return -g


class Unknown(Algorithm):
    def correct(self, g: Tensor, y: Tensor, step: Step) -> Tensor:
        return -g


class Broken(MLPClassifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return float("nan") * super().training_step(batch, batch_idx)


class Untrained(MLPClassifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 0 * super().training_step(batch, batch_idx)


class Rare(FederatedDataModule):
    """Digits that are mostly 0 and 1, in the same shares for all clients."""

    def __init__(self, num_clients: int = 6) -> None:
        images, labels = load_digits()
        kept = [i for c in range(10) for i in torch.nonzero(labels == c).flatten().tolist()[: 150 if c < 2 else 3]]
        super().__init__(
            train=TensorDataset(images[kept], labels[kept]), partition=Iid(num_clients, seed=0), batch_size=32
        )


def diagnose(*args: str, rounds: int = 2, **overrides: Any) -> dict[str, Any]:
    """Return the JSON report of a configuration."""
    path = Path("config.yaml")
    path.write_text(yaml.safe_dump(overlay(BASE, {key.replace("__", "."): v for key, v in overrides.items()})))
    main(
        ["diagnose", "--config", str(path), "--rounds", str(rounds), "--hessian_clients", "3", "--out", "r.json", *args]
    )
    return dict(json.loads(Path("r.json").read_text()))


def causes(report: dict[str, Any]) -> dict[str, str]:
    """Return the strongest evidence of each cause."""
    return {verdict["cause"]: verdict["evidence"] for verdict in reversed(report["verdicts"])}


def findings(algorithm: Algorithm | None = None, **changes: Any) -> Findings:
    """Return findings where nothing stands out except the given changes.

    Args:
        algorithm: The method.
        **changes: Fields of ``Measured``, ``Theory`` and ``SkewTable``; ``check`` and ``trials``, the losses by factor.
    """
    clients = Measured(
        0, 6, 6, 3, "examples", (4, 4.0, 4), 0.1, True, "SGD, lr 1", 2.0, 1.0, (0.5, 0.0), 1.1, (0.1, 0.0), 0.05, 0.9,
        (2.0, 0.0), (0.5, 0.0), 0.25,
    )  # fmt: skip
    m = replace(clients, **{name: changes[name] for name in changes if hasattr(clients, name)})
    theory = suggest(m, 4, 3, 20, 0.0)
    theory = replace(theory, **{name: changes[name] for name in changes if hasattr(theory, name)})
    skew = SkewTable(6, 0, 600, 10, 90, 100.0, 110, 0.1, 0.1, 3.0, 3.3)
    skew = replace(skew, **{name: changes[name] for name in changes if hasattr(skew, name) and not hasattr(m, name)})
    trials = []
    for factor, losses in {0.1: [2.0, 1.9], 1.0: [2.0, 1.0], 10.0: [2.0, 3.0], **changes.get("trials", {})}.items():
        trial = Trial(factor, 1, 6, 3, "examples")
        trial.rate, trial.losses, trial.cosine = 0.1 * factor, losses, changes.get("cosine", 0.9)
        trials.append(trial)
    check = changes.get("check", SelfCheck("agrees", "It agrees."))
    return Findings(algorithm or FedAvg(), m, theory, trials, skew, check)
