"""What tests of engines look at."""

from typing import Any

import pytest

from lightning_fed.engines.vectorized import schedule
from lightning_fed.engines.vectorized.turns import turns


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many clients took each step, of those that do not wait for each other."""
    found: list[int] = []

    def noted(*args: Any) -> Any:
        for turn in turns(*args):
            found.append(len(turn.at))
            yield turn

    monkeypatch.setattr(schedule, "turns", noted)
    return found
