"""Errors in a file are reported before anything runs."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_fed.lab.adding import add_methods
from lightning_fed.lab.checking import check_outputs
from lightning_fed.lab.configurations import Configurations
from lightning_fed.lab.grid import Grid
from lightning_fed.lab.outputs import read_figures
from lightning_fed.lab.reading import PAPERS, read_experiment
from lightning_fed.lab.yaml_files import read_yaml
from tests.helpers.lab import Write, check_mistakes, of_paper

LR = {"key": "model.init_args.lr", "values": [0.1, 0.2]}
TUNE = {"by": "final", "grid": {"lr": LR}}
LESS = [{"what": "rounds", "paper": "3", "here": "one", "why": "it is quicker"}]
CLAIM = {"says": "So.", "source": "Table 1", "claim": "SCAFFOLD < FedAvg", "quantity": "final"}
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"titel": "x"}, "Did you mean 'title'"),
    ({"title": None}, "lacks title"),
    ({"title": 3}, "title must be a text"),
    ({"base": {"trainr": {}}}, "Did you mean 'trainer'"),
    ({"base": {"trainer": {"logger": False}}}, "runner's to set"),
    ({"base": "nowhere.yaml"}, "nowhere.yaml cannot be read"),
    ({"own": "yes"}, "own must be"),
    ({"metrics": {"val_distance": {"mode": "min", "cases": 0}}}, "cases must be an integer of at least 1"),
    ({"metrics": {"val_distance": {"mode": "min", "cases": {"method": 3}}}}, "a number for each label of an axis"),
    ({"metrics": {"val_distance": {"mode": "min", "cases": {"metod": {"FedAvg": 3}}}}}, "Did you mean 'method'"),
    ({"scales": {"full": {"cases": {"val_acc": 3}}}}, "scales.full.cases: there is no key 'val_acc'"),
    ({"tune": {"by": "finale", "grid": {"lr": LR}}}, "is not a quantity"),
    ({"tune": {"grid": {"lr": LR}}}, "lacks by"),
    ({"tune": {"by": "final", "grid": []}}, "must name what is tuned"),
    ({"tune": {"by": "final"}}, "nothing is tuned"),
    ({"tune": TUNE, "scales": {"full": {"tune": {"mu": [1]}}}}, "scales.full.tune: there is no tuned value 'mu'"),
    ({"tune": TUNE, "scales": {"full": {"tune": {"lr": LR}}}}, "scales.full.tune.lr must be a list of values"),
    ({"scales": {"full": {"methods": {"FedAvg": {"tune": {"lr": [1]}}}}}}, "scales.full.method.FedAvg.*no tune.by"),
    (
        {"tune": TUNE, "scales": {"full": {"methods": {"FedAvg": {"tune": {"mu": [1]}}}}}},
        "scales.full.method.FedAvg.tune: there is no tuned value 'mu'",
    ),
    ({"methods": {"A": {"tune": {"lr": [1]}}}}, "no tune.by"),
    ({"scales": {"full": {"also_by": "best"}}}, "scales.full.also_by: the file has no tune.by"),
    ({"tune": TUNE, "scales": {"full": {"also_by": "bests"}}}, "scales.full.also_by.*is not a quantity"),
    ({"tune": TUNE, "methods": {"A": {"tune": {"mu": [1]}}}}, "no tuned value 'mu'"),
    ({"tune": TUNE, "axes": {"size": LR}}, "tune.grid.lr would replace model.init_args.lr, .* of the axis size sets"),
    ({"metrics": ["val_acc"]}, "at least one metric, .*; found"),
    ({"seeds": 0}, "seeds must be an integer of at least 1"),
    ({"metrics": {}}, "at least one metric"),
    ({"metrics": {"val_acc": {"mode": "high"}}}, "mode must be max or min"),
    ({"random": "no"}, "random must be True or False"),
    ({"metrics": {"val_acc": {"mode": "max", "percent": 100}}}, "percent must be True or False"),
    ({"scales": {"small": {"departures": LESS}}}, "lacks full"),
    ({"scales": {"full": {}, "small": {}}}, "say in `departures`"),
    ({"scales": {"full": {"methods": ["FedAvgg"]}}}, "Did you mean 'FedAvg'"),
    ({"scales": {"full": {"axes": {"K": [1]}}}}, "no axis 'K'"),
]


def test_invalid_files_are_rejected(write: Write) -> None:
    check_mistakes(write, MISTAKES)


def test_base_files_are_merged_in_order(write: Write, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("trainer: {max_rounds: 9, callbacks: [1]}\nmodel: {class_path: a.Net}\n")
    base = read_experiment(write(base=["base.yaml", {"trainer.max_rounds": 2, "trainer.callbacks+": [2]}])).base
    assert base == {"trainer": {"max_rounds": 2, "callbacks": [1, 2]}, "model": {"class_path": "a.Net"}}


def test_files_in_the_documentation_are_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reproducing.md").read_text()
    whole, paths, mine, *_ = re.findall(r"^```yaml\n(.*?)^```$", page, flags=re.M | re.S)
    (tmp_path / "shown.yaml").write_text(whole)
    experiment = read_experiment(tmp_path / "shown.yaml")
    figures = read_yaml_text(tmp_path, paths)["figures"]
    assert read_figures("", figures, {"method": ("FedAvg",)}, experiment.metrics)[0].kind == "paths"
    (tmp_path / "mine.yaml").write_text(mine)
    added = add_methods(experiment, tmp_path / "mine.yaml")
    assert added.axes["method"].choices.keys() == {*experiment.axes["method"].choices, "Mine"}
    for scale in experiment.scales:
        check_outputs(Grid(added, scale))
        grid = Grid(experiment, scale)
        check_outputs(grid)
        point = grid.points[0]
        cell = next(grid.cells(point, grid.tuned(point)[-1], range(1)))
        Configurations().complete("shown", grid.config(cell))


def read_yaml_text(folder: Path, text: str) -> dict[str, Any]:
    (folder / "part.yaml").write_text(text)
    return read_yaml(folder / "part.yaml")


NAMES = sorted(path.stem for path in PAPERS.glob("*.yaml"))


def cells_of(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield one cell for every label of an experiment at every scale, with its configuration."""
    experiment = of_paper(name)
    for scale in experiment.scales:
        grid = Grid(experiment, scale)
        check_outputs(grid)
        one_of_each_label = {pair: p for p in grid.points for pair in p.labels}
        for point in one_of_each_label.values():
            cell = next(grid.cells(point, grid.tuned(point)[-1], range(1)))
            yield f"{name}: {cell}", grid.config(cell)


def said_in(config: Any, path: tuple[Any, ...] = ()) -> set[tuple[Any, ...]]:
    """Return every key of a configuration, with its value, or its type for numbers."""
    if not isinstance(config, dict | list):
        return {(path, type(config) if isinstance(config, int | float) else config)}
    parts = config.items() if isinstance(config, dict) else enumerate(config)
    return set().union({(path, None)}, *(said_in(part, (*path, key)) for key, part in parts))


@pytest.mark.thorough
def test_every_setting_of_paper_experiments_is_valid_in_some_cell() -> None:
    configurations = Configurations()
    left = [(said_in(config), name, config) for paper in NAMES for name, config in cells_of(paper)]
    assert left
    understood: set[tuple[Any, ...]] = set()
    while left:  # next, the cell with the most new settings
        said, name, config = max(left, key=lambda cell: len(cell[0] - understood))
        configurations.complete(name, config)
        understood |= said
        left = [cell for cell in left if not cell[0] <= understood]


@pytest.mark.thorough
@pytest.mark.parametrize("paper", NAMES)
def test_every_paper_experiment_is_valid_at_every_scale(paper: str) -> None:
    configurations = Configurations()
    for name, config in cells_of(paper):
        configurations.complete(name, config)
