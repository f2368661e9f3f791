"""Every kind of cell is checked and tried for a round before the first one runs."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_fed import FederatedError, FederatedTrainer
from lightning_fed.lab.configurations import Configurations
from lightning_fed.lab.grid import Grid
from lightning_fed.lab.reading import read_experiment
from lightning_fed.lab.runner import _Bar, make_jobs, probe_jobs
from lightning_fed.lab.workers import Outcome, WorkerTask
from tests.helpers.lab import Write, run


@pytest.mark.thorough
def test_probes_use_one_batch_except_for_server_only_methods(write: Write, tmp_path: Path) -> None:
    only = {"trainer.algorithm": "lightning_fed.algorithms.ServerOnly", "trainer.local_steps": None}
    path = write(methods={"ServerOnly": only, "FedAvg": {"trainer.algorithm": "lightning_fed.algorithms.FedAvg"}})
    limits: list[Any] = []
    original = FederatedTrainer.fit

    def noting(self: FederatedTrainer, *args: Any, **kwargs: Any) -> None:
        limits.append(self.limit_train_batches)
        original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FederatedTrainer, "fit", noting)
        _, ran = run(path, tmp_path / "out")
    assert len(ran) == 2
    assert limits == [1.0, 1, 1.0, 1.0]
    assert [type(limit) for limit in limits] == [float, int, float, float]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metrics": {"val_acc": {"mode": "max"}}}, "no metric 'val_acc'.*val_distance"),
        ({"methods": {"X": {"trainer.algorithm": "FedAvgg"}}}, "(?s)method X.*FedAvgg"),
        pytest.param(
            {"methods": {"X": {"trainer.max_round": 1}}}, "(?s)method X.*max_round", marks=pytest.mark.thorough
        ),
        ({"methods": {"X": {"model.init_args.lr": -1}}}, "method X.*lr"),
        pytest.param(
            {"methods": {"X": {"trainer.local_epochs": 1}}},
            "method X.*local_epochs or local_steps",
            marks=pytest.mark.thorough,
        ),
        ({"methods": {"X": {"data": {"class_path": "lightning_fed.data.Concrete"}}}}, "there is no data/concrete"),
    ],
    ids=str,
)
def test_errors_are_raised_before_the_first_cell(
    write: Write, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(FederatedError, match=message):
        run(write(**changes), tmp_path / "out")
    assert not list((tmp_path / "out" / "cells").iterdir())


@pytest.mark.thorough
def test_cells_that_differ_only_in_numbers_are_probed_once(write: Write, tmp_path: Path) -> None:
    axes = {"lr": {"key": "model.init_args.lr", "values": [0.1, 0.2]}}
    grid = Grid(read_experiment(write(axes=axes)))
    configurations = Configurations()
    cells = {str(cell): grid.config(cell) for point in grid.points for cell in grid.cells(point, (), range(2))}
    jobs = make_jobs(cells, configurations)
    assert len({job.key for job in jobs.values()}) == len(jobs) == 8
    probed: list[str] = []

    class Probing:
        def run(self, tasks: Iterable[WorkerTask]) -> Iterator[Outcome]:
            for task in tasks:
                probed.append(task.name)
                yield Outcome(task, tags=None if "lr 0.1" in task.name else ("val_distance",))

        def close(self) -> None:
            pass

    probe_jobs(list(jobs.values()), grid.experiment.metrics, (), Probing(), None)
    # if the first cell of a kind diverges, the next one is tried
    assert probed == [
        f"lr {lr}, method {m}, seed {s}" for lr, s in ((0.1, 0), (0.1, 1), (0.2, 0)) for m in ("FedAvg", "SCAFFOLD")
    ]


def test_progress_is_printed_as_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with _Bar(total=2, desc="Cells", unit="cell", leave=False) as bar:
        bar.update()
        bar.set_postfix(failed=1)
        bar.update()
    shown = capsys.readouterr().err
    assert "\r" not in shown
    assert re.search(r"^Cells 0/2, 00:00 so far$", shown, re.MULTILINE)
    assert re.search(r"^Cells 2/2, 00:0\d so far, failed=1$", shown, re.MULTILINE)
