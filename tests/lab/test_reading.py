"""What is wrong with a file is named before anything runs."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_fed import FederatedError
from lightning_fed.lab.axes import read_axis
from lightning_fed.lab.checking import check_outputs
from lightning_fed.lab.configurations import Configurations
from lightning_fed.lab.grid import Grid
from lightning_fed.lab.outputs import read_figures
from lightning_fed.lab.quantities import Metric
from lightning_fed.lab.reading import read_experiment
from lightning_fed.lab.reading_claims import ClaimReader
from lightning_fed.lab.yaml_files import read_yaml

Write = Callable[..., Path]
LR = {"key": "model.init_args.lr", "values": [0.1, 0.2]}
TUNE = {"by": "final", "grid": {"lr": LR}}
LESS = [{"what": "rounds", "paper": "3", "here": "one", "why": "it is quicker"}]
CLAIM = {"says": "So.", "source": "Table 1", "claim": "SCAFFOLD < FedAvg", "quantity": "final"}


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
        ({"methods": {"a < b": {}}}, "methods: a claim cannot name the label 'a < b'"),
        ({"methods": {"a ~": {}}}, "cannot name the label 'a ~'"),
        ({"methods": {"2 * a": {}}}, "cannot name the label '2 \\* a'"),
        ({"methods": {"a ": {}}}, "cannot name the label 'a '"),
        ({"methods": {"": {}}}, "cannot name the label ''"),
        ({"axes": {"x": {"key": "trainer.x", "values": ["a >= b"]}}}, "axes.x: a claim cannot name the label"),
        ({"skip": [{"method": "FedAvgg"}]}, "Did you mean 'FedAvg'"),
        ({"skip": [{}]}, "names nothing"),
        ({"tune": {"by": "finale", "grid": {"lr": LR}}}, "no quantity"),
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
        ({"claims": [{**CLAIM, "at": {"method": "FedAvg"}}]}, "method is compared, .* Name it once"),
        ({"claims": [{**CLAIM, "scales": ["huge"]}]}, "no scale 'huge'"),
        ({"claims": [{**CLAIM, "mean_over": "G"}]}, r"claims\[1\].mean_over: there is no axis 'G'"),
        ({"claims": [{**CLAIM, "mean_over": [["G"]]}]}, "no axis"),
        ({"claims": [{**CLAIM, "mean_over": ["method"]}]}, "method is compared, .* Name it once"),
        ({"claims": [{**CLAIM, "within": 2}]}, "between 0 and 1"),
        ({"claims": [{k: v for k, v in CLAIM.items() if k != "source"}]}, r"claims\[1\] lacks source"),
        ({"claims": [{**CLAIM, "paper": 0.5}]}, r"claims\[1\].paper must be a text, found 0.5. Put numbers in quotes"),
        ({"claims": [{**CLAIM, "controls": [CLAIM]}]}, r"controls\[1\]: there is no key 'source'"),
        ({"claims": [{**CLAIM, "difference": {"method": ["FedAvg", "SCAFFOLD"]}}]}, "method is compared, .* once"),
        ({"claims": [{**CLAIM, "difference": {"method": ["FedAvg"]}}]}, "an axis and two of its labels"),
        ({"departures": [{"what": "rounds"}]}, r"departures\[1\] lacks paper, here, why"),
        ({"departures": "rounds"}, "departures must be a list"),
        ({"random": "no"}, "random must be True or False"),
        ({"metrics": {"val_acc": {"mode": "max", "percent": 100}}}, "percent must be True or False"),
        ({"tables": {"t": {"value": "final", "paper": {"FedAv": 1}}}}, "no label of method 'FedAv'"),
        ({"tables": {"t": {"value": "final", "paper": {"FedAvg": "1"}}}}, "the paper's number must be a finite number"),
        ({"figures": {"f": {"marks": [{"at": {"method": "FedAvg"}}]}}}, r"marks\[1\] lacks y"),
        ({"scales": {"small": {"departures": LESS}}}, "lacks full"),
        ({"scales": {"full": {}, "small": {}}}, "say in `departures`"),
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
        ("a: &a {x: 1, x: 2}\nb: {<<: *a}\n", "'x' comes twice"),
        ("a: &a {x: 1}\nb: {<<: *a, <<: *a}\n", "'<<' comes twice"),
        ("a: {<<: 3}\n", "for merging"),
        ("? [a, b]\n: 1\n", "a key has parts"),
    ],
)
def test_yaml_that_is_not_what_it_seems_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(FederatedError, match=message):
        read_yaml(tmp_path / "bad.yaml")


def test_merge_keys_put_one_mapping_into_another_that_wins(tmp_path: Path) -> None:
    (tmp_path / "merged.yaml").write_text(
        "a: &a {x: 1, y: 2}\nb: &b {<<: *a, y: 3}\nc: {<<: *b, x: 4}\nd: {<<: [*b, *a], z: 5}\n"
    )
    found = read_yaml(tmp_path / "merged.yaml")
    assert found == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": {"x": 4, "y": 3}, "d": {"x": 1, "y": 3, "z": 5}}


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


def test_a_scales_list_is_for_the_grid_and_leaves_what_labels_say_of_their_own(write: Write) -> None:
    own = {"key": "trainer.server_optimizer.init_args.lr", "values": [1, 2, 3]}
    methods = {
        "plain": {},
        "another key": {"tune": {"lr": own}},
        "other values": {"tune": {"lr": [0.001, 0.002]}},
        "another name": {"tune": {"server lr": own}},
    }
    axes = {"rate": {"fixed": {"tune": {"lr": [0.5]}}, "free": {}}}
    scales = {"full": {}, "small": {"departures": LESS, "tune": {"lr": [0.3], "server lr": [4, 5]}}}
    experiment = read_experiment(write(methods=methods, axes=axes, tune=TUNE, scales=scales))

    def tuned(scale: str) -> dict[str, list[Any]]:
        grid = Grid(experiment, scale)
        return {str(p): [",".join(v for _, v in t) for t in grid.tuned(p)] for p in grid.points}

    full, small = tuned("full"), tuned("small")
    assert small["rate free, method plain"] == ["0.3"]
    assert small["rate free, method another key"] == full["rate free, method another key"] == ["1", "2", "3"]
    assert small["rate free, method other values"] == full["rate free, method other values"] == ["0.001", "0.002"]
    assert full["rate free, method another name"] == ["0.1,1", "0.1,2", "0.1,3", "0.2,1", "0.2,2", "0.2,3"]
    assert small["rate free, method another name"] == ["0.3,4", "0.3,5"]  # the grid has no such name
    assert small["rate fixed, method another key"] == full["rate fixed, method another key"] == ["0.5"]


def test_a_scale_says_what_a_label_tunes(write: Write) -> None:
    own = {"key": "trainer.server_optimizer.init_args.lr", "values": [1, 2, 3]}
    mu = {"key": "trainer.algorithm.init_args.mu", "values": [0.5]}
    beta = {"key": "trainer.local_steps", "values": [1]}
    methods = {"SGD": {"tune": {"lr": own, "beta": beta}}, "FedAvg": {}, "FedProx": {}, "left out": {}}
    sgd = {"tune": {"lr": [7], "beta": [8]}, "trainer.precision": 64}
    kept = {"SGD": sgd, "FedAvg": None, "FedProx": {"tune": {"mu": mu}}}
    axes = {"a": {"x": {}, "y": {}}}
    small = {
        "departures": LESS,
        "methods": kept,
        "axes": {"a": {"y": {"tune": {"lr": [0.4]}}, "x": {}}},
        "tune": {"lr": [0.3], "beta": [6]},
    }
    experiment = read_experiment(write(methods=methods, axes=axes, tune=TUNE, scales={"full": {}, "small": small}))
    grid = Grid(experiment, "small")
    found = {str(p): [dict(t) for t in grid.tuned(p)] for p in grid.points}
    assert found == {
        "a x, method SGD": [{"lr": "7", "beta": "8"}],
        "a x, method FedAvg": [{"lr": "0.3"}],
        "a x, method FedProx": [{"lr": "0.3", "mu": "0.5"}],
        "a y, method SGD": [{"lr": "0.4", "beta": "8"}],
        "a y, method FedAvg": [{"lr": "0.4"}],
        "a y, method FedProx": [{"lr": "0.4", "mu": "0.5"}],
    }
    config = grid.config(next(grid.cells(grid.points[0], grid.tuned(grid.points[0])[0], range(1))))
    assert config["trainer"]["server_optimizer"]["init_args"]["lr"] == 7
    assert [config["trainer"][name] for name in ("local_steps", "precision")] == [8, 64]
    assert [len(Grid(experiment).tuned(p)) for p in Grid(experiment).points[:3]] == [3, 2, 2]


def test_a_method_alone_can_tune(write: Write) -> None:
    methods = {"SGD": {"tune": {"lr": LR}}, "FedAvg": {}}
    grid = Grid(read_experiment(write(methods=methods, tune={"by": "final"})))
    assert [len(grid.tuned(p)) for p in grid.points] == [2, 1]


def test_values_that_do_not_fit_the_key_are_refused_with_file_and_place(write: Write) -> None:
    two = {"key": ["trainer.a", "trainer.b"], "values": [[1, 2]]}
    methods = {"FedAvg": {"tune": {"sizes": two}}}
    scales = {"full": {"methods": {"FedAvg": {"tune": {"sizes": [3]}}}}}
    grid = Grid(read_experiment(write(methods=methods, tune={"by": "final"}, scales=scales)))
    with pytest.raises(FederatedError, match=r"tiny.yaml, method FedAvg: tune.sizes: each .* a list of 2"):
        grid.tuned(grid.points[0])


@given(st.text(alphabet="a1 <>=~*\t", min_size=1, max_size=9))
def test_a_label_that_is_not_refused_is_read_as_itself_in_a_claim(label: str) -> None:
    try:
        axis = read_axis("axes.x", "x", {label: {}, "b": {}})
    except FederatedError:
        assume(False)
    entry = {"says": "", "source": "Table 1", "claim": f"{label} < b <= {label}", "quantity": "final", "compare": "x"}
    metrics = {"loss": Metric("loss", "min", "loss")}
    (claim,) = ClaimReader({"x": tuple(axis.choices)}, metrics, ()).read("", [entry])
    assert claim.terms == ((1.0, label), (1.0, "b"), (1.0, label))


def test_a_scale_keeps_what_it_names(write: Write) -> None:
    scales = {"full": {}, "small": {"departures": LESS, "methods": ["FedAvg"], "seeds": 1, "tune": {"lr": [0.3]}}}
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


@pytest.mark.parametrize(
    ("config", "meant"),
    [
        ({"model": {"class_path": "MLPClassifier", "init_args": {"lrr": 1}}}, "Did you mean lr instead of lrr?"),
        ({"trainer": {"algorithm": "lightning_fed.algorithms.FedProxx"}}, "Did you mean FedProx instead of FedProxx?"),
        ({"trainer": {"max_round": 3}}, "Did you mean trainer.max_rounds instead of trainer.max_round?"),
    ],
)
def test_a_mistake_in_a_cell_is_answered_with_what_was_meant(config: dict[str, Any], meant: str) -> None:
    with pytest.raises(FederatedError, match=re.escape(meant)):
        Configurations().complete("a cell", config)


def read_yaml_text(folder: Path, text: str) -> dict[str, Any]:
    (folder / "part.yaml").write_text(text)
    return read_yaml(folder / "part.yaml")
