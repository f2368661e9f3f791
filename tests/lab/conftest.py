"""A tiny experiment that the tests change and run, and one parser for all of their cells."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_fed.cli.configuration import CellParts

LESS = [{"what": "rounds", "paper": "3", "here": "one", "why": "it is quicker"}]

TINY: dict[str, Any] = {
    "title": "Two quadratics",
    "paper": "A paper",
    "item": "Figure 1",
    "base": {
        "model": {
            "class_path": "lightning_fed.models.Quadratic",
            "init_args": {"x0": 1.0, "lr": 0.1, "optimum": 0.0},
        },
        "data": {"class_path": "lightning_fed.data.Quadratics", "init_args": {"a": [2.0, 0.0], "G": 1.0}},
        "trainer": {"max_rounds": 3, "clients_per_round": 1.0, "local_steps": 2, "engine": "sequential"},  # no tracing
    },
    "methods": {
        "FedAvg": {"trainer.algorithm": "lightning_fed.algorithms.FedAvg"},
        "SCAFFOLD": {"trainer.algorithm": "lightning_fed.algorithms.Scaffold"},
    },
    "metrics": {"val_distance": {"mode": "min", "label": "distance"}},
    "random": False,
    "scales": {"full": {}, "small": {"departures": LESS, "overrides": {"trainer.max_rounds": 1}}},
}


@pytest.fixture(scope="session")
def _parsers() -> dict[Any, Any]:
    return {}


@pytest.fixture(autouse=True)
def _parsers_are_made_once(monkeypatch: pytest.MonkeyPatch, _parsers: dict[Any, Any]) -> None:
    """Reuse one parser for all cells, which saves a tenth of a second per cell."""
    make = CellParts.setup_parser

    def reuse(self: CellParts, *args: Any) -> None:
        key = type(self).add_arguments_to_parser
        if key not in _parsers:
            make(self, *args)
            _parsers[key] = self.parser
        self.parser = _parsers[key]

    monkeypatch.setattr(CellParts, "setup_parser", reuse)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes the tiny experiment with changed top-level keys."""

    def make(name: str = "tiny", **changes: Any) -> Path:
        path = tmp_path / f"{name}.yaml"
        content = {**TINY, **changes}
        path.write_text(yaml.safe_dump({k: v for k, v in content.items() if v is not None}, sort_keys=False))
        return path

    return make
