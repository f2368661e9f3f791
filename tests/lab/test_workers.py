"""Worker processes get the same numbers as a single process, and survive the death of another worker."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from lightning_fed.lab import workers
from lightning_fed.lab.grid import Grid
from lightning_fed.lab.reading import read_experiment
from lightning_fed.lab.results import Results
from lightning_fed.lab.run_grid import run_grid
from lightning_fed.lab.store import Store
from lightning_fed.lab.workers import Inline, Workers, WorkerTask
from tests.helpers.lab import Write, failing, run


def quantity(results: Results) -> Any:
    from lightning_fed.lab.quantities import parse_quantity

    return parse_quantity("test", "final", results.grid.experiment.metrics)


def fork(patch: pytest.MonkeyPatch) -> None:
    """Fork the workers to save the imports."""
    patch.setattr(workers, "get_context", lambda _: multiprocessing.get_context("fork"))


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_worker_processes_match_inline_and_survive_a_killed_worker(
    start: str, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if start == "fork":
        fork(monkeypatch)
    inline, _ = run(write(), tmp_path / "inline")
    monkeypatch.setattr("lightning_fed.lab.run_grid.probe_jobs", lambda *_: None)
    monkeypatch.setenv("NOW", "1")
    (tmp_path / "now").touch()
    with Store(tmp_path / "out") as store:
        path = failing(write, tmp_path / "now", hard=True)
        results = run_grid(Grid(read_experiment(path)), store, Workers(1))
    bad, good = results.grid.points
    assert "exit code 9" in results.estimate(bad, quantity(results)).missing
    other = inline.records(inline.grid.points[0])[0]
    assert [r.series["val_distance"] for r in results.records(good)] == [other.series["val_distance"]]


def test_inline_runner_caches_file_data_for_the_next_cell(tmp_path: Path) -> None:
    rows = "\n".join(",".join(str(i % 7 + j) for j in range(9)) for i in range(40))
    (tmp_path / "concrete").mkdir()
    (tmp_path / "concrete" / "Concrete_Data.csv").write_text(",".join("abcdefghi") + "\n" + rows + "\n")
    config = {
        "model": {"class_path": "lightning_fed.models.LinearRegression", "init_args": {"in_features": 8, "lr": 0.01}},
        "data": {"class_path": "lightning_fed.data.Concrete", "init_args": {"root": str(tmp_path), "num_clients": 3}},
        "trainer": {"max_rounds": 2, "local_steps": 1, "clients_per_round": 2, "accelerator": "cpu"},
        "seed_everything": 3,
    }
    runner = Inline()
    first, second = (WorkerTask("x", config, {}, tmp_path / name) for name in ("first", "second"))
    (outcome,) = runner.run([first])
    (tmp_path / "concrete" / "Concrete_Data.csv").unlink()  # it is not read again
    assert outcome.cause is None
    assert [o.cause for o in runner.run([second])] == [None]
    a, b = (tmp_path / name / "rounds.csv" for name in ("first", "second"))
    without_time = [
        {k: v for k, v in zip(a_or_b[0].split(","), row.split(","), strict=True) if k != "round/seconds"}
        for a_or_b in (a.read_text().splitlines(), b.read_text().splitlines())
        for row in a_or_b[1:]
    ]
    assert without_time[: len(without_time) // 2] == without_time[len(without_time) // 2 :]
