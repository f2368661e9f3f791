"""Cells run once, despite interruptions. A cell that diverges or fails does not affect the others."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_fed import FederatedCallback
from lightning_fed.cli.main import main
from lightning_fed.lab import workers
from lightning_fed.lab.configurations import Configurations, key_of
from lightning_fed.lab.grid import Grid
from lightning_fed.lab.reading import read_experiment
from lightning_fed.lab.results import Results
from tests.helpers.lab import Write, failing, run
from tests.helpers.processes import wait_until

LR = {"key": "model.init_args.lr", "values": [0.1, 1e200]}  # the second overflows
TUNE = {"by": "final", "grid": {"lr": LR}}


class Stuck(FederatedCallback):
    """If STUCK is set, blocks at the end of a round once a cell has ended."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        wait_until(lambda: not (os.environ.get("STUCK") and list(self.folder.glob("[!.]*/cell.json"))))


@pytest.mark.thorough
def test_finished_cell_is_never_rerun(write: Write, tmp_path: Path) -> None:
    first, ran = run(write(), tmp_path / "out")
    assert len(ran) == 2
    assert all(
        record.series["val_distance"].keys() == {1, 2, 3} for p in first.grid.points for record in first.records(p)
    )
    assert run(write(title="Another title", claims=[]), tmp_path / "out")[1] == []
    axes = {"G": {"key": "data.init_args.G", "values": [1.0, 2.0]}}
    assert len(run(write(axes=axes), tmp_path / "out")[1]) == 2  # only those with G = 2


def test_cell_key_covers_the_configuration_except_the_data_location(write: Write) -> None:
    configurations = Configurations()
    grid = Grid(read_experiment(write()))
    cell = next(grid.cells(grid.points[0], (), range(1)))
    config = grid.config(cell)
    key = key_of(configurations.complete("x", config))
    explicit = {**config, "trainer": {**config["trainer"], "local_optimizer_state": "reset"}}
    assert key_of(configurations.complete("x", explicit)) == key  # explicit or by default
    changed = {**config, "trainer": {**config["trainer"], "local_optimizer_state": "keep"}}
    assert key_of(configurations.complete("x", changed)) != key
    assert config == grid.config(cell)  # completing changes nothing


@pytest.mark.thorough
def test_identical_cells_run_once(write: Write, tmp_path: Path) -> None:
    methods: dict[str, Any] = {name: {"trainer.engine": "auto"} for name in ("FedAvg", "the same")}
    results, ran = run(write(methods=methods), tmp_path / "out")
    assert len(ran) == 1
    assert len(list(results.asked())) == 2


@pytest.mark.thorough
def test_divergence_is_recorded_as_a_result(write: Write, tmp_path: Path) -> None:
    results, _ = run(write(tune=TUNE), tmp_path / "out")
    for point in results.grid.points:
        assert results.chosen(point) == (("lr", "0.1"),)
        assert [c.estimate.is_diverged for c in results.candidates(point)] == [False, True]
    only = {"by": "final", "grid": {"lr": {**LR, "values": [1e200, 1e201]}}}
    results, _ = run(write(tune=only), tmp_path / "out")
    assert results.chosen(results.grid.points[0]) is None
    assert str(results.estimate(results.grid.points[0], only_quantity(results))) == "diverged"
    assert run(write(tune=TUNE), tmp_path / "out")[1] == []


def only_quantity(results: Results) -> Any:
    assert results.grid.experiment.tune is not None
    return results.grid.experiment.tune.by


@pytest.mark.thorough
def test_values_tuned_on_few_seeds_are_used_for_remaining_seeds(write: Write, tmp_path: Path) -> None:
    tune = {"by": "final", "seeds": 1, "grid": {"lr": {"key": "model.init_args.lr", "values": [0.01, 0.1, 0.2]}}}
    results, ran = run(
        write(tune=tune, seeds=2, methods={"SCAFFOLD": {"trainer.algorithm": "Scaffold"}}), tmp_path / "o"
    )
    assert len(ran) == 3 + 1
    (point,) = results.grid.points
    scores = {c.tuned[0][1]: c.estimate.mean for c in results.candidates(point)}
    assert dict(results.chosen(point) or ()) == {"lr": min(scores, key=lambda label: scores[label])}
    assert [dict(cell.tuned) for cell in results.cells(point)] == [dict(results.chosen(point) or ())] * 2


@pytest.mark.thorough
def test_failed_cell_is_named_and_retried_without_affecting_others(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, file = failing(write, tmp_path / "now"), tmp_path / "now"
    monkeypatch.setattr("lightning_fed.lab.run_grid.probe_jobs", lambda *_: None)
    monkeypatch.setenv("NOW", "1")
    file.touch()
    results, ran = run(path, tmp_path / "out")
    assert len(ran) == 2
    bad, good = results.grid.points
    assert results.records(good)
    assert "out of luck" in results.estimate(bad, quantity(results)).missing
    file.unlink()
    results, ran = run(path, tmp_path / "out")
    assert len(ran) == 1
    assert results.records(bad)
    assert not list((tmp_path / "out" / "cells").glob("*.failed.json"))


def quantity(results: Results) -> Any:
    from lightning_fed.lab.quantities import parse_quantity

    return parse_quantity("test", "final", results.grid.experiment.metrics)


def fork(patch: pytest.MonkeyPatch) -> None:
    """Fork the workers to save the imports."""
    patch.setattr(workers, "get_context", lambda _: multiprocessing.get_context("fork"))


def reproduce(args: list[str], messages: Path) -> None:
    """Run the command with cells that get stuck, as the target of a separate process."""
    os.environ["STUCK"] = "1"
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stderr = messages.open("w")
    fork(pytest.MonkeyPatch())
    main(["reproduce", *args])


@pytest.mark.thorough
@pytest.mark.parametrize("start", ["fork", "anew"])
def test_ctrl_c_stops_cleanly_and_the_same_command_resumes(start: str, write: Write, tmp_path: Path) -> None:
    cells, root, messages = tmp_path / "out" / "cells", Path(__file__).parents[2], tmp_path / "messages"
    callback = {"class_path": f"{__name__}.Stuck", "init_args": {"folder": str(cells)}}
    finished = "[!.]*/cell.json"  # a cell is written to a folder with a dot, and renamed when it is complete
    axes = {"G": {"key": "data.init_args.G", "values": [1, 2]}}
    path = write(axes=axes, methods={"FedAvg": {"trainer.callbacks": [callback]}})
    args = [str(path), "--out", str(tmp_path / "out"), "--jobs", "1"]

    def is_alive() -> bool:
        return process.is_alive() if start == "fork" else process.poll() is None

    if start == "fork":
        process = multiprocessing.get_context("fork").Process(target=reproduce, args=(args, messages))
        process.start()
    else:
        paths = {"PYTHONPATH": f"{root}{os.pathsep}{Path(__file__).parent}", "OMP_NUM_THREADS": "1", "STUCK": "1"}
        command = [sys.executable, "-m", "lightning_fed", "reproduce", *args]
        with messages.open("w") as file:
            process = subprocess.Popen(command, env={**os.environ, **paths}, stdout=subprocess.DEVNULL, stderr=file)
    wait_until(lambda: bool(list(cells.glob(finished))) or not is_alive())
    assert is_alive(), messages.read_text()
    os.kill(process.pid, signal.SIGINT)
    wait_until(lambda: not is_alive())
    assert "continues from there" in messages.read_text()
    assert (process.exitcode if start == "fork" else process.returncode) == 130
    assert len(list(cells.glob(finished))) == 1
    _, ran = run(path, tmp_path / "out")
    assert len(ran) == 1
