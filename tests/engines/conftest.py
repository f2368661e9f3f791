"""What tests of engines look at."""

from typing import Any

import pytest

from lightning_fed.engines.vectorized import schedule
from lightning_fed.engines.vectorized.schedule import interleaved


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many clients took each step, of those that do not wait for each other."""
    found: list[int] = []

    def noted(sizes: Any, full: int) -> Any:
        for step in interleaved(sizes, full):
            if full > 1:  # it is 1 where all step together
                found.append(len(step.at))
            yield step

    monkeypatch.setattr(schedule, "interleaved", noted)
    return found
