"""The points of a grid, their cells, and the tuned values at each."""

from typing import Any

import pytest
import torch

from lightning_fed import FederatedError
from lightning_fed.cli.configuration import CellParts
from lightning_fed.lab.grid import Grid
from lightning_fed.lab.reading import read_experiment
from tests.helpers.lab import Write

LR = {"key": "model.init_args.lr", "values": [0.1, 0.2]}
TUNE = {"by": "final", "grid": {"lr": LR}}
LESS = [{"what": "rounds", "paper": "3", "here": "one", "why": "it is quicker"}]


def test_grid_is_the_product_without_skipped_points(write: Write) -> None:
    axes = {"G": {"key": "data.init_args.G", "values": [1, 10]}, "K": {"key": "trainer.local_steps", "values": [1, 2]}}
    grid = Grid(read_experiment(write(axes=axes, skip=[{"method": "FedAvg", "K": [2]}])))
    assert [str(p) for p in grid.points] == [
        "G 1, K 1, method FedAvg", "G 1, K 1, method SCAFFOLD", "G 1, K 2, method SCAFFOLD",
        "G 10, K 1, method FedAvg", "G 10, K 1, method SCAFFOLD", "G 10, K 2, method SCAFFOLD",
    ]  # fmt: skip


def test_later_override_wins(write: Write) -> None:
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


def test_labels_override_what_is_tuned(write: Write) -> None:
    own = {"key": "trainer.server_optimizer.init_args.lr", "values": [1, 2, 3]}
    methods = {
        "SGD": {"tune": {"lr": own}},
        "FedAvg": {},
        "FedProx": {"tune": {"mu": {"key": "trainer.x", "values": [5]}}},
    }
    axes = {"rate": {"fixed": {"tune": {"lr": [0.5]}}, "free": {}}}
    grid = Grid(read_experiment(write(methods=methods, axes=axes, tune=TUNE)))
    found = {str(p): [dict(t) for t in grid.tuned(p)] for p in grid.points}
    assert found["rate fixed, method SGD"] == [{"lr": "0.5"}]  # the key that SGD tunes
    assert len(found["rate free, method SGD"]) == 3
    assert found["rate free, method FedProx"] == [{"lr": "0.1", "mu": "5"}, {"lr": "0.2", "mu": "5"}]
    sgd = next(p for p in grid.points if str(p) == "rate fixed, method SGD")
    config = grid.config(next(grid.cells(sgd, grid.tuned(sgd)[0], range(1))))
    assert config["trainer"]["server_optimizer"]["init_args"]["lr"] == 0.5


def test_scale_values_change_the_grid_but_not_values_of_labels(write: Write) -> None:
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


def test_scale_overrides_what_a_label_tunes(write: Write) -> None:
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


def test_method_can_tune_without_a_grid(write: Write) -> None:
    methods = {"SGD": {"tune": {"lr": LR}}, "FedAvg": {}}
    grid = Grid(read_experiment(write(methods=methods, tune={"by": "final"})))
    assert [len(grid.tuned(p)) for p in grid.points] == [2, 1]


def test_values_that_do_not_fit_the_key_are_rejected_with_location(write: Write) -> None:
    two = {"key": ["trainer.a", "trainer.b"], "values": [[1, 2]]}
    methods = {"FedAvg": {"tune": {"sizes": two}}}
    scales = {"full": {"methods": {"FedAvg": {"tune": {"sizes": [3]}}}}}
    grid = Grid(read_experiment(write(methods=methods, tune={"by": "final"}, scales=scales)))
    with pytest.raises(FederatedError, match=r"tiny.yaml, method FedAvg: tune.sizes: each .* a list of 2"):
        grid.tuned(grid.points[0])


def test_scale_keeps_only_the_parts_it_names(write: Write) -> None:
    scales = {"full": {}, "small": {"departures": LESS, "methods": ["FedAvg"], "seeds": 1, "tune": {"lr": [0.3]}}}
    experiment = read_experiment(write(scales=scales, seeds=3, tune=TUNE))
    grid = Grid(experiment, "small")
    assert [str(p) for p in grid.points] == ["method FedAvg"]
    assert grid.seeds == 1
    assert grid.tuned(grid.points[0]) == [(("lr", "0.3"),)]
    assert Grid(experiment).seeds == 3
    with pytest.raises(FederatedError, match="no scale 'smal'"):
        Grid(experiment, "smal")


def test_seed_draws_the_data_when_set_per_seed(write: Write) -> None:
    synthetic = {"class_path": "lightning_fed.data.Synthetic", "init_args": {"num_clients": 3, "seed": "per_seed"}}
    partition = {"class_path": "lightning_fed.data.Iid", "init_args": {"num_clients": 3, "seed": "per_seed"}}
    digits = {"class_path": "lightning_fed.data.Digits", "init_args": {"partition": partition}}
    methods = {"drawn": {"data": synthetic}, "divided": {"data": digits}, "fixed": {}}
    grid = Grid(read_experiment(write(methods=methods, random=True, seeds=3)))
    configs = [[grid.config(cell)["data"]["init_args"] for cell in grid.cells(p, (), range(3))] for p in grid.points]
    assert [arguments["seed"] for arguments in configs[0]] == [0, 1, 2]
    assert [arguments["partition"]["init_args"]["seed"] for arguments in configs[1]] == [0, 1, 2]
    assert configs[2][0] == configs[2][1] == configs[2][2]
    first, second = (CellParts(grid.config(cell)).datamodule for cell in grid.cells(grid.points[0], (), range(2)))
    assert not torch.equal(first.val.tensors[0], second.val.tensors[0])
