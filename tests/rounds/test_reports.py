"""What a round's report says is the same whatever engine ran the clients."""

from typing import Any

import pytest

from tests.helpers.engines import Record, run
from tests.helpers.selection import few

ENGINES: list[dict[str, Any]] = [
    {"engine": "sequential"},
    {"engine": "auto"},
    {"engine": "vectorized"},
    {"engine": "vectorized", "chunk_size": 2},
]


@pytest.mark.parametrize("options", few(ENGINES, [{"engine": "auto"}]), ids=str)
def test_clients_are_listed_as_they_were_drawn(options: dict[str, Any]) -> None:
    drawn, record = [4, 1, 3, 0, 2], Record()
    run(clients_per_round=None, sampler=lambda seed, round: drawn, max_rounds=1, callbacks=record, **options)
    (report,) = record.rounds
    assert report.cohort == tuple(drawn)
    assert all(list(part) == drawn for part in (report.sizes, report.steps, report.weights, report.clients))
