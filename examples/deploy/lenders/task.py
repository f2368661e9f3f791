"""Make the trainer and the model on the server and the sites, and on a site also its own data."""

from typing import Any

import torch

from lightning_fed import FederatedTrainer
from lightning_fed.algorithms import Scaffold
from lightning_fed.data import ClientTable
from lightning_fed.models import MLPClassifier

FEATURES = ["age", "income", "debt", "late"]


def make_trainer() -> FederatedTrainer:
    """Return the trainer of a simulation. It writes no files, since the ServerApp writes the checkpoint."""
    return FederatedTrainer(
        algorithm=Scaffold(),
        max_rounds=3,
        local_epochs=2,
        seed=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )


def make_model() -> MLPClassifier:
    """Return the model, with the same initial parameters everywhere."""
    torch.manual_seed(0)
    return MLPClassifier(in_features=len(FEATURES), num_classes=2, hidden=[16], lr=0.1)


def make_data(node_config: dict[str, Any]) -> ClientTable:
    """Return the data of this site, from the file that its SuperNode's configuration names.

    Args:
        node_config: The values of ``flower-supernode --node-config``.
    """
    table = str(node_config["table"])
    return ClientTable(table, client="site", target="repaid", features=FEATURES, classes=["0", "1"], batch_size=16)
