"""Every key of a configuration refuses invalid values by name before any training."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_fed import FederatedTrainer
from lightning_fed.cli.main import main
from lightning_fed.data import Digits
from lightning_fed.models import MLPClassifier
from tests.helpers.command_line import one_stage
from tests.helpers.selection import few

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"
MODULES = {"trainer": FederatedTrainer, "model": MLPClassifier, "data": Digits}


@pytest.fixture(autouse=True)
def _no_training(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def training_step(*_: Any) -> None:
        pytest.fail("a client was trained")

    monkeypatch.setattr(MLPClassifier, "training_step", training_step)
    with one_stage("fit"):
        yield


def refusal(config: Path, *args: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a configuration and return the user's error message. A bare traceback fails the test."""
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", str(config), "--trainer.accelerator", "cpu", *args])
    assert stop.value.code not in (0, None)
    return capsys.readouterr().err.rpartition("error:")[2] + str(stop.value)  # drops the usage, which has every key


def changed(folder: Path, *keys: str, value: Any) -> Path:
    """Write the quickstart's configuration with one key changed, and return its path."""
    config = yaml.safe_load(QUICKSTART.read_text())
    place = config
    for key in keys[:-1]:
        place = place.setdefault(key, {})
    place[keys[-1]] = value
    (folder / "changed.yaml").write_text(yaml.safe_dump(config))
    return folder / "changed.yaml"


def keys() -> list[tuple[str, ...]]:
    """Return every key of the three sections."""
    own = [
        ("trainer", name)
        for name, p in inspect.signature(FederatedTrainer.__init__).parameters.items()
        if p.kind is p.KEYWORD_ONLY
    ]
    lightning = ("max_time", "limit_train_batches", "precision", "devices", "accumulate_grad_batches", "logger")
    parts = [(s, "init_args", name) for s in ("model", "data") for name in inspect.signature(MODULES[s]).parameters]
    return [*own, *(("trainer", name) for name in lightning), *parts]


FEW_KEYS = [  # one that the trainer checks, a class, one of Lightning's, and one of each other section
    *(("trainer", "clients_per_round"), ("trainer", "algorithm"), ("trainer", "logger")),
    *(("model", "init_args", "hidden"), ("data", "init_args", "alpha")),
]


@pytest.mark.parametrize("path", few([pytest.param(key, id=".".join(key)) for key in keys()], FEW_KEYS))
def test_config_key_rejects_unknown_mapping(
    path: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert path[-1] in refusal(changed(tmp_path, *path, value={"what": "is this"}), capsys=capsys)


def leaves(config: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of a configuration's values that are neither mappings nor lists of mappings."""
    for key, value in config.items() if isinstance(config, dict) else enumerate(config):
        if isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict)):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)


STACKED = sorted(f for f in CONFIGS.glob("*/*.yaml") if f.parent.name not in ("tasks", "papers"))
VALUES = [(file, path) for file in STACKED for path in leaves(yaml.safe_load(file.read_text()))]
FEW_FILES = {file.parent: file for file in STACKED}.values()  # one of each folder
FEW_VALUES = {file: path for file, path in VALUES if file in FEW_FILES}.items()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("file", "path"),
    [pytest.param(*v, marks=() if v in FEW_VALUES else pytest.mark.thorough) for v in VALUES],
    ids=lambda v: v.stem if isinstance(v, Path) else str(v[-1]),
)
def test_stackable_config_value_rejects_unknown_mapping(
    file: Path, path: tuple[Any, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = place = yaml.safe_load(file.read_text())
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = {"what": "is this"}
    (tmp_path / "changed.yaml").write_text(yaml.safe_dump(config))
    assert str(path[-1]) in refusal(QUICKSTART, "--config", str(tmp_path / "changed.yaml"), capsys=capsys)


WRONG: list[tuple[tuple[str, ...], Any, str]] = [
    (("trainer", "clients_per_round"), 0, "clients_per_round must be at least 1"),
    (("trainer", "clients_per_round"), 31, "clients_per_round=31 asks for more clients than the 30"),
    (("trainer", "clients_per_round"), -0.5, "clients_per_round"),
    (("trainer", "clients_per_round"), ".nan", "clients_per_round"),
    (("trainer", "local_epochs"), 0, "local_epochs must be an integer of at least 1"),
    (("trainer", "local_epochs"), 1.5, "local_epochs"),
    (("trainer", "local_epochs"), None, "pass local_epochs"),
    (("trainer", "local_steps"), 5, "local_epochs or local_steps, not both"),
    (("trainer", "max_rounds"), -2, "max_rounds must be an int"),
    (("trainer", "max_epochs"), 3, "max_rounds"),
    (("trainer", "max_steps"), -2, "max_steps"),
    (("trainer", "engine"), "warp", "engine"),
    (("trainer", "chunk_size"), 4, "chunk_size=4"),
    (("trainer", "weighting"), "sizes", "weighting"),
    (("trainer", "buffers"), "sum", "buffers"),
    (("trainer", "strategy"), "fsdp", "strategy"),
    (("trainer", "val_check_interval"), 0.5, "val_check_interval=0.5"),
    (("trainer", "check_val_every_n_epoch"), 0, "check_val_every_n_epoch"),
    (("trainer", "gradient_clip_val"), -1.0, "gradient_clip_val"),
    (("trainer", "algorithm"), "FedAvgg", "FedAvgg"),
    (("trainer", "algorithm"), {"class_path": "os.system"}, "algorithm"),
    (("trainer", "attack"), {"class_path": {"what": 1}}, "class_path must be the dotted name of a class, found a dict"),
    (("trainer", "algorithm"), {"class_path": "FedProx"}, "mu"),
    (("trainer", "algorithm"), {"class_path": "FedProx", "init_args": {"mu": -1}}, "FedProx(mu="),
    (("trainer", "algorithm"), {"class_path": "FedProx", "init_args": {"nu": 1}}, "nu"),
    (
        ("trainer", "attack"),
        {"class_path": "lightning_fed.server.SignFlipAttack", "init_args": {"clients": 1}},
        "SignFlipAttack(clients=1): clients must be a share",
    ),
    (("trainer", "sampler"), {"class_path": "lightning_fed.server.UniformSampler"}, "Both sampler="),
    (("trainer", "server_optimizer"), {"class_path": "lightning_fed.server.FedAdam", "init_args": {"tau": 0}}, "tau"),
    (("trainer", "callbacks"), [{"class_path": "lightning_fed.callbacks.TargetMetric"}], "monitor"),
    (("trainer", "max_round"), 3, "max_round"),
    (("model", "class_path"), "lightning_fed.models.Nobody", "Nobody"),
    (("model", "init_args", "num_classes"), 1, "num_classes"),
    (("model", "init_args", "hidden"), [0], "hidden"),
    (("model", "init_args", "lr"), -0.1, "lr"),
    (("model", "init_args", "lr"), float("nan"), "lr"),
    (("model", "init_args", "depth"), 3, "depth"),
    (("model", "init_args", "in_features"), 65, "in_features=65"),
    (("data", "class_path"), "lightning_fed.data.Nothing", "Nothing"),
    (("data", "class_path"), "os.system", "os.system"),
    (("data", "init_args", "alpha"), 0, "alpha"),
    (("data", "init_args", "num_clients"), -3, "num_clients"),
    (("data", "init_args", "num_clients"), 10**9, "num_clients"),
    (("data", "init_args", "test_fraction"), 1, "test_fraction"),
    (("data", "init_args", "batch_size"), 0, "batch_size"),
    (("data", "init_args", "alfa"), 1, "alfa"),
    (("dta",), {"batch_size": 3}, "dta"),
    (("seed_everything",), "many", "seed_everything"),
    (("ckpt_path",), "gone.ckpt", "gone.ckpt"),
]


FEW_MESSAGES = {  # from the parser, a class, the trainer, a pair of keys, and a check of the data
    *("clients_per_round=31 asks for more clients than the 30", "local_epochs or local_steps, not both"),
    "SignFlipAttack(clients=1): clients must be a share",
    *("FedAvgg", "Both sampler=", "max_round", "os.system"),
    "class_path must be the dotted name of a class, found a dict",
}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [pytest.param(*w, marks=() if w[-1] in FEW_MESSAGES else pytest.mark.thorough) for w in WRONG],
    ids=lambda v: str(v)[:40],
)
def test_invalid_value_is_rejected_with_clear_message(
    path: tuple[str, ...], value: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(changed(tmp_path, *path, value=value), capsys=capsys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Unexpected config"),
        ("a: [", "parsing config"),
        pytest.param("- 1\n- 2\n", "Unexpected config", marks=pytest.mark.thorough),
        ("trainer: !!python/object/apply:os.system ['touch ran']\n", "python/object/apply"),
        pytest.param("trainer: !!python/object/new:type {}\n", "python/object/new", marks=pytest.mark.thorough),
        pytest.param("\x00", "config", marks=pytest.mark.thorough),
    ],
)
def test_invalid_config_file_is_rejected_and_runs_no_code(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "changed.yaml").write_text(text)
    assert message in refusal(tmp_path / "changed.yaml", capsys=capsys)
    assert not (tmp_path / "ran").exists()


def test_error_names_the_missing_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "gone.yaml" in refusal(tmp_path / "gone.yaml", capsys=capsys)
    assert re.search("config|directory", refusal(tmp_path, capsys=capsys))
