"""Cells are run once, whatever happens in between; what diverges or fails leaves the others alone."""

import gzip
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_fed import FederatedCallback, FederatedError, FederatedTrainer
from lightning_fed.algorithms import FedAvg
from lightning_fed.cli.main import main
from lightning_fed.lab import workers
from lightning_fed.lab.cell import CellRunner
from lightning_fed.lab.checking import check_outputs
from lightning_fed.lab.configurations import Configurations, key_of
from lightning_fed.lab.grid import Grid
from lightning_fed.lab.reading import read_experiment
from lightning_fed.lab.results import Results
from lightning_fed.lab.run_grid import run_grid
from lightning_fed.lab.store import Store
from lightning_fed.lab.verdict import means
from lightning_fed.lab.workers import Inline, Task, Workers, make_workers
from tests.helpers.processes import wait_until

Write = Callable[..., Path]
LR = {"key": "model.init_args.lr", "values": [0.1, 1e200]}  # the second overflows
TUNE = {"by": "final", "grid": {"lr": LR}}


class Failing(FedAvg):
    """A method that fails, once it is asked to."""

    def __init__(self, file: str = "", hard: bool = False) -> None:
        super().__init__()
        self.file, self.hard = file, hard

    def update_server(self, *args: Any) -> Any:
        if Path(self.file).exists() and os.environ.get("NOW"):
            if self.hard:
                os._exit(9)
            raise RuntimeError("out of luck")
        return super().update_server(*args)


class Stuck(FederatedCallback):
    """Ends no round once a cell has ended, if it is asked to."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        wait_until(lambda: not (os.environ.get("STUCK") and list(self.folder.glob("[!.]*/cell.json"))))


def run(path: Path, out: Path, scale: str = "full", jobs: int = 0) -> tuple[Results, list[str]]:
    """Run a grid, and return its results with the names of the cells that were run for it."""
    ran: list[str] = []
    original = CellRunner.run

    def noting(self: CellRunner, config: Any, completed: Any, final: Path) -> None:
        ran.append(final.name)
        original(self, config, completed, final)

    with pytest.MonkeyPatch.context() as patch, Store(out) as store:
        patch.setattr(CellRunner, "run", noting)
        results = run_grid(Grid(read_experiment(path), scale), store, make_workers(jobs))
    return results, ran


def test_a_finished_cell_is_never_run_again(write: Write, tmp_path: Path) -> None:
    first, ran = run(write(), tmp_path / "out")
    assert len(ran) == 2
    assert all(
        record.series["val_distance"].keys() == {1, 2, 3} for p in first.grid.points for record in first.records(p)
    )
    assert run(write(title="Another title", claims=[]), tmp_path / "out")[1] == []
    axes = {"G": {"key": "data.init_args.G", "values": [1.0, 2.0]}}
    assert len(run(write(axes=axes), tmp_path / "out")[1]) == 2  # those with G = 2 alone


def test_a_cell_is_known_by_all_of_its_configuration_but_where_its_data_lie(write: Write) -> None:
    configurations = Configurations()
    grid = Grid(read_experiment(write()))
    cell = next(grid.cells(grid.points[0], (), range(1)))
    config = grid.config(cell)
    key = key_of(configurations.complete("x", config))
    explicit = {**config, "trainer": {**config["trainer"], "local_optimizer_state": "reset"}}
    assert key_of(configurations.complete("x", explicit)) == key  # said or not
    changed = {**config, "trainer": {**config["trainer"], "local_optimizer_state": "keep"}}
    assert key_of(configurations.complete("x", changed)) != key
    assert config == grid.config(cell)  # completing changes nothing


@pytest.mark.parametrize("class_path", ["lightning_fed.data.ClientFolder", "mine.Folder", "mine.MNIST"])
def test_a_folder_that_is_the_data_is_part_of_a_cells_key(class_path: str) -> None:
    here, there = ({"data": {"class_path": class_path, "init_args": {"root": root}}} for root in "ab")
    assert key_of(here) != key_of(there)
    mnist = ({"data": {"class_path": "lightning_fed.data.MNIST", "init_args": {"root": root}}} for root in "ab")
    assert len({key_of(config) for config in mnist}) == 1


def test_cells_alike_are_one_cell(write: Write, tmp_path: Path) -> None:
    methods = {"FedAvg": {}, "the same": {}}
    results, ran = run(write(methods=methods), tmp_path / "out")
    assert len(ran) == 1
    assert len(list(results.asked())) == 2


@pytest.mark.thorough
def test_methods_without_local_work_are_probed_too_and_the_others_on_one_batch(write: Write, tmp_path: Path) -> None:
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


@pytest.mark.thorough
def test_divergence_is_a_result(write: Write, tmp_path: Path) -> None:
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
def test_values_are_chosen_on_few_seeds_and_the_others_run_with_the_choice(write: Write, tmp_path: Path) -> None:
    tune = {"by": "final", "seeds": 1, "grid": {"lr": {"key": "model.init_args.lr", "values": [0.01, 0.1, 0.2]}}}
    results, ran = run(
        write(tune=tune, seeds=2, methods={"SCAFFOLD": {"trainer.algorithm": "Scaffold"}}), tmp_path / "o"
    )
    assert len(ran) == 3 + 1
    (point,) = results.grid.points
    scores = {c.tuned[0][1]: c.estimate.mean for c in results.candidates(point)}
    assert dict(results.chosen(point) or ()) == {"lr": min(scores, key=lambda label: scores[label])}
    assert [dict(cell.tuned) for cell in results.cells(point)] == [dict(results.chosen(point) or ())] * 2


def failing(write: Write, file: Path, hard: bool = False) -> Path:
    algorithm = {"class_path": f"{__name__}.Failing", "init_args": {"file": str(file), "hard": hard}}
    return write(methods={"Failing": {"trainer.algorithm": algorithm}, "FedAvg": {}})


def test_a_failure_is_named_leaves_the_others_alone_and_is_tried_again(
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


def test_one_command_at_a_time_works_in_a_folder(tmp_path: Path) -> None:
    with (
        Store(tmp_path / "out"),
        pytest.raises(FederatedError, match="Another command works in"),
        Store(tmp_path / "out"),
    ):
        pass
    with Store(tmp_path / "out"):
        pass


def test_what_a_killed_cell_left_is_cleared_away_and_a_damaged_one_is_named(write: Write, tmp_path: Path) -> None:
    results, _ = run(write(), tmp_path / "out")
    cells = tmp_path / "out" / "cells"
    (cells / ".half").mkdir()
    (cells / ".half" / "rounds.csv").write_text("round,")
    key = results.records(results.grid.points[0])[0].folder.name
    (cells / key / "cell.json").write_text("{")
    with pytest.raises(FederatedError, match=f"{key} is damaged.*Delete it"):
        run(write(), tmp_path / "out")[0].records(results.grid.points[0])
    assert not (cells / ".half").exists()


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
def test_what_is_wrong_is_said_before_the_first_cell(
    write: Write, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(FederatedError, match=message):
        run(write(**changes), tmp_path / "out")
    assert not list((tmp_path / "out" / "cells").iterdir())


def test_a_cell_is_recorded_with_its_cpu_time_and_that_of_the_processes_it_started(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, children = iter([10.0, 11.5]), iter([(1.0, 0.0), (3.0, 0.25)])
    monkeypatch.setattr(time, "process_time", lambda: next(own))
    monkeypatch.setattr(os, "times", lambda: os.times_result((0.0, 0.0, *next(children), 0.0)))
    monkeypatch.setattr("lightning_fed.lab.run_grid.probe_jobs", lambda *_: None)
    results, _ = run(write(methods={"FedAvg": {}}), tmp_path / "out")
    (record,) = results.records(results.grid.points[0])
    assert record.cpu_seconds == 1.5 + 2.0 + 0.25


@pytest.mark.thorough
def test_cells_recorded_without_cpu_time_count_with_their_wall_time(write: Write, tmp_path: Path) -> None:
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


def fork(patch: pytest.MonkeyPatch) -> None:
    """Let workers be forked, which imports nothing anew."""
    patch.setattr(workers, "get_context", lambda _: multiprocessing.get_context("fork"))


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_processes_come_to_the_same_numbers_and_survive_the_death_of_one(
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


def reproduce(args: list[str], messages: Path) -> None:
    """Run the command as a process of its own does, with cells that get stuck."""
    os.environ["STUCK"] = "1"
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stderr = messages.open("w")
    fork(pytest.MonkeyPatch())
    main(["reproduce", *args])


@pytest.mark.parametrize("start", ["fork", pytest.param("anew", marks=pytest.mark.thorough)])
def test_ctrl_c_stops_cleanly_and_the_same_command_goes_on(start: str, write: Write, tmp_path: Path) -> None:
    cells, root, messages = tmp_path / "out" / "cells", Path(__file__).parents[2], tmp_path / "messages"
    callback = {"class_path": f"{__name__}.Stuck", "init_args": {"folder": str(cells)}}
    finished = "[!.]*/cell.json"  # a cell is written to a folder with a dot, and renamed when it is complete
    axes = {"G": {"key": "data.init_args.G", "values": [1, 2, 3, 4]}}
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
    assert "goes on from there" in messages.read_text()
    assert len(list(cells.glob(finished))) == 1
    _, ran = run(path, tmp_path / "out")
    assert len(ran) == 3


def test_inline_keeps_a_data_set_from_files_for_the_next_cell(tmp_path: Path) -> None:
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
    first, second = (Task("x", config, {}, tmp_path / name) for name in ("first", "second"))
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


def test_the_command_writes_everything(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    axes = {"G": {"key": "data.init_args.G", "values": [1, 10]}}
    claims = [
        {
            "says": "SCAFFOLD wins.",
            "source": "Table 1",
            "claim": "SCAFFOLD < FedAvg",
            "quantity": "final",
            "at": {"G": 10},
        },
        {
            "says": "FedAvg wins.",
            "source": "Table 1",
            "claim": "FedAvg < SCAFFOLD",
            "quantity": "final",
            "at": {"G": 10},
        },
    ]
    figures = {"curves": {"columns": "G", "log": ["y"]}, "by_G": {"x": "G", "y": "final"}}
    tables = {"final": {"columns": "G", "value": ["final", "rounds to 0.5"]}}
    base_rounds = {"full": {"overrides": {"trainer.max_rounds": 30}}}
    path = write(axes=axes, claims=claims, figures=figures, tables=tables, tune=TUNE, scales=base_rounds, seeds=2)
    main(["reproduce", str(path), "--out", str(tmp_path / "out"), "--jobs", "0", "--seeds", "1"])
    out = tmp_path / "out"
    text = (out / "tiny.md").read_text()
    assert text in capsys.readouterr().out
    for part in (
        "SCAFFOLD wins.",
        "holds.",
        "**does not hold**",
        "## Diverged",
        "| seeds |  | 1, where the file has 2 | the command's --seeds |",
        "lightning-fed reproduce tiny.yaml --seeds 1",
    ):
        assert part in text, part
    assert str(tmp_path) not in text
    for name in ("tiny_curves.png", "tiny_by_G.png"):
        assert (out / name).read_bytes()[:4] == b"\x89PNG"
        assert 5_000 < (out / name).stat().st_size < 200_000
        assert f"({name})" in text
    rows = gzip.decompress((out / "tiny_rounds.csv.gz").read_bytes()).decode().splitlines()
    assert rows[0] == "cell,round,val_distance"
    assert sum(row.split(",")[1] == "30" for row in rows) == 4
    cells = (out / "tiny_cells.csv").read_text().splitlines()
    assert cells[0].startswith("cell,name,settings,status,cause,")
    assert sum(",finished," in row for row in cells) == sum(",diverged," in row for row in cells) == 4
    choices = (out / "tiny_choices.csv").read_text().splitlines()
    assert len(choices) == 1 + 8
    assert sum(row.endswith(",yes") for row in choices) == 4


def test_a_page_is_made_again_from_what_is_published_and_nothing_runs(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claim = {"says": "So it is.", "source": "Table 1", "claim": "SCAFFOLD < FedAvg", "quantity": "final"}
    settings = {"figures": {"curves": {}}, "tables": {"final": {"value": "final"}}}
    args = ["reproduce", str(write(claims=[claim], **settings)), "--jobs", "0", "--out"]
    main([*args, str(tmp_path / "out")])
    text = (tmp_path / "out" / "tiny.md").read_text()
    again = [*args, str(tmp_path / "again"), "--published", str(tmp_path / "out")]
    main(again)
    assert (tmp_path / "again" / "tiny.md").read_text() == text
    assert not (tmp_path / "again" / "cells").exists()
    write(claims=[{**claim, "says": "It is otherwise."}], **settings)
    main(again)
    assert (tmp_path / "again" / "tiny.md").read_text() == text.replace("So it is.", "It is otherwise.")
    write(claims=[claim], seeds=2, **settings)  # of which one was never run
    main(again)
    assert "- method FedAvg, seed 1: not run" in (tmp_path / "again" / "tiny.md").read_text()
    capsys.readouterr()
    with pytest.raises(SystemExit, match="Nothing of tiny is published in .*nowhere"):
        main([*args, str(tmp_path / "again"), "--published", str(tmp_path / "nowhere")])
    (tmp_path / "out" / "tiny_rounds.csv.gz").write_bytes(b"no gzip")
    with pytest.raises(SystemExit, match="Nothing of tiny is published|is damaged"):
        main(again)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["scaffold_quadratic"], "Did you mean 'scaffold_quadratics'"),
        ([], "name an experiment"),
        (["scaffold_quadratics", "--scale", "ful"], "Did you mean 'full'"),
        (["nowhere.yaml"], "nowhere.yaml cannot be read"),
    ],
    ids=str,
)
def test_the_command_refuses_by_name(args: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main(["reproduce", *args])


def test_a_figure_that_hides_points_is_refused(write: Write, tmp_path: Path) -> None:
    axes = {"G": {"key": "data.init_args.G", "values": [1, 10]}}
    with pytest.raises(SystemExit, match="the axis G has the labels 1, 10"):
        main(["reproduce", str(write(axes=axes, figures={"f": {}})), "--out", str(tmp_path / "out")])


@pytest.mark.thorough
def test_the_paths_of_clients_are_drawn(write: Write, tmp_path: Path) -> None:
    base = {
        "model": {
            "class_path": "lightning_fed.models.LinearRegression",
            "init_args": {"in_features": 2, "bias": False},
        },
        "data": {"class_path": "lightning_fed.data.LeastSquares", "init_args": {"num_clients": 2, "dim": 2}},
        "trainer": {"max_rounds": 2, "local_steps": 3, "precision": "64-true"},
    }
    keep = {"trainer.callbacks": [{"class_path": "lightning_fed.callbacks.LocalIterates"}]}
    figures = {"paths": {"kind": "paths", "rounds": 2}}
    wanted = {"base": base, "metrics": {"val_loss": {"mode": "min"}}, "figures": figures}
    main(["reproduce", str(write(methods={"FedAvg": keep}, **wanted)), "--out", str(tmp_path / "out"), "--jobs", "0"])
    assert (tmp_path / "out" / "tiny_paths.png").stat().st_size > 5_000
    (cell,) = (tmp_path / "out" / "cells").glob("*/cell.json")
    rows = (cell.parent / "iterates" / "round_000001.csv").read_text().splitlines()
    assert rows[0] == "client,step,x0,x1"
    assert len(rows) == 1 + 2 * 4 + 2
    assert json.loads(cell.read_text())["status"] == "finished"
    with pytest.raises(SystemExit, match="put lightning_fed.callbacks.LocalIterates among"):
        main(["reproduce", str(write(methods={"FedAvg": {}}, **wanted)), "--out", str(tmp_path / "o"), "--jobs", "0"])


def test_the_list_shows_every_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    main(["reproduce", "--list"])
    assert "scaffold_quadratics" in capsys.readouterr().out


PAPERS = sorted((Path(__file__).parents[2] / "configs" / "papers").glob("*.yaml"))


def cells_of(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a cell for every label of an experiment, at every scale, with its configuration."""
    experiment = read_experiment(path)
    assert yaml.safe_load(path.read_text())
    for scale in experiment.scales:
        grid = Grid(experiment, scale)
        check_outputs(grid)
        one_of_each_label = {pair: p for p in grid.points for pair in p.labels}
        for point in one_of_each_label.values():
            cell = next(grid.cells(point, grid.tuned(point)[-1], range(1)))
            yield f"{path.name}: {cell}", grid.config(cell)


def said_in(config: Any, path: tuple[Any, ...] = ()) -> set[tuple[Any, ...]]:
    """Return every key that a configuration has, with its value unless that is a number."""
    if not isinstance(config, dict | list):
        return {(path, type(config) if isinstance(config, int | float) else config)}
    parts = config.items() if isinstance(config, dict) else enumerate(config)
    return set().union({(path, None)}, *(said_in(part, (*path, key)) for key, part in parts))


def test_whatever_the_experiments_of_papers_say_is_understood_in_some_cell() -> None:
    configurations, understood = Configurations(), set()
    for path in PAPERS:
        for name, config in cells_of(path):
            if not said_in(config) <= understood:
                configurations.complete(name, config)
                understood |= said_in(config)


@pytest.mark.thorough
@pytest.mark.parametrize("path", PAPERS, ids=lambda p: p.stem)
def test_every_experiment_of_a_paper_is_understood_at_every_scale(path: Path) -> None:
    configurations = Configurations()
    for name, config in cells_of(path):
        configurations.complete(name, config)
