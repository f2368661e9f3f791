"""docs/papers_fill.py: it runs only missing cells, in a useful order, and the next machine continues."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from lightning_fed.lab.cell import CellRunner
from lightning_fed.lab.grid import Grid
from lightning_fed.lab.reading import read_experiment
from lightning_fed.lab.store import Store
from lightning_fed.lab.workers import make_workers
from tests.helpers.lab import Write, run


def script() -> Any:
    path = Path(__file__).parents[2] / "docs" / "papers_fill.py"
    spec = importlib.util.spec_from_file_location("papers_fill", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.thorough
def test_only_missing_cells_are_run(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill, ran = script().fill, list[int]()
    original = CellRunner.run

    def noting(self: CellRunner, config: Any, completed: Any, final: Path) -> None:
        ran.append(config["seed_everything"])
        original(self, config, completed, final)

    monkeypatch.setattr(CellRunner, "run", noting)

    def filled(path: Path, store: str, started: Path) -> Any:
        with Store(tmp_path / store) as cells:
            return fill(Grid(read_experiment(path)), cells, make_workers(0), started, [], None)

    one, two = write(seeds=1), write("two", seeds=2)
    here = tmp_path / "papers" / "started"
    results = filled(one, "a", here)
    assert ran == [0, 0], "two methods"
    assert all(results.record(cell) is not None for cell in results.asked())
    for path in here.glob("tiny_*"):
        path.rename(path.with_name(path.name.replace("tiny", "two")))
    ran.clear()
    results = filled(two, "b", here)  # another machine, with an empty store
    assert ran == [1, 1]
    assert all(results.record(cell) is not None for cell in results.asked())
    ran.clear()
    filled(two, "c", here)
    assert not ran, "all of it was published"
    assert sorted(map(str, run(two, tmp_path / "whole")[0].asked())) == sorted(map(str, results.asked()))
