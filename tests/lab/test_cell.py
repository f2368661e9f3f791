"""The records of one cell."""

import os
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from lightning_fed.lab.cell import Recorder, made_with
from tests.helpers.lab import Write, run


def test_cell_records_cpu_time_including_child_processes(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, children = iter([10.0, 11.5]), iter([(1.0, 0.0), (3.0, 0.25)])
    monkeypatch.setattr(time, "process_time", lambda: next(own))
    monkeypatch.setattr(os, "times", lambda: os.times_result((0.0, 0.0, *next(children), 0.0)))
    monkeypatch.setattr("lightning_fed.lab.run_grid.probe_jobs", lambda *_: None)
    results, _ = run(write(methods={"FedAvg": {}}), tmp_path / "out")
    (record,) = results.records(results.grid.points[0])
    assert record.cpu_seconds == 1.5 + 2.0 + 0.25


def test_recorder_keeps_every_value_by_completed_rounds() -> None:
    recorder = Recorder()
    recorder.log_metrics({"val_acc": 0.5, "epoch": 1}, step=1)
    recorder.log_metrics({"val_acc": torch.tensor(0.75)}, step=2)
    recorder.log_metrics({"setting": 3})
    assert recorder.series == {"val_acc": {1: 0.5, 2: 0.75}, "setting": {0: 3.0}}
    assert (recorder.save_dir, Recorder(Path("x")).save_dir) == (None, "x")


def test_cell_records_its_software_and_hardware() -> None:
    found = made_with()
    assert {"lightning_fed", "torch", "python", "system", "processor", "cores", "date"} <= found.keys()
    assert found["torch"] == version("torch")
