"""The trainer, model and data of a configuration, created without running anything."""

from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentError

from lightning_fed import FederatedTrainer
from lightning_fed.algorithms import FedProx
from lightning_fed.cli.configuration import CellParts
from lightning_fed.data import Digits
from lightning_fed.models import MLPClassifier


def configuration(**trainer: Any) -> dict[str, Any]:
    return {
        "seed_everything": 3,
        "model": {"class_path": "MLPClassifier", "init_args": {"in_features": 64, "num_classes": 10}},
        "data": {"class_path": "Digits", "init_args": {"num_clients": 4}},
        "trainer": {"algorithm": {"class_path": "FedProx", "init_args": {"mu": 0.5}}, "local_steps": 2, **trainer},
    }


def test_configuration_builds_all_parts_without_side_effects(tmp_path: Path) -> None:
    given = configuration(max_rounds=7)
    parts = CellParts(given)
    assert given == configuration(max_rounds=7)
    assert isinstance(parts.trainer, FederatedTrainer)
    assert isinstance(parts.trainer.fit_loop.settings.algorithm, FedProx)
    assert (parts.trainer.max_rounds, parts.trainer.fit_loop.settings.seed) == (7, 3)
    assert isinstance(parts.model, MLPClassifier)
    assert isinstance(parts.datamodule, Digits)
    assert parts.trainer.loggers == parts.trainer.checkpoint_callbacks == []
    assert list(tmp_path.iterdir()) == []


def test_wrong_key_raises_and_suggests_the_likely_one() -> None:
    with pytest.raises(ArgumentError, match="local_stepps(.|\n)*Did you mean.*local_steps"):
        CellParts(configuration(local_stepps=3))
