"""Files from elsewhere never execute code, and files that runs write load without executing any."""

import json
import math
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from packaging.requirements import Requirement
from pytorch_lightning.callbacks import EarlyStopping

from lightning_fed import FederatedError
from lightning_fed.algorithms import Scaffold
from lightning_fed.cli.main import main
from lightning_fed.data import ClientFolder, ClientImages, ClientTable, LeafDataModule, Sentiment140, Shakespeare
from lightning_fed.models import Classifier, MLPClassifier, SentimentLSTM
from lightning_fed.server import FedAdam, WeightedSampler
from tests.helpers.command_line import one_stage
from tests.helpers.selection import covering, few
from tests.helpers.training import Net, data, seeded, trainer

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
RUN = ("loops", "fit_loop", "state_dict")
INSTANTIATOR = "pytorch_lightning.cli.instantiate_module"


class Hostile:
    """An object that leaves a mark when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path("ran").touch, ()


@pytest.fixture(autouse=True)
def _nothing_runs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Add a module that leaves a mark when it is imported, and check for marks at the end."""
    Path("evil.py").write_text("from pathlib import Path\nimport torch\nPath('ran').touch()\nNet = torch.nn.Identity\n")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    yield
    assert "evil" not in sys.modules
    assert not Path("ran").exists()


def test_hostile_pickle_leaves_its_marker_when_loaded() -> None:
    pickle.loads(pickle.dumps(Hostile()))
    Path("ran").unlink()


# ------------------------------------------------------------------ checkpoints


@cache
def whole() -> bytes:
    """Return a checkpoint of a two-round run."""
    (run := trainer(max_rounds=2)).fit(Net(), data())
    run.save_checkpoint("whole.ckpt")
    return Path("whole.ckpt").read_bytes()


def checkpoint(**changes: Any) -> str:
    """Save a checkpoint of a run with some entries replaced, and return its path."""
    Path("whole.ckpt").write_bytes(whole())
    torch.save({**torch.load("whole.ckpt", weights_only=True), **changes}, "hostile.ckpt")
    return "hostile.ckpt"


def bare_pickle(**_: Any) -> str:
    Path("hostile.ckpt").write_bytes(pickle.dumps(Hostile()))
    return "hostile.ckpt"


def old_format(**_: Any) -> str:
    torch.save({"state_dict": Hostile()}, "hostile.ckpt", _use_new_zipfile_serialization=False)
    return "hostile.ckpt"


class Staged(Net):
    """A module for every stage."""

    test_step = Net.validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])


READERS: dict[str, Callable[[str], Any]] = {
    "fit": lambda path: trainer().fit(Staged(), data(), ckpt_path=path),
    "validate": lambda path: trainer().validate(Staged(), data(), ckpt_path=path),
    "test": lambda path: trainer().test(Staged(), data(test=data().val), ckpt_path=path),
    "predict": lambda path: trainer().predict(Staged(), data(test=data().val), ckpt_path=path),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ["gone.ckpt", "."])
def test_error_names_the_missing_checkpoint(name: str, reader: str) -> None:
    with pytest.raises(FederatedError, match=r"gone\.ckpt|\. is damaged|is not a file|It is a folder"):
        READERS[reader](name)


@pytest.mark.parametrize(("reader", "write"), covering([*READERS], [checkpoint, bare_pickle, old_format]))
def test_hostile_checkpoint_runs_no_code(reader: str, write: Callable[..., str]) -> None:
    with pytest.raises(FederatedError, match=r"hostile\.ckpt"):
        READERS[reader](write(callbacks=Hostile()))


@pytest.mark.parametrize("reader", READERS)
def test_tensor_file_that_is_not_a_checkpoint_is_rejected(reader: str) -> None:
    torch.save({"state_dict": Staged().state_dict()}, "hostile.ckpt")
    with pytest.raises(FederatedError, match=r"hostile\.ckpt is not a Lightning checkpoint"):
        READERS[reader]("hostile.ckpt")


@pytest.mark.parametrize("write", [checkpoint, bare_pickle, old_format])
def test_load_from_checkpoint_rejects_pickled_code(write: Callable[..., str]) -> None:
    with pytest.raises(pickle.UnpicklingError):
        Net.load_from_checkpoint(write(hyper_parameters=Hostile()))


@pytest.mark.parametrize("command", few(["fit", "validate", "test", "predict"], ["fit"]))
@pytest.mark.parametrize("write", few([checkpoint, bare_pickle], [checkpoint]))
def test_hostile_checkpoint_on_command_line_runs_no_code(write: Callable[..., str], command: str) -> None:
    args = ["--trainer.logger", "false", "--trainer.enable_model_summary", "false", "--trainer.accelerator", "cpu"]
    with one_stage(command), pytest.raises(SystemExit, match=r"hostile\.ckpt"):
        main([command, "--config", QUICKSTART, *args, "--ckpt_path", write(state_dict=Hostile())])


class Scheduled(Net):
    """A module with momentum and a schedule, so that every part of its checkpoints has content."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3)}


def resume(rounds: int, path: str | None = None) -> pl.Trainer:
    options = {"algorithm": Scaffold(), "server_optimizer": lambda p: FedAdam(p, lr=0.1)}
    run = trainer(max_rounds=rounds, local_optimizer_state="keep", callbacks=EarlyStopping("val_loss"), **options)
    run.fit(seeded(Scheduled), data(), ckpt_path=path)
    return run


LEAVE = object()
PARTS: list[tuple[Any, ...]] = [
    *((name,) for name in ("state_dict", "loops", "optimizer_states", "lr_schedulers", "pytorch-lightning_version")),
    *(("state_dict", "head.weight"), ("state_dict", "head.bias")),
    *(("loops", "fit_loop"), ("loops", "fit_loop", "state_dict"), ("optimizer_states", 0), ("lr_schedulers", 0)),
    *(("optimizer_states", 0, name) for name in ("state", "param_groups")),
    *((*RUN, name) for name in ("round", "seed", "algorithm", "options", "clients", "step", "state", "client_states")),
    *((*RUN, name) for name in ("buffers", "seen", "bytes", "metrics", "transport", "format")),
    *((*RUN, "step", name) for name in ("x", "optimizer", "classes")),
    *((*RUN, "step", "optimizer", name) for name in ("state", "param_groups")),
    *((*RUN, "client_states", 3), (*RUN, "client_states", 3, "c_i")),
]
JUNK = [LEAVE, None, "x", [], -5, 10**30, math.nan, torch.zeros(3), torch.tensor([10**12]), {"x": [None]}]


def told_of_another(place: tuple[Any, ...], junk: Any) -> list[str]:
    """Resume from a checkpoint with a changed part, and return any refusal that does not mention the checkpoint."""
    changed = part = torch.load("whole.ckpt", weights_only=True)
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = junk
    if junk is LEAVE:
        del part[place[-1]]
    torch.save(changed, "changed.ckpt")
    with suppress_refusal() as told:
        resume(3, "changed.ckpt")
    return [f"{place}={junk}: {text}" for text in told if not re.search("checkpoint|changed.ckpt", text)]


@pytest.mark.thorough
def test_error_for_missing_or_changed_part_names_the_checkpoint() -> None:
    resume(2).save_checkpoint("whole.ckpt")
    faults = [told_of_another(place, JUNK[1 + n % (len(JUNK) - 1)]) for n, place in enumerate(PARTS)]
    faults += [told_of_another(place, LEAVE) for place in PARTS[::3]]
    assert not [text for found in faults for text in found]


@pytest.mark.thorough
@pytest.mark.parametrize("place", PARTS, ids=lambda place: ".".join(map(str, place[-3:])))
def test_error_for_corrupt_part_names_the_checkpoint(place: tuple[Any, ...]) -> None:
    resume(2).save_checkpoint("whole.ckpt")
    for junk in JUNK:
        assert not told_of_another(place, junk)


@contextmanager
def suppress_refusal() -> Iterator[list[str]]:
    """Suppress a refusal, and yield a list that receives its text."""
    told: list[str] = []
    try:
        yield told
    except FederatedError as error:
        told.append(str(error))


def test_checkpoint_with_different_server_state_is_rejected() -> None:
    resume(2).save_checkpoint("whole.ckpt")
    changed = torch.load("whole.ckpt", weights_only=True)
    changed["loops"]["fit_loop"]["state_dict"]["state"]["c"] = torch.zeros(3)
    torch.save(changed, "changed.ckpt")
    with pytest.raises(FederatedError, match=r"server state 'c' has shape \[3\], this run's \[155\]"):
        resume(3, "changed.ckpt")


def test_checkpoint_with_more_than_max_rounds_is_rejected() -> None:
    resume(3).save_checkpoint("whole.ckpt")
    with pytest.raises(FederatedError, match=r"whole\.ckpt holds 3 completed rounds, more than max_rounds=2"):
        resume(2, "whole.ckpt")


HYPER_PARAMETERS = [
    {"_class_path": "evil.Net"},
    {"_instantiator": INSTANTIATOR, "_class_path": "evil.Net"},
    {"_instantiator": "evil.Net"},
    {"_instantiator": "os.system", "command": "touch ran"},
    {"hidden": {"class_path": "evil.Net"}, "num_classes": {"class_path": "evil.Net"}},
]


@pytest.mark.parametrize(
    ("hostile", "reader"),
    covering(HYPER_PARAMETERS, [*READERS]),
    ids=str,
)
def test_hostile_hyperparameters_run_no_code(hostile: dict[str, Any], reader: str) -> None:
    path = checkpoint(hyper_parameters=hostile)
    READERS[reader](path)  # it takes only weights and state
    if "_instantiator" in hostile:
        with pytest.raises(ValueError, match="blocked to prevent arbitrary code execution"):
            Net.load_from_checkpoint(path)


@pytest.mark.thorough
@pytest.mark.parametrize("hostile", HYPER_PARAMETERS, ids=str)
def test_command_line_builds_model_from_config_not_checkpoint(hostile: dict[str, Any]) -> None:
    content = {"state_dict": MLPClassifier().state_dict(), "pytorch-lightning_version": pl.__version__}
    torch.save({**content, "hyper_parameters": hostile}, "hostile.ckpt")
    args = ["--trainer.logger", "false", "--trainer.enable_model_summary", "false", "--trainer.accelerator", "cpu"]
    with one_stage("validate"):
        main(["validate", "--config", QUICKSTART, *args, "--ckpt_path", "hostile.ckpt"])


def test_network_named_in_hyperparameters_is_rejected() -> None:
    hostile = {"net": {"class_path": "evil.Net"}, "num_classes": 2}
    content = {"state_dict": {}, "pytorch-lightning_version": pl.__version__}
    torch.save({**content, "hyper_parameters": hostile}, "hostile.ckpt")
    with pytest.raises(FederatedError, match="net must be a torch.nn.Module"):
        Classifier.load_from_checkpoint("hostile.ckpt")


def test_saved_checkpoint_loads_with_weights_only() -> None:
    checkpoint()
    assert torch.load("whole.ckpt", weights_only=True)["loops"]["fit_loop"]["state_dict"]["round"] == 2


# ------------------------------------------------------------------ data


def folder(name: str = "ann") -> Path:
    (place := Path("clients") / name).mkdir(parents=True)
    return place


def arrays(path: Path, x: Any = None) -> None:
    np.savez(path, x=np.zeros((2, 3)) if x is None else x, y=np.zeros(2, dtype=int))


def test_object_arrays_are_not_unpickled() -> None:
    arrays(folder() / "train.npz", x=np.array([Hostile(), None], dtype=object))
    with pytest.raises(FederatedError, match=r"train\.npz is damaged, or holds more than arrays of numbers"):
        ClientFolder("clients").client_dataset("ann")


def test_hostile_tensor_file_is_not_unpickled() -> None:
    torch.save({"x": Hostile(), "y": torch.zeros(2)}, folder() / "train.pt")
    with pytest.raises(FederatedError, match=r"train\.pt is damaged, or holds more than arrays of numbers"):
        ClientFolder("clients").client_dataset("ann")


@pytest.mark.parametrize("dtype", [object, float])
def test_hostile_word_vectors_are_not_unpickled(dtype: Any) -> None:
    np.save("vectors.npy", np.array([[Hostile()]], dtype=object) if dtype is object else np.zeros((3, 4)))
    with pytest.raises(FederatedError, match=r"vectors\.npy"):
        SentimentLSTM(10, embedding_dim=2, vectors="vectors.npy")


@pytest.mark.parametrize("client_id", ["..", "../outside", "/etc", "ann/../../outside", "."])
def test_client_id_is_not_treated_as_a_path(client_id: str) -> None:
    arrays(folder() / "train.npz")
    Path("outside").mkdir()
    arrays(Path("outside") / "train.npz")
    with pytest.raises(FederatedError, match="has no client folder"):
        ClientFolder("clients").client_dataset(client_id)


def test_links_outside_the_folder_are_rejected() -> None:
    Path("outside/cat").mkdir(parents=True)
    arrays(Path("outside") / "train.npz")
    (Path("outside") / "cat" / "0.png").touch()
    (folder() / "train.npz").symlink_to(Path("outside/train.npz").resolve())
    (Path("clients") / "bob").symlink_to(Path("outside").resolve())
    for client_id in ("ann", "bob"):
        with pytest.raises(FederatedError, match="leads out of clients"):
            ClientFolder("clients").client_dataset(client_id)
    with pytest.raises(FederatedError, match="leads out of clients"):
        ClientImages("clients", ["cat"]).client_dataset("bob")
    (Path("clients") / "val.npz").symlink_to(Path("outside/train.npz").resolve())
    with pytest.raises(FederatedError, match="leads out of clients"):
        ClientFolder("clients").setup()


def test_links_inside_the_folder_are_followed() -> None:
    arrays(folder() / "all.npz")
    (Path("clients") / "ann" / "train.npz").symlink_to("all.npz")
    assert len(ClientFolder("clients").client_dataset("ann")) == 2


HOSTILE_JSON = [
    '{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[1' + "0" * 5000 + ']], "y": [0]}}}',
    '{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[1e999]], "y": [0]}}}',
    '{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[NaN]], "y": [0]}}}',
    "[" * 100_000,
    '{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[{"__reduce__": "os.system"}]], "y": [0]}}}',
    '{"users": ["a"], "num_samples": [-1], "user_data": {"a": {"x": [], "y": []}}}',
    '{"users": ["a"], "num_samples": [1], "user_data": {}}',
    '{"users": [["a"]], "num_samples": [1], "user_data": {"a": {"x": [[1]], "y": [0]}}}',
    '{"users": "a", "num_samples": 1, "user_data": []}',
    '{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[1]], "y": [1e30]}}}',
    "null",
    "",
    "\x00",
]


@pytest.mark.parametrize("text", HOSTILE_JSON, ids=lambda t: t[:60])
def test_error_for_hostile_json_names_its_path(text: str) -> None:
    Path("train.json").write_text(text)
    with pytest.raises(FederatedError, match=r"train\.json"):
        LeafDataModule("train.json").setup()


def test_user_name_is_not_treated_as_a_path() -> None:
    users = {name: {"x": [[0.0], [1.0]], "y": [0, 1]} for name in ("../../etc/passwd", "/etc/shadow", "..")}
    Path("train.json").write_text(json.dumps({"users": list(users), "num_samples": [2] * 3, "user_data": users}))
    (module := LeafDataModule("train.json")).setup()
    assert list(module.client_ids) == list(users)
    assert len(module.client_dataset("..")) == 2


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00\xff\xfe", b"who,a,b\n", b"who,a,b\nann\n", b'who,a,b\n"' + b"x" * 200_000, b"who,a,b\nann,nan,x\n"],
    ids=repr,
)
def test_error_for_hostile_table_names_its_path(content: bytes) -> None:
    Path("table.csv").write_bytes(content)
    with pytest.raises(FederatedError, match=r"table\.csv"):
        ClientTable("table.csv", client="who", target="b", features=["a"]).setup()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"{}", b"[[[", b'{"a": NaN}', b'{"a": 1e999}'])
def test_hostile_weights_file_is_rejected(content: bytes) -> None:
    Path("weights.json").write_bytes(content)
    with pytest.raises(FederatedError):
        WeightedSampler(1, weights="weights.json")(0, 0, ["a"])


@pytest.mark.parametrize("module", [Shakespeare, Sentiment140])
@pytest.mark.parametrize("content", [b"", b"\x00\xff", b"no columns"])
def test_error_for_hostile_text_names_its_path(module: Any, content: bytes) -> None:
    for name in ("shakespeare/plays/a.txt", "sentiment140/training.1600000.processed.noemoticon.csv"):
        Path(name).parent.mkdir(parents=True)
        Path(name).write_bytes(content)
    with pytest.raises(FederatedError, match=r"a\.txt|noemoticon\.csv|plays"):
        module(root=".").setup()


# ------------------------------------------------------------------ versions


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
@pytest.mark.parametrize(
    ("name", "with_a_hole", "without"),
    [("pytorch-lightning", "2.6.5", "2.6.6"), ("torch", "2.9.1", "2.12.0")],
)
def test_dependencies_exclude_vulnerable_versions(name: str, with_a_hole: str, without: str) -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = [r for r in map(Requirement, project["dependencies"]) if r.name == name]
    assert with_a_hole not in wanted.specifier
    assert without in wanted.specifier
