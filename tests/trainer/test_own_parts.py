"""Users' parts of the server that keep something from round to round are named."""

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fed.server import Compressor, CoordinateMedian, SystemsHeterogeneity
from tests.helpers.training import fit


class Counting(CoordinateMedian):
    """Takes medians, and counts rounds."""

    def __init__(self) -> None:
        super().__init__()
        self._cache: Tensor | None = None
        self.calls = 0

    def combine(self, *arguments: Any, **named: Any) -> Any:
        self._cache = torch.ones(3)
        self.calls += 1
        return super().combine(*arguments, **named)


class Saved(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state_dict: Mapping[str, Any], x: Tensor) -> None:
        self.calls = state_dict.get("calls", 0)


class Drawing(SystemsHeterogeneity):
    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(0)

    def __call__(self, *arguments: Any) -> Any:
        return [max(1, steps - self.generator.randrange(2)) for steps in arguments[-1]]


class Annealed(Compressor):
    def __init__(self) -> None:
        self._share = 1.0

    def __call__(self, message: Tensor, stream: torch.Generator) -> tuple[Tensor, int]:
        self._share *= 0.99
        return message * self._share, 4 * len(message)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"aggregator": Counting()}, r"aggregator=Counting\(...\) changes its attribute 'calls'.* Override state_dict"),
        ({"heterogeneity": Drawing()}, r"heterogeneity=Drawing\(...\) changes its attribute 'generator'"),
        ({"compression": Annealed()}, r"compression=Annealed\(...\) changes its attribute '_share'"),
    ],
    ids=["aggregator", "heterogeneity", "compression"],
)
def test_an_attribute_that_changes_from_round_to_round_is_named(options: Any, found: str) -> None:
    with pytest.warns(UserWarning, match=found):
        fit(max_rounds=2, **options)


@pytest.mark.parametrize("aggregator", [Saved(), CoordinateMedian()], ids=["saved", "shipped"])
def test_what_checkpoints_hold_is_not_named(aggregator: Any, recwarn: pytest.WarningsRecorder) -> None:
    fit(max_rounds=2, aggregator=aggregator)
    assert not [warning for warning in recwarn if "changes its attribute" in str(warning.message)]
