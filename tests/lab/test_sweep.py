"""Users' own grids and searches: the store, the table, the figure, and TensorBoard's hyper-parameters."""

import builtins
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_fed.cli.main import main
from tests.helpers.selection import few
from tests.lab.conftest import TINY

AXES = {
    "method": {"FedAvg": {"trainer.algorithm": "FedAvg"}, "SCAFFOLD": {"trainer.algorithm": "Scaffold"}},
    "lr": {"key": "model.init_args.lr", "values": [0.1, 0.2]},
}
METRICS = {"val_distance": {"mode": "min"}}
CHECKPOINT = {"class_path": "pytorch_lightning.callbacks.ModelCheckpoint", "init_args": {"monitor": "val_distance"}}
OUTPUTS = {"trainer": {"logger": True, "callbacks": [CHECKPOINT], "max_rounds": 2}}


def run(grid: dict[str, Any], *args: str) -> None:
    Path("base.yaml").write_text(yaml.safe_dump(TINY["base"]))
    Path("top.yaml").write_text(yaml.safe_dump(OUTPUTS))
    Path("grid.yaml").write_text(yaml.safe_dump(grid, sort_keys=False))
    files = ["--config", "base.yaml", "--config", "top.yaml", "--grid", "grid.yaml", "--out", "out"]
    main(["sweep", *files, "--jobs", "0", *args])


def cells() -> set[str]:
    return {path.parent.name for path in Path("out/cells").glob("*/cell.json")}


def test_a_grid_is_run_tabled_drawn_and_compared_in_tensorboard(capsys: pytest.CaptureFixture[str]) -> None:
    run({"metrics": METRICS, "axes": AXES, "seeds": 2})
    assert len(cells()) == 8
    shown = capsys.readouterr().out
    assert "left out: trainer.logger, pytorch_lightning.callbacks.ModelCheckpoint" in shown
    rows = [
        line for line in Path("out/sweep.md").read_text().splitlines() if line.startswith(("| FedAvg", "| SCAFFOLD"))
    ]
    values = [float(row.split("|")[3].split("±")[0]) for row in rows]
    assert len(values) == 4
    assert values == sorted(values)  # best first
    assert Path("out/sweep_curves.png").stat().st_size > 5_000
    runs = sorted(Path("out/tensorboard").iterdir())
    assert len(runs) == 8
    events = EventAccumulator(str(runs[0]))
    events.Reload()
    assert {"val_distance", "hp/final_val_distance", "hp/best_val_distance"} <= set(events.Tags()["scalars"])
    assert "_hparams_/session_start_info" in events.summary_metadata
    before = [path.stat().st_mtime_ns for path in Path("out/cells").glob("*/cell.json")]
    run({"metrics": METRICS, "axes": AXES, "seeds": 2, "tables": {"t": {"rows": ["method", "lr"], "value": "best"}}})
    assert before == [path.stat().st_mtime_ns for path in Path("out/cells").glob("*/cell.json")]


@pytest.mark.thorough
def test_a_search_goes_on_where_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna")
    axes = {
        "method": AXES["method"],
        "lr": {"key": "model.init_args.lr", "low": 0.01, "high": 0.3, "log": True},
        "steps": {"key": "trainer.local_steps", "low": 1, "high": 3},
    }
    grid = {"metrics": METRICS, "axes": axes, "search": {"trials": 2, "batch": 2}}
    run(grid, "--search", "optuna")
    first = cells()
    assert 1 <= len(first) <= 2
    run({**grid, "search": {"trials": 4, "batch": 2}}, "--search", "optuna")
    assert first <= cells()
    assert len(cells()) > len(first)
    for row in Path("out/sweep.md").read_text().splitlines():
        if row.startswith(("| FedAvg", "| SCAFFOLD")):
            _, _, lr, steps, *_ = row.split("|")
            assert 0.01 <= float(lr) <= 0.3
            assert int(steps) in {1, 2, 3}


@pytest.mark.parametrize(
    ("grid", "args", "message"),
    [
        ({"metrics": METRICS}, [], "lacks axes"),
        ({"metrics": METRICS, "axes": AXES, "seed": 1}, [], "Did you mean 'seeds'"),
        ({"metrics": METRICS, "axes": {}}, [], "axes must name what is varied"),
        (
            {"metrics": METRICS, "axes": {"lr": {"key": "model.init_args.lr", "low": 1, "high": 2}}},
            [],
            "--search optuna",
        ),
        ({"metrics": METRICS, "axes": {"lr": {"key": "x", "low": 2, "high": 1}}}, [], "low must be below high"),
        ({"metrics": METRICS, "axes": {"lr": {"key": "x", "low": 0, "high": 1, "log": True}}}, [], "positive"),
        ({"metrics": METRICS, "axes": {"lr": {"key": "model.init_args.rate", "values": [1]}}}, [], "rate"),
        ({"metrics": {"val_acc": {"mode": "max"}}, "axes": AXES}, [], "no metric 'val_acc'"),
        ({"metrics": METRICS, "axes": AXES, "by": "final acc"}, [], "no metric 'acc'"),
        (
            {"metrics": METRICS, "axes": {"a": {"x": {"tune": {"lr": {"key": "model.init_args.lr", "values": [1]}}}}}},
            [],
            "axes.a: a sweep shows every value and tunes none",
        ),
    ],
    ids=str,
)
def test_a_mistake_is_named_before_the_first_cell(grid: dict[str, Any], args: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        run(grid, *args)
    assert not cells()


@pytest.mark.parametrize("key", few(["trianer", "ckpt_path"], ["ckpt_path"]))
def test_a_key_that_cells_do_not_have_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OUTPUTS, key, {"max_rounds": 3})
    with pytest.raises(SystemExit, match=f"top.yaml: there is no key for the cells of a sweep '{key}'"):
        run({"metrics": METRICS, "axes": AXES})
    monkeypatch.setitem(OUTPUTS, key, None)  # as --print_config writes it
    run({"metrics": METRICS, "axes": {"lr": AXES["lr"]}})


@pytest.mark.parametrize("seed", few([0, 1, 2], [0]))
def test_a_search_looks_at_every_label_before_the_first_cell(seed: int) -> None:
    pytest.importorskip("optuna")
    methods = {**AXES["method"], "Bad": {"trainer.algorithm": "Scafold"}, "Mime": {"trainer.algorithm": "Mime"}}
    grid = {"metrics": METRICS, "axes": {**AXES, "method": methods}, "search": {"trials": 2, "seed": seed}}
    with pytest.raises(SystemExit, match="Bad"):
        run(grid, "--search", "optuna")
    assert not cells()


def test_a_search_refuses_to_skip() -> None:
    pytest.importorskip("optuna")
    grid = {"metrics": METRICS, "axes": AXES, "skip": [{"method": "FedAvg", "lr": 0.1}], "search": {"trials": 2}}
    with pytest.raises(SystemExit, match="skip leaves points out of a grid"):
        run(grid, "--search", "optuna")


def test_a_search_without_optuna_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name == "optuna":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SystemExit, match=r"lightning_fed\[search\]"):
        run({"metrics": METRICS, "axes": AXES}, "--search", "optuna")
