"""The functions of a user's app, which make its trainer, model and data."""

import os
from typing import Any

from lightning_fed import FederatedDataModule, FederatedTrainer
from lightning_fed.deploy.site_process import clients_of
from tests.deploy import wire
from tests.deploy.site_models import Net, model

NAMES = ["tests.deploy.task:make_trainer", "tests.deploy.task:make_model"]
DATA = "tests.deploy.task:make_data"


def make_trainer() -> FederatedTrainer:
    return wire.make_trainer(os.environ["METHOD"])


def make_model() -> Net:
    return model()


def make_data(node_config: dict[str, Any]) -> FederatedDataModule:
    return wire.make_data([int(client) for client in clients_of(node_config)])
