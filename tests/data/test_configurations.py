"""Every data module and partition can be created from a configuration, and then shows its clients."""

import json
import sys

import numpy as np
import pytest
import yaml
from PIL import Image

from lightning_fed import data
from lightning_fed.cli.data import picture
from lightning_fed.cli.main import main
from lightning_fed.data import FederatedDataModule, Partition, skew_table
from tests.behaviour.test_tasks import TASKS
from tests.data.test_datamodule import from_configuration
from tests.helpers.optional import needs_matplotlib, needs_pyarrow


def csv_table(folder):
    (folder / "t.csv").write_text("who;a;c;b\nann;1,5;f;x\nann;;m;y\nbob;3;f;x\nbob;4;f;x\n")
    roles = {"path": str(folder / "t.csv"), "client": "who", "target": "b", "features": ["a", "c"], "val_fraction": 0.0}
    rules = {"classes": ["x", "y"], "categories": {"c": ["f", "m"]}, "missing": {"a": "client_mean"}}
    return {**roles, **rules, "decimal": ",", "delimiter": ";"}


def arrays(folder):
    for name, size in (("ann", 2), ("bob", 2)):
        (folder / name).mkdir()
        np.savez(folder / name / "train.npz", x=np.zeros((size, 1, 2, 2)), y=np.arange(size))
    flatten = {"class_path": "lightning_fed.data.Flatten"}
    return {"root": str(folder), "cache_size": 1, "transform": [flatten]}


def images(folder):
    for name in ("ann/cat", "ann/dog", "bob/cat", "bob/dog"):
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(folder / name / "0.png")
    return {"root": str(folder), "classes": ["cat", "dog"]}


def leaf(folder):
    users = {name: {"x": [[0.0], [1.0]], "y": [0, 1]} for name in ("ann", "bob")}
    content = {"users": list(users), "num_samples": [2, 2], "user_data": users}
    (folder / "train.json").write_text(json.dumps(content))
    return {"train_path": str(folder / "train.json"), "num_classes": 2}


FILES = {"ClientTable": csv_table, "ClientFolder": arrays, "ClientImages": images, "LeafDataModule": leaf}
READ_LATER = {"CIFAR100": {"root": "data", "num_clients": 20, "augment": False}}
PARTITIONS = {
    "Iid": {},
    "Dirichlet": {"alpha": 0.5},
    "BalancedDirichlet": {"alpha": 0.5, "concentration": "total"},
    "Shards": {"shards_per_client": 3},
    "Similarity": {"similarity": 0.1},
    "ClassesPerClient": {"classes_per_client": 3},
    "PowerLaw": {"min_per_class": 2},
    "LogNormalSizes": {"sigma": 1.0},
    "QuantitySkew": {"alpha": 0.5},
}
ELSEWHERE = {
    *(yaml.safe_load(path.read_text())["data"]["class_path"].rpartition(".")[2] for path in TASKS),  # test_tasks.py
    *("Digits", "FederatedDataModule", "ByKey", "FeatureShift", "Partition"),  # test_picture, _datamodule, _shift
}


@pytest.fixture(autouse=True)
def _command_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])


TABLE = ["clients              2 (0 empty)", "examples             4 of 2 classes"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_pyarrow) if name == "ClientTable" else name for name in FILES]
)
def test_file_based_module_shows_its_clients(name, tmp_path):
    made = from_configuration(f"lightning_fed.data.{name}", **FILES[name](tmp_path))
    made.prepare_data()
    made.setup("fit")
    assert str(skew_table(made)).splitlines()[:2] == TABLE


@needs_matplotlib
def test_command_shows_the_clients_of_a_file_based_module(tmp_path, capsys):
    (tmp_path / "files").mkdir()
    section = {"class_path": "lightning_fed.data.ClientFolder", "init_args": arrays(tmp_path / "files")}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"data": section}))
    picture(["--config", str(tmp_path / "config.yaml"), "--out", str(tmp_path / "split.png")])
    assert capsys.readouterr().out.splitlines()[:2] == TABLE
    assert (tmp_path / "split.png").stat().st_size > 1000


@pytest.mark.parametrize("name", READ_LATER)
def test_module_can_be_created_without_its_files(name):
    made = from_configuration(f"lightning_fed.data.{name}", **READ_LATER[name])
    assert type(made) is getattr(data, name)
    assert made.partition.num_clients == 20


@pytest.mark.parametrize("name", PARTITIONS)
def test_partition_matches_the_one_created_in_python(name):
    init_args = {"num_clients": 20, "seed": 3, **PARTITIONS[name]}
    made = from_configuration(
        "lightning_fed.data.Digits", partition={"class_path": f"lightning_fed.data.{name}", "init_args": init_args}
    )
    assert repr(made.partition) == repr(getattr(data, name)(**init_args))
    assert made.num_clients == 20


ONE, CROP = "lightning_fed.data.ToFloat", "lightning_fed.data.RandomCrop"
SEVERAL = [ONE, {"class_path": "lightning_fed.data.Shrink", "init_args": {"factor": 2}}]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "functions",
    [
        {
            "transform": ONE,
            "augment": ["lightning_fed.data.RandomFlip", {"class_path": CROP, "init_args": {"padding": 2}}],
        },
        {"transform": SEVERAL},
    ],
)
def test_batch_functions_are_saved_as_written(functions, tmp_path, capsys):
    section = {"class_path": "lightning_fed.data.CIFAR100", "init_args": functions}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"data": section, "model": "lightning_fed.models.ResNet"}))
    with pytest.raises(SystemExit):
        main(["fit", "--config", str(tmp_path / "config.yaml"), "--print_config"])
    saved = yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]
    for name, given in functions.items():
        classes = [{"class_path": entry} if isinstance(entry, str) else entry for entry in np.atleast_1d(given)]
        assert np.atleast_1d(saved[name]).tolist() == classes


def test_every_public_class_is_covered():
    kinds = (FederatedDataModule, Partition)
    public = {
        name for name in data.__all__ if isinstance(found := getattr(data, name), type) and issubclass(found, kinds)
    }
    assert public == {*FILES, *READ_LATER, *PARTITIONS, *ELSEWHERE}
