"""What is wrong with a file is named before anything runs."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_fed import FederatedError
from lightning_fed.experiments.checking import check_outputs
from lightning_fed.experiments.configuration import Configurations
from lightning_fed.experiments.grid import Grid
from lightning_fed.experiments.outputs import read_figures
from lightning_fed.experiments.reading import read_experiment
from lightning_fed.experiments.yaml_files import read_yaml

Write = Callable[..., Path]
LR = {"key": "model.init_args.lr", "values": [0.1, 0.2]}
TUNE = {"by": "final", "grid": {"lr": LR}}
CLAIM = {"says": "So.", "claim": "SCAFFOLD < FedAvg", "quantity": "final"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"titel": "x"}, "Did you mean 'title'"),
        ({"title": None}, "lacks title"),
        ({"title": 3}, "title must be a text"),
        ({"base": {"trainr": {}}}, "Did you mean 'trainer'"),
        ({"base": {"trainer": {"logger": False}}}, "runner's to set"),
        ({"base": "nowhere.yaml"}, "nowhere.yaml cannot be read"),
        ({"methods": {"FedAvg": {"modl.lr": 1}}}, "methods.FedAvg.*Did you mean 'model'"),
        ({"methods": {}}, "methods must be labels"),
        ({"methods": {True: {}}}, "put it in quotes"),
        ({"axes": {"lr": {"key": "model.init_args.lr"}}}, "lacks values"),
        ({"axes": {"lr": {"key": "model.init_args.lr", "values": 3}}}, "must be a list"),
        ({"axes": {"lr": {"key": "model.init_args.lr", "values": [1, 1]}}}, "comes twice"),
        ({"axes": {"z": {"key": ["trainer.a", "trainer.b"], "values": [[1]]}}}, "a list of 2"),
        ({"axes": {"method": LR}}, "methods' own axis"),
        ({"skip": [{"method": "FedAvgg"}]}, "Did you mean 'FedAvg'"),
        ({"skip": [{}]}, "names nothing"),
        ({"tune": {"by": "finale", "grid": {"lr": LR}}}, "no quantity"),
        ({"tune": {"grid": {"lr": LR}}}, "lacks by"),
        ({"tune": {"by": "final", "grid": []}}, "must name what is tuned"),
        ({"methods": {"A": {"tune": {"lr": [1]}}}}, "no tune.by"),
        ({"tune": TUNE, "methods": {"A": {"tune": {"mu": [1]}}}}, "no tuned value 'mu'"),
        ({"seeds": 0}, "seeds must be an integer of at least 1"),
        ({"metrics": {}}, "at least one metric"),
        ({"metrics": {"val_acc": {"mode": "high"}}}, "mode must be max or min"),
        ({"figures": {"f": {"y": "val_dist"}}}, "Did you mean 'val_distance'"),
        ({"figures": {"f": {"columns": "nothing"}}}, "no axis 'nothing'"),
        ({"figures": {"f": {"columns": "method"}}}, "must be different axes"),
        ({"figures": {"f": {"log": ["z"]}}}, "log must be"),
        ({"figures": {"f": {"ylim": [1, 0]}}}, "two rising numbers"),
        ({"figures": {"f": {"x": "time"}}}, "no x 'time'"),
        ({"figures": {"a/b": {}}}, "letters, digits"),
        ({"tables": {"t": {"value": "final", "rows": "G"}}}, "no axis 'G'"),
        ({"claims": [{**CLAIM, "claim": "SCAFFOLD < FedAvgg"}]}, "Did you mean 'FedAvg'"),
        ({"claims": [{**CLAIM, "claim": "SCAFFOLD FedAvg"}]}, "labels and numbers with"),
        ({"claims": [{**CLAIM, "claim": "2 * FedAvgg < FedAvg"}]}, "no label 'FedAvgg'"),
        ({"claims": [{**CLAIM, "claim": "__import__('os') < 1"}]}, "no label"),
        ({"claims": [{**CLAIM, "quantity": "rounds to x"}]}, "no quantity"),
        ({"claims": [{**CLAIM, "compare": "G"}]}, "no axis 'G'"),
        ({"claims": [{**CLAIM, "at": {"method": "FedAvg"}}]}, "the axis that the claim compares"),
        ({"claims": [{**CLAIM, "scales": ["huge"]}]}, "no scale 'huge'"),
        ({"claims": [{**CLAIM, "within": 2}]}, "between 0 and 1"),
        ({"scales": {"small": {"changed": "x"}}}, "lacks full"),
        ({"scales": {"full": {}, "small": {}}}, "say in `changed`"),
        ({"scales": {"full": {"methods": ["FedAvgg"]}}}, "Did you mean 'FedAvg'"),
        ({"scales": {"full": {"axes": {"K": [1]}}}}, "no axis 'K'"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_mistake_is_named(write: Write, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        read_experiment(write(**changes))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", "'a' comes twice"),
        ("- 1\n", "must hold a mapping"),
        ("a: [1\n", "no valid YAML"),
        ("a: !!python/object/apply:os.getcwd []\n", "no valid YAML"),
    ],
)
def test_yaml_that_is_not_what_it_seems_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(FederatedError, match=message):
        read_yaml(tmp_path / "bad.yaml")


def test_numbers_without_a_point_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text("a: 1e-3\nb: 2E5\nc: 1e3x\n")
    assert read_yaml(tmp_path / "good.yaml") == {"a": 0.001, "b": 2e5, "c": "1e3x"}


def test_files_stack_as_a_base(write: Write, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("trainer: {max_rounds: 9, callbacks: [1]}\nmodel: {class_path: a.Net}\n")
    base = read_experiment(write(base=["base.yaml", {"trainer.max_rounds": 2, "trainer.callbacks+": [2]}])).base
    assert base == {"trainer": {"max_rounds": 2, "callbacks": [1, 2]}, "model": {"class_path": "a.Net"}}


def test_the_grid_is_the_product_without_what_is_skipped(write: Write) -> None:
    axes = {"G": {"key": "data.init_args.G", "values": [1, 10]}, "K": {"key": "trainer.local_steps", "values": [1, 2]}}
    grid = Grid(read_experiment(write(axes=axes, skip=[{"method": "FedAvg", "K": [2]}])))
    assert [str(p) for p in grid.points] == [
        "G 1, K 1, method FedAvg", "G 1, K 1, method SCAFFOLD", "G 1, K 2, method SCAFFOLD",
        "G 10, K 1, method FedAvg", "G 10, K 1, method SCAFFOLD", "G 10, K 2, method SCAFFOLD",
    ]  # fmt: skip


def test_the_later_override_wins(write: Write) -> None:
    axes = {"a": {"x": {"trainer.max_rounds": 10, "trainer.local_steps": 10}}}
    methods = {"FedAvg": {"trainer.local_steps": 20, "trainer.accumulate_grad_batches": 20}}
    scales = {
        "full": {"overrides": {"trainer.accumulate_grad_batches": 30}, "methods": {"FedAvg": {"trainer.precision": 64}}}
    }
    grid = Grid(read_experiment(write(axes=axes, methods=methods, scales=scales, tune=TUNE)), seeds=2)
    (point,) = grid.points
    first, second = grid.tuned(point)
    cell = list(grid.cells(point, second, range(2)))[1]
    config = grid.config(cell)
    trainer = config["trainer"]
    assert [trainer[k] for k in ("max_rounds", "local_steps", "accumulate_grad_batches", "precision")] == [
        10,
        20,
        30,
        64,
    ]
    assert config["model"]["init_args"]["lr"] == 0.2
    assert config["seed_everything"] == 1
    assert str(cell) == "a x, method FedAvg, lr 0.2, seed 1"
    assert dict(first) == {"lr": "0.1"}


def test_labels_tune_what_they_say(write: Write) -> None:
    own = {"key": "trainer.server_optimizer.init_args.lr", "values": [1, 2, 3]}
    methods = {
        "SGD": {"tune": {"lr": own}},
        "FedAvg": {},
        "FedProx": {"tune": {"mu": {"key": "trainer.x", "values": [5]}}},
    }
    axes = {"rate": {"fixed": {"tune": {"lr": [0.5]}}, "free": {}}}
    grid = Grid(read_experiment(write(methods=methods, axes=axes, tune=TUNE)))
    found = {str(p): [dict(t) for t in grid.tuned(p)] for p in grid.points}
    assert found["rate fixed, method SGD"] == [{"lr": "0.5"}]  # of the key that SGD tunes
    assert len(found["rate free, method SGD"]) == 3
    assert found["rate free, method FedProx"] == [{"lr": "0.1", "mu": "5"}, {"lr": "0.2", "mu": "5"}]
    sgd = next(p for p in grid.points if str(p) == "rate fixed, method SGD")
    config = grid.config(next(grid.cells(sgd, grid.tuned(sgd)[0], range(1))))
    assert config["trainer"]["server_optimizer"]["init_args"]["lr"] == 0.5


def test_a_scale_keeps_what_it_names(write: Write) -> None:
    scales = {"full": {}, "small": {"changed": "less", "methods": ["FedAvg"], "seeds": 1, "tune": {"lr": [0.3]}}}
    experiment = read_experiment(write(scales=scales, seeds=3, tune=TUNE))
    grid = Grid(experiment, "small")
    assert [str(p) for p in grid.points] == ["method FedAvg"]
    assert grid.seeds == 1
    assert grid.tuned(grid.points[0]) == [(("lr", "0.3"),)]
    assert Grid(experiment).seeds == 3
    with pytest.raises(FederatedError, match="no scale 'smal'"):
        Grid(experiment, "smal")


def test_the_files_that_the_documentation_shows_are_understood(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reproducing.md").read_text()
    whole, paths, *_ = re.findall(r"^```yaml\n(.*?)^```$", page, flags=re.M | re.S)
    (tmp_path / "shown.yaml").write_text(whole)
    experiment = read_experiment(tmp_path / "shown.yaml")
    figures = read_yaml_text(tmp_path, paths)["figures"]
    assert read_figures("", figures, {"method": ("FedAvg",)}, experiment.metrics)[0].kind == "paths"
    for scale in experiment.scales:
        grid = Grid(experiment, scale)
        check_outputs(grid)
        point = grid.points[0]
        cell = next(grid.cells(point, grid.tuned(point)[-1], range(1)))
        Configurations().complete("shown", grid.config(cell))


def read_yaml_text(folder: Path, text: str) -> dict[str, Any]:
    (folder / "part.yaml").write_text(text)
    return read_yaml(folder / "part.yaml")
