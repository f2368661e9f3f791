"""Fixtures of the engines' tests."""

from typing import Any

import pytest

from lightning_fed.engines.vectorized import schedule
from lightning_fed.engines.vectorized.schedule import interleaved


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of clients in each step of clients that do not wait for each other."""
    found: list[int] = []

    def noted(sizes: Any, full: int) -> Any:
        for step in interleaved(sizes, full):
            if full > 1:  # 1 if all clients step together
                found.append(len(step.at))
            yield step

    monkeypatch.setattr(schedule, "interleaved", noted)
    return found
