"""The description of a grid's run on its page."""

import json
from pathlib import Path

import pytest

from lightning_fed.lab.how import means
from tests.helpers.lab import Write, run


@pytest.mark.thorough
def test_cells_without_cpu_time_count_their_wall_time(write: Write, tmp_path: Path) -> None:
    run(write(), tmp_path / "out")
    files = sorted((tmp_path / "out" / "cells").glob("*/cell.json"))

    def means_with(times: list[dict[str, float]]) -> str:
        for file, kept in zip(files, times, strict=True):
            about = json.loads(file.read_text())
            about = {name: value for name, value in about.items() if "seconds" not in name}
            file.write_text(json.dumps(about | kept))
        results, ran = run(write(), tmp_path / "out")
        assert ran == []
        return means(results)[0]

    new, old = {"seconds": 100.4, "cpu_seconds": 7.2}, {"seconds": 130.4}
    assert means_with([new, new]) == "2 cells, 14 seconds of CPU time in all; nothing depends on a seed."
    assert (
        means_with([new, old])
        == "2 cells, 7 seconds of CPU time, and 130 seconds of wall time for 1 of them; nothing depends on a seed."
    )
    assert means_with([old, old]) == "2 cells, 261 seconds of wall time in all; nothing depends on a seed."
