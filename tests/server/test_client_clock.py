"""The time that clients take, in simulated seconds."""

import math
from pathlib import Path

import numpy as np

from lightning_fed.server import (
    ClientClock,
)


def test_seconds_follow_examples_traces_and_random_speeds(tmp_path: Path) -> None:
    class Two(list[str]):
        sizes = (3, 5)

    two = Two(["a", "b"])
    assert [ClientClock(2.0, per_example=True).seconds_of(0, two, i, 0) for i in range(2)] == [6.0, 10.0]
    (tmp_path / "trace.csv").write_text("client,seconds\na,1.5\nb,4\n")
    clock = ClientClock(str(tmp_path / "trace.csv"))
    assert [clock.seconds_of(0, two, i, 0) for i in range(2)] == [1.5, 4.0]
    spread = ClientClock(spread=1.0)
    many = range(2000)
    logs = np.log([spread.seconds_of(0, many, i, r) for i, r in zip(many, many, strict=True)])
    assert abs(logs.mean()) < 0.1
    assert abs(logs.std() - 1) < 0.1
    jitter = ClientClock(jitter=0.5)
    assert len({jitter.seconds_of(0, range(2), 1, r) for r in range(5)}) == 5
    assert jitter.seconds_of(0, range(2), 1, 3) == ClientClock(jitter=0.5).seconds_of(0, range(2), 1, 3)


def test_extreme_spreads_yield_valid_times() -> None:
    for clock in (ClientClock({0: 0.0, 1: 1.0}, spread=1e6), ClientClock({0: 0.0, 1: 1.0}, jitter=1e6)):
        seconds = [clock.seconds_of(0, range(2), i, r) for i in range(2) for r in range(8)]
        assert not any(map(math.isnan, seconds))
        assert max(seconds) > 0
