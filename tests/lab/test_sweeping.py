"""Users' own grids: the store, the table, the figure, and TensorBoard's hyper-parameters."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_fed.cli.main import main
from lightning_fed.lab.grid import Grid
from lightning_fed.lab.quantities import parse_quantity
from lightning_fed.lab.reading import read_experiment
from lightning_fed.lab.sweeping import _log_hyper_parameters, _not_logged, ranked
from tests.helpers.lab import results_of
from tests.helpers.optional import needs_matplotlib
from tests.lab.conftest import TINY

AXES = {
    "method": {"FedAvg": {"trainer.algorithm": "FedAvg"}, "SCAFFOLD": {"trainer.algorithm": "Scaffold"}},
    "lr": {"key": "model.init_args.lr", "values": [0.1, 0.2]},
}
METRICS = {"val_distance": {"mode": "min"}}
CHECKPOINT = {"class_path": "pytorch_lightning.callbacks.ModelCheckpoint", "init_args": {"monitor": "val_distance"}}
OUTPUTS = {"trainer": {"logger": True, "callbacks": [CHECKPOINT], "max_rounds": 2}}


def run(grid: dict[str, Any]) -> None:
    Path("base.yaml").write_text(yaml.safe_dump(TINY["base"]))
    Path("top.yaml").write_text(yaml.safe_dump(OUTPUTS))
    Path("grid.yaml").write_text(yaml.safe_dump(grid, sort_keys=False))
    files = ["--config", "base.yaml", "--config", "top.yaml", "--grid", "grid.yaml", "--out", "out"]
    main(["sweep", *files, "--jobs", "0"])


def cells() -> set[str]:
    return {path.parent.name for path in Path("out/cells").glob("*/cell.json")}


@pytest.mark.thorough
@needs_matplotlib
def test_sweep_runs_a_grid_and_writes_table_figure_and_tensorboard(capsys: pytest.CaptureFixture[str]) -> None:
    axes = {**AXES, "lr": {**AXES["lr"], "values": [0.1]}}
    run({"metrics": METRICS, "axes": axes, "seeds": 2})
    assert len(cells()) == 4
    shown = capsys.readouterr().out
    assert "left out: trainer.logger, pytorch_lightning.callbacks.ModelCheckpoint" in shown
    rows = [
        line for line in Path("out/sweep.md").read_text().splitlines() if line.startswith(("| FedAvg", "| SCAFFOLD"))
    ]
    values = [float(row.split("|")[3].split("±")[0]) for row in rows]
    assert len(values) == 2
    assert values == sorted(values)  # best first
    assert Path("out/sweep_curves.png").stat().st_size > 5_000
    runs = sorted(Path("out/tensorboard").iterdir())
    assert len(runs) == 4
    events = EventAccumulator(str(runs[0]))
    events.Reload()
    assert {"val_distance", "hp/final_val_distance", "hp/best_val_distance"} <= set(events.Tags()["scalars"])
    assert "_hparams_/session_start_info" in events.summary_metadata
    before = [path.stat().st_mtime_ns for path in Path("out/cells").glob("*/cell.json")]
    run({"metrics": METRICS, "axes": axes, "seeds": 2, "tables": {"t": {"rows": ["method", "lr"], "value": "best"}}})
    assert sorted(Path("out/tensorboard").iterdir()) == runs
    run({"metrics": METRICS, "axes": axes, "seeds": 1})
    assert sorted(Path("out/tensorboard").iterdir()) == [path for path in runs if "seed_0" in path.name]
    assert before == [path.stat().st_mtime_ns for path in Path("out/cells").glob("*/cell.json")]


@needs_matplotlib
@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"metrics": METRICS}, "lacks axes"),
        ({"metrics": METRICS, "axes": AXES, "seed": 1}, "Did you mean 'seeds'"),
        ({"metrics": METRICS, "axes": {}}, "axes must name what is varied"),
        ({"metrics": METRICS, "axes": AXES, "search": {"trials": 2}}, "no key 'search'"),
        ({"metrics": METRICS, "axes": {"lr": {"key": "model.init_args.lr", "low": 1, "high": 2}}}, "no key 'low'"),
        ({"metrics": METRICS, "axes": {"lr": {"key": "model.init_args.rate", "values": [1]}}}, "rate"),
        pytest.param(  # test_runner.py tests this, too
            {"metrics": {"val_acc": {"mode": "max"}}, "axes": AXES},
            "no metric 'val_acc'",
            marks=pytest.mark.thorough,
        ),
        ({"metrics": METRICS, "axes": AXES, "by": "final acc"}, "no metric 'acc'"),
        (
            {"metrics": METRICS, "axes": {"a": {"x": {"tune": {"lr": {"key": "model.init_args.lr", "values": [1]}}}}}},
            "axes.a: a sweep shows every value and tunes none",
        ),
    ],
    ids=str,
)
def test_errors_are_raised_before_the_first_cell(grid: dict[str, Any], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        run(grid)
    assert not cells()


@pytest.mark.thorough
@needs_matplotlib
@pytest.mark.parametrize("key", ["trianer", "ckpt_path"])
def test_unknown_cell_key_is_rejected(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OUTPUTS, key, {"max_rounds": 3})
    with pytest.raises(SystemExit, match=f"top.yaml: there is no key for the cells of a sweep '{key}'"):
        run({"metrics": METRICS, "axes": AXES})
    monkeypatch.setitem(OUTPUTS, key, None)  # as --print_config writes it
    run({"metrics": METRICS, "axes": {"lr": {**AXES["lr"], "values": [0.1]}}})


@needs_matplotlib
def test_trainer_in_a_separate_file_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OUTPUTS, "trainer", "trainer.yaml")
    with pytest.raises(SystemExit, match=r"trainer must be a mapping of keys to values, found 'trainer.yaml'"):
        run({"metrics": METRICS, "axes": AXES})


def test_points_that_miss_the_target_are_ranked_by_final_value(write: Any, tmp_path: Path) -> None:
    ends = {"poor": 3.0, "good": 1.0, "fair": 2.0}
    experiment = read_experiment(write(methods={name: {} for name in ends}, random=True))
    results = results_of(Grid(experiment), tmp_path / "o", lambda c: [4.0, ends[c.point.by_axis["method"]]])
    by = parse_quantity("", "rounds to 0.5", experiment.metrics)
    assert [point.by_axis["method"] for point in ranked(results, by)] == ["good", "fair", "poor"]


def test_unlogged_metric_is_named_once(write: Any, tmp_path: Path) -> None:
    experiment = read_experiment(write(methods={name: {} for name in ("all", "none")}, random=True))
    for of_none in ([], [2.0]):
        results = results_of(
            Grid(experiment),
            tmp_path / str(len(of_none)),
            lambda cell, own=of_none: [1.0] if cell.point.by_axis["method"] == "all" else own,
        )
        said = ["## Not logged", "- val_distance, by 1 of 2 finished cells, the first of them method none"]
        assert [text.removesuffix(", seed 0") for text in _not_logged(results)] == ([] if of_none else said)


@needs_matplotlib
@pytest.mark.parametrize(("seed", "said"), [(7, "seed_everything 7 is left out"), (0, "The cells keep")])
def test_ignored_seed_of_the_configuration_is_reported(
    seed: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(OUTPUTS, "seed_everything", seed)
    with pytest.raises(SystemExit):
        run({"metrics": METRICS, "axes": {}})
    assert capsys.readouterr().out.startswith(said)


def test_tensorboard_marks_diverged_cells(write: Any, tmp_path: Path) -> None:
    curves = {"falls": [4.0, 3.0], "diverges": [4.0, 1.0, math.nan]}
    experiment = read_experiment(write(methods={name: {} for name in curves}, random=True))
    results = results_of(Grid(experiment), tmp_path / "o", lambda cell: curves[cell.point.by_axis["method"]])
    _log_hyper_parameters(results, tmp_path / "board")
    for name, worst in {"falls": 3.0, "diverges": math.inf}.items():
        events = EventAccumulator(str(next((tmp_path / "board").glob(f"*{name}*"))))
        events.Reload()
        for kind in ("final", "best"):
            assert [event.value for event in events.Scalars(f"hp/{kind}_val_distance")] == [worst]
