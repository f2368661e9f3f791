"""Three hospitals, whose tables have different words, and the functions of an app for them."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_fed import FederatedTrainer
from lightning_fed.data import ClientTable
from lightning_fed.models import MLPClassifier
from tests.deploy import wire

WARDS = {"north": ["surgery", "9", "eye"], "south": ["eye", "10", "Éye"], "west": ["9", "surgery", "10"]}
AGREED = {"ward": ["10", "9", "eye", "surgery", "Éye"]}
MAKE = partial(wire.make_trainer, "Scaffold ii", max_rounds=3, clients_per_round=2)


def model() -> MLPClassifier:
    torch.manual_seed(0)
    return MLPClassifier(in_features=1 + 6, num_classes=2, hidden=[4], lr=0.1)


def write(path: Path, clients: Sequence[str], more: Sequence[str] = ()) -> None:
    rows = ["site,age,ward,ill"]
    for client in clients:
        for n, ward in enumerate((*WARDS[client], *more, *WARDS[client])):
            rows.append(f"{client},{n + len(client)},{ward},{n % 2}")
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def table(path: Path, room: int = 6, **options: Any) -> ClientTable:
    given = {"val_fraction": 0, "classes": ["0", "1"], "categories": {"ward": room}, "batch_size": 2, **options}
    return ClientTable(str(path), "site", "ill", ["age", "ward"], **given)


NAMES = ["tests.deploy.words:make_trainer", "tests.deploy.words:model"]
DATA, VAL = "tests.deploy.words:make_data", "tests.deploy.words:make_val"


def make_trainer() -> FederatedTrainer:
    return MAKE(limit_val_batches=1.0)


def make_data(node_config: dict[str, Any]) -> ClientTable:
    return table(Path(node_config["table"]))


def make_val(words: dict[str, list[str]]) -> Any:
    """Return a set of two rows, with the first and the last word."""
    x = torch.zeros(2, 7)
    x[0, 1], x[1, len(words["ward"])] = 1.0, 1.0
    return torch.utils.data.TensorDataset(x, torch.tensor([0, 1]))
