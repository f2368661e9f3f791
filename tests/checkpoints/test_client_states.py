"""Client states in memory and on disk have the same bits, and runs can resume from every kept checkpoint."""

import errno
import gc
import io
import multiprocessing
import os
import random
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fed import FederatedCallback
from lightning_fed.algorithms import FedAvg, FedDyn, Scaffold
from lightning_fed.checkpoints import client_states
from lightning_fed.checkpoints.client_states import StoreFolder
from lightning_fed.checkpoints.files import AtomicCheckpointIO
from lightning_fed.cli.main import main
from lightning_fed.core.errors import FederatedError
from lightning_fed.rounds.round import Rounds
from lightning_fed.server.client_states.disk_store import DiskClientStore, Index
from lightning_fed.server.client_states.store import MemoryClientStore
from tests.helpers.kills import killed_when
from tests.helpers.processes import HANGS, in_processes, wait_until
from tests.helpers.selection import few
from tests.helpers.training import FEATURES, Net, data, parameters, same, seeded, trainer

SIZES = (14, 8, 22, 6, 16, 10)


class Normed(Net):
    """A network with floating-point and integer buffers."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.body.insert(0, nn.BatchNorm1d(FEATURES))


class WithAdam(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)


class Stop(FederatedCallback):
    """Raises where a kill may hit: after the second client's work in a round."""

    def __init__(self, round: int) -> None:
        self.round, self.ends = round, 0

    def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
        self.ends += trainer.fit_loop.round == self.round
        if self.ends == 2:
            raise InterruptedError


class SaveWithin(FederatedCallback):
    """Saves after the first client's work in a round."""

    def __init__(self, path: Path, round: int) -> None:
        self.path, self.round, self.saved = path, round, False

    def on_client_end(self, trainer: Any, pl_module: Any, client_report: Any) -> None:
        if trainer.fit_loop.round == self.round and not self.saved:
            self.saved = True
            trainer.save_checkpoint(self.path)


Outcome = tuple[torch.Tensor, dict[int, dict[str, torch.Tensor]]]


def run(
    where: str = "disk", module: type[Net] = Net, load: Path | None = None, save: Path | None = None, **kwargs: Any
) -> Outcome:
    """Fit, and return the server parameters and all kept states, on every process."""
    model = seeded(module)
    fitted = trainer(client_states=where, **kwargs)
    fitted.fit(model, data(sizes=SIZES), ckpt_path=load)
    if save is not None:
        fitted.save_checkpoint(save)
    parts = fitted.fit_loop.gather(fitted.fit_loop.state.clients.state_dict())
    return parameters(model), dict(sorted((i, state) for part in parts for i, state in part.items()))


def go_on(**kwargs: Any) -> None:
    """Resume from the last checkpoint, which may be of the last round if the kill came right after it."""
    resumed = trainer(client_states="disk", algorithm=Scaffold(), **kwargs)
    resumed.fit(seeded(), data(sizes=SIZES), ckpt_path="last")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def keeping(folder: Path, **kwargs: Any) -> dict[str, Any]:
    """Return arguments that let a run keep checkpoints."""
    return {
        "enable_checkpointing": True,
        "callbacks": ModelCheckpoint(folder, filename="{epoch}", **{"save_top_k": -1, **kwargs}),
        "max_rounds": 6,
    }


def versions(folder: Path) -> set[str]:
    """Return the versions of client states in a folder."""
    found = set()
    for path in folder.glob("*/index.sqlite"):
        index = Index(path.parent)
        found |= {name for name, _ in index.versions()}
        index.close()
    return found


def states_files(folder: Path) -> set[Path]:
    return set(folder.glob("*/*.states"))


METHODS: Mapping[str, Callable[..., Outcome]] = {
    "Scaffold": partial(run, algorithm=Scaffold()),
    "Scaffold, vectorized": partial(run, algorithm=Scaffold(), engine="vectorized", chunk_size=2),
    "FedDyn": partial(run, algorithm=FedDyn(alpha=0.1)),
    "Adam, kept": partial(run, module=WithAdam, local_optimizer_state="keep"),
    "buffers of their own": partial(run, module=Normed, buffers="local"),
    "everything": partial(run, module=Normed, algorithm=Scaffold(), buffers="local"),
}
fit = METHODS["Scaffold"]


@pytest.mark.parametrize("name", few(METHODS, ["everything"]))
def test_disk_and_memory_give_identical_bits(name: str, tmp_path: Path) -> None:
    alone = METHODS[name](where="memory", max_rounds=5)
    assert len(alone[1]) > 3
    METHODS[name](max_rounds=3, save=tmp_path / "a.ckpt")
    assert same(METHODS[name](max_rounds=5), alone)
    assert same(METHODS[name](max_rounds=5, load=tmp_path / "a.ckpt"), alone)


def test_checkpoint_does_not_contain_the_states(tmp_path: Path) -> None:
    fit(save=tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["loops"]["fit_loop"]["state_dict"]["client_states"]
    assert saved.keys() == {"format", "path", "version", "shards"}
    assert saved["path"] == "client_states"
    assert (saved["format"], len(saved["shards"])) == (2, 1)


@pytest.mark.parametrize(
    ("first", "second"), [("memory", "disk"), pytest.param("disk", "memory", marks=pytest.mark.thorough)]
)
def test_run_can_move_its_states_between_memory_and_disk(tmp_path: Path, first: str, second: str) -> None:
    alone = fit("memory", max_rounds=5)
    fit(first, max_rounds=2, save=tmp_path / "a.ckpt")
    fit(second, load=tmp_path / "a.ckpt", max_rounds=3, save=tmp_path / "b.ckpt")
    assert same(fit(first, load=tmp_path / "b.ckpt", max_rounds=5), alone)


@pytest.mark.thorough
def test_every_kept_checkpoint_resumes_in_any_order(tmp_path: Path) -> None:
    alone = fit("memory", max_rounds=7)
    fit(**keeping(tmp_path, save_last=True))
    assert len(versions(tmp_path / "client_states")) == 7
    for name in ("epoch=4", "epoch=0", "epoch=5", "last", "epoch=2"):
        assert same(fit(load=tmp_path / f"{name}.ckpt", max_rounds=7), alone)


@pytest.mark.thorough
def test_resuming_in_the_same_folder_keeps_older_checkpoints_valid(tmp_path: Path) -> None:
    alone = fit("memory", max_rounds=7)
    fit(**{**keeping(tmp_path), "max_rounds": 3})
    fit(load=tmp_path / "epoch=0.ckpt", **keeping(tmp_path, save_last=True))
    for name in ("epoch=0", "epoch=2", "epoch=4", "last"):
        assert same(fit(load=tmp_path / f"{name}.ckpt", max_rounds=7), alone)


@pytest.mark.thorough
def test_unreferenced_states_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "client_states"
    fit(**{**keeping(tmp_path), "max_rounds": 12})
    everything = states_files(folder)
    assert len(versions(folder)) == 12
    for f in sorted(tmp_path.glob("*.ckpt")):
        if f.name not in ("epoch=1.ckpt", "epoch=11.ckpt"):
            f.unlink()
    alone = fit("memory", max_rounds=13)
    assert same(fit(load=tmp_path / "epoch=11.ckpt", **{**keeping(tmp_path), "max_rounds": 13}), alone)
    assert len(versions(folder)) == 3
    assert len({file.stat().st_ino for file in states_files(folder)}) < len(everything)
    assert same(fit(load=tmp_path / "epoch=1.ckpt", max_rounds=13), alone)


@pytest.mark.thorough
def test_only_the_best_and_last_checkpoints_keep_their_states(tmp_path: Path) -> None:
    fit(**keeping(tmp_path, save_top_k=1, monitor="epoch", mode="max", save_last=True))
    assert {f.name for f in tmp_path.glob("*.ckpt")} == {"epoch=5.ckpt", "last.ckpt"}
    assert len(versions(tmp_path / "client_states")) == 2


@pytest.mark.thorough
def test_renamed_checkpoint_keeps_its_states(tmp_path: Path) -> None:
    alone = fit("memory", max_rounds=6)
    fit(**{**keeping(tmp_path), "max_rounds": 3})
    (tmp_path / "epoch=0.ckpt").rename(tmp_path / "mine.ckpt")
    (tmp_path / "epoch=1.ckpt").unlink()
    fit(load=tmp_path / "epoch=2.ckpt", **keeping(tmp_path))
    assert same(fit(load=tmp_path / "mine.ckpt", max_rounds=6), alone)
    assert len(versions(tmp_path / "client_states")) == 5


@pytest.mark.thorough
def test_run_directory_can_be_moved_as_a_whole(tmp_path: Path) -> None:
    alone = fit("memory", max_rounds=4)
    fit(**{**keeping(tmp_path / "a" / "checkpoints"), "max_rounds": 2}, client_states_dir=tmp_path / "a" / "kept")
    (tmp_path / "a").rename(tmp_path / "b")
    moved = tmp_path / "b" / "checkpoints"
    assert same(fit(load=moved / "epoch=1.ckpt", **{**keeping(moved), "max_rounds": 4}), alone)
    assert same(fit(load=moved / "epoch=0.ckpt", max_rounds=4), alone)
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "far" / "away" / "link").symlink_to(moved)
    assert same(fit(load=tmp_path / "far" / "away" / "link" / "epoch=0.ckpt", max_rounds=4), alone)
    shutil.copy(moved / "epoch=0.ckpt", tmp_path / "c.ckpt")
    shutil.copytree(tmp_path / "b" / "kept", tmp_path / "kept")  # checkpoint and states, to one folder
    assert same(fit(load=tmp_path / "c.ckpt", **{**keeping(tmp_path), "max_rounds": 4}), alone)
    assert same(fit(load=tmp_path / "c.ckpt", max_rounds=4), alone)


def test_checkpoint_without_its_store_is_rejected(tmp_path: Path) -> None:
    fit(**{**keeping(tmp_path), "max_rounds": 1})
    (tmp_path / "other").mkdir()
    shutil.copy(tmp_path / "epoch=0.ckpt", tmp_path / "other")
    with pytest.raises(FederatedError, match=r"Copy that folder along with the checkpoint: it is expected at .*other"):
        fit(load=tmp_path / "other" / "epoch=0.ckpt")
    for folder in (tmp_path / "client_states").glob("*-0000"):
        shutil.rmtree(folder)
    with pytest.raises(FederatedError, match=r"-0000/index.sqlite, which .*Copy the whole folder 'client_states'"):
        fit(load=tmp_path / "epoch=0.ckpt")


@pytest.mark.thorough
def test_second_fit_of_a_trainer_continues_with_its_states(tmp_path: Path) -> None:
    alone = fit("memory", max_rounds=5)
    model, module = seeded(Net), data(sizes=SIZES)
    fitted = trainer(algorithm=Scaffold(), client_states="disk", max_rounds=2)
    fitted.fit(model, module)
    fitted.save_checkpoint(tmp_path / "two.ckpt")
    fitted.max_rounds = 5
    fitted.fit(model, module)
    assert same((parameters(model), fitted.fit_loop.state.clients.state_dict()), alone)
    assert same(fit(load=tmp_path / "two.ckpt", max_rounds=5), alone)


def test_loaded_checkpoint_can_be_saved_again_without_training(tmp_path: Path) -> None:
    alone = fit("memory", max_rounds=4)
    fit(max_rounds=2, save=tmp_path / "a.ckpt")
    idle = trainer(algorithm=Scaffold(), max_rounds=2)
    idle.fit(seeded(Net), data(sizes=SIZES), ckpt_path=tmp_path / "a.ckpt")  # nothing to do
    idle.save_checkpoint(tmp_path / "deep" / "b.ckpt")
    assert same(fit(load=tmp_path / "deep" / "b.ckpt", max_rounds=4), alone)


@pytest.mark.thorough
def test_copied_checkpoint_keeps_its_states_during_cleanup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(max_rounds=2, save=tmp_path / "a.ckpt")
    idle = trainer(algorithm=Scaffold(), max_rounds=2)
    idle.fit(seeded(Net), data(sizes=SIZES), ckpt_path=tmp_path / "a.ckpt")
    save = AtomicCheckpointIO.save_checkpoint

    def clears_first(self: AtomicCheckpointIO, *args: Any, **kwargs: Any) -> None:
        client_states._clean(tmp_path / "client_states", Index(tmp_path / "none"), 0, 0.0, os.getpid())
        save(self, *args, **kwargs)

    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", clears_first)
    idle.save_checkpoint(tmp_path / "b.ckpt")
    assert same(fit(load=tmp_path / "b.ckpt", max_rounds=4), fit("memory", max_rounds=4))


@pytest.mark.thorough
def test_interrupted_round_does_not_affect_the_resumed_run(tmp_path: Path) -> None:
    alone = fit("memory", max_rounds=6)
    keeps = keeping(tmp_path)
    with pytest.raises(InterruptedError):
        fit(**{**keeps, "callbacks": [keeps["callbacks"], Stop(3)]})
    assert same(fit(load=tmp_path / "epoch=2.ckpt", **keeping(tmp_path)), alone)


@pytest.mark.thorough
@pytest.mark.parametrize("round", [0, 2])
def test_saving_within_a_round_keeps_the_states_being_written(round: int, tmp_path: Path) -> None:
    alone = fit("memory", max_rounds=5)
    first, second = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    assert same(fit(max_rounds=5, callbacks=SaveWithin(first, round)), alone)
    assert same(fit(max_rounds=5, load=first, callbacks=SaveWithin(second, round)), alone)
    assert same(fit(max_rounds=5, load=second), alone)


@pytest.mark.thorough
def test_repeatedly_killed_run_ends_with_identical_bits(tmp_path: Path) -> None:
    kept, rounds, stream, deaths = tmp_path / "kept", 14, random.Random(0), 0
    keeps = {**keeping(kept, save_top_k=2, monitor="epoch", mode="max", save_last=True), "max_rounds": rounds}

    def latest() -> int:
        return max((int(file.stem.removeprefix("epoch=")) for file in kept.glob("epoch=*.ckpt")), default=-1)

    while True:
        wanted = latest() + 2
        code = killed_when(partial(go_on, **keeps), lambda n=wanted: latest() >= n, stream.uniform(0.0, 0.03))
        if code is not None:
            break
        deaths += 1
    assert code == 0
    assert deaths > 1
    assert same(fit(load="last", **{**keeps, "max_rounds": rounds + 1}), fit("memory", max_rounds=rounds + 1))


def test_two_runs_cannot_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreFolder, "patience", 0.0)
    other = StoreFolder(tmp_path / "client_states")
    other.acquire()
    with pytest.raises(FederatedError, match="Another run keeps its client states in .*client_states_dir"):
        fit(default_root_dir=tmp_path)
    other.lock.release()
    fit(default_root_dir=tmp_path)
    fit(default_root_dir=tmp_path)


def test_states_of_another_run_are_rejected(tmp_path: Path) -> None:
    fit(max_rounds=1, save=tmp_path / "a.ckpt")
    fit(max_rounds=1, seed=7, client_states_dir="b", save=tmp_path / "b.ckpt")
    (mine,) = (tmp_path / "client_states").glob("*-0000")
    (strange,) = (tmp_path / "b").glob("*-0000")
    shutil.rmtree(mine)
    strange.rename(mine)
    with pytest.raises(FederatedError, match=r"index.sqlite is damaged: it is not what was written there"):
        fit(load=tmp_path / "a.ckpt")
    folder = StoreFolder(tmp_path / "client_states")  # the refused run has released it
    folder.patience = 0.0
    folder.acquire()
    folder.lock.release()


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_corrupt_store_is_rejected(where: str, tmp_path: Path) -> None:
    fit(max_rounds=2, save=tmp_path / "a.ckpt", client_states_dir=tmp_path / "kept")
    (first, *_), (index,) = sorted(states_files(tmp_path / "kept")), (tmp_path / "kept").glob("*/index.sqlite")
    for file in (first, index):
        whole = file.read_bytes()
        for broken in (whole[: len(whole) // 2], bytes([whole[0] ^ 1]) + whole[1:], b""):
            file.write_bytes(broken)
            with pytest.raises(FederatedError, match="damaged"):
                fit(where, load=tmp_path / "a.ckpt", max_rounds=5)
        file.write_bytes(whole)
    fit(where, load=tmp_path / "a.ckpt")


@pytest.mark.parametrize("name", ["round-000001-0123456789abcdef.json", "000001-01234567-0000-000001.states"])
def test_folder_of_the_old_format_is_rejected(name: str, tmp_path: Path) -> None:
    fit(max_rounds=1, save=tmp_path / "a.ckpt", client_states_dir=tmp_path / "kept")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / name).touch()
    with pytest.raises(FederatedError, match=r"in .*old were written by another version.*Start a new run.*or finish"):
        fit(client_states_dir=tmp_path / "old")
    with pytest.raises(FederatedError, match=r"in .*old were written by another version"):
        fit(client_states_dir=tmp_path / "old", load=tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    saved["loops"]["fit_loop"]["state_dict"]["client_states"] = {"path": "old", "version": Path(name).stem}
    torch.save(saved, tmp_path / "old.ckpt")
    with pytest.raises(FederatedError, match=r"in .*old were written by another version"):
        fit(load=tmp_path / "old.ckpt")
    assert os.listdir(tmp_path / "old") in ([name], [name, "lock"], ["lock", name])


@pytest.mark.parametrize("shards", [None, 3, [3], [["../x", 1, 1, 1]], [["0" * 16 + "-0000", True, 1, 1]], [["a", 1]]])
def test_invalid_state_reference_is_rejected(shards: Any, tmp_path: Path) -> None:
    fit(max_rounds=1, save=tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    saved["loops"]["fit_loop"]["state_dict"]["client_states"]["shards"] = shards
    torch.save(saved, tmp_path / "a.ckpt")
    with pytest.raises(FederatedError, match="reference to client states is damaged"):
        fit(load=tmp_path / "a.ckpt")


def test_auto_storage_depends_on_the_maximum_state_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def chosen(**kwargs: Any) -> type:
        fitted = trainer(**{"algorithm": Scaffold(), "max_rounds": 1, **kwargs})
        fitted.fit(seeded(Net), data())
        return type(fitted.fit_loop.state.clients)

    size = 4 * parameters(Net()).numel()
    for limit, kept in ((3 * size, MemoryClientStore), (3 * size - 1, DiskClientStore)):
        monkeypatch.setattr("lightning_fed.checkpoints.client_states.MEMORY_LIMIT", limit)
        with caplog.at_level("INFO"):
            assert chosen() is kept
        assert (f"Client states go to disk: 3 of {size:,} bytes" in caplog.text) == (kept is DiskClientStore)
    assert chosen(client_states="memory") is MemoryClientStore
    assert chosen(algorithm=FedAvg()) is MemoryClientStore
    caplog.clear()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"client_states": "tape"}, "client_states must be 'memory' or 'disk' or 'auto'"),
        ({"client_states_dir": 3}, r"client_states_dir=3\): client_states_dir must be a path"),
        ({"client_states": "memory", "client_states_dir": "x"}, "of no use to client_states='memory'"),
    ],
)
def test_invalid_arguments_are_rejected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        trainer(**arguments)


def test_folder_that_cannot_be_created_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FederatedError, match="client_states_dir=.*cannot be used"):
        fit(client_states_dir=tmp_path / "file" / "below")
    with pytest.raises(FederatedError, match="not on a file system of this machine"):
        fit(client_states_dir="s3://bucket/states")


@pytest.mark.thorough
def test_config_file_sets_the_storage_and_folder(tmp_path: Path) -> None:
    text = "trainer:\n  client_states: disk\n  client_states_dir: kept\n"
    (tmp_path / "disk.yaml").write_text(text)
    quiet = ["--trainer.max_rounds", "1", "--trainer.logger", "false", "--trainer.enable_progress_bar", "false"]
    config = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    main(["fit", "--config", str(config), "--config", str(tmp_path / "disk.yaml"), *quiet])
    assert versions(tmp_path / "kept")


# ------------------------------------------------------------------ garbage

RUN, OTHER, KILLED = ("0" * 15 + str(number) for number in (1, 2, 3))


def disk_store(path: Path, run: str = RUN, rank: int = 0, **kwargs: Any) -> DiskClientStore:
    """Return a store that has committed one state; with ``is_shared`` this process cleans up after it."""
    path.mkdir(exist_ok=True)
    store = DiskClientStore(path, f"{run}-{rank:04d}")
    store.stage(rank, {"c": torch.ones(3)})
    store.commit()
    store.index.close()
    if kwargs:
        client_states._clean_after(store, rank, **kwargs)
    return store


def checkpoint(folder: StoreFolder, store: DiskClientStore, number: int) -> Path:
    """Write a version and a checkpoint that refers to it, as a run does, and return the checkpoint."""
    path, name = folder.path.parent / f"{number}.ckpt", f"{RUN}-{number:06d}"
    store.stage(0, {"c": torch.full((3,), float(number))})
    store.commit()
    shard = store.record(name, f"../{path.name}")
    folder.newest, folder.written = name, folder.written + 1
    states = {"version": name, "shards": [list(shard)]}
    torch.save({"loops": {"fit_loop": {"state_dict": {"client_states": states}}}}, path)
    folder.collect_if_due(rank=0)
    return path


def recorded(store: DiskClientStore) -> int:
    return len(store.index.versions())


def test_version_with_a_pending_checkpoint_is_kept(tmp_path: Path) -> None:
    store, folder = disk_store(tmp_path / "kept", is_shared=False), StoreFolder(tmp_path / "kept")
    checkpoint(folder, store, 0).unlink()
    store.record("to come", "../1.ckpt")
    folder.newest = "to come"
    folder.collect(rank=0)
    assert {name for name, _ in store.index.versions()} == {"to come"}


@pytest.mark.thorough
def test_reads_per_checkpoint_do_not_grow_with_kept_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refers_to, reads, counts = client_states._referred_version, [], []
    monkeypatch.setattr(client_states, "_referred_version", lambda path: reads.append(path) or refers_to(path))
    store, folder = disk_store(tmp_path / "kept", is_shared=False), StoreFolder(tmp_path / "kept")
    for number in range(400):
        checkpoint(folder, store, number)
        counts.append(len(reads))
    assert recorded(store) == 400
    early, late = counts[199] - counts[99], counts[399] - counts[299]
    assert late < 1.5 * early < 1.5 * 100 * 12


def test_checkpoint_is_read_once_unless_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refers_to, reads = client_states._referred_version, []
    monkeypatch.setattr(client_states, "_referred_version", lambda path: reads.append(path) or refers_to(path))
    store, folder = disk_store(tmp_path / "kept", is_shared=False), StoreFolder(tmp_path / "kept")
    paths = [checkpoint(folder, store, number) for number in range(20)]
    assert len(reads) == len(set(reads))
    shutil.copy2(paths[3], paths[5])
    folder.collect(rank=0)
    assert len(reads) == 1 + len(set(reads)) == 21
    assert {name for name, _ in store.index.versions()} == {f"{RUN}-{n:06d}" for n in range(20) if n != 5}


@pytest.mark.thorough
def test_few_of_many_deleted_checkpoints_stay_recorded(tmp_path: Path) -> None:
    store, folder = disk_store(tmp_path / "kept", is_shared=False), StoreFolder(tmp_path / "kept")
    for path in [checkpoint(folder, store, number) for number in range(80)][:40]:
        path.unlink()
    for number in range(80, 90):
        checkpoint(folder, store, number)
    assert 50 <= recorded(store) < 60
    assert len(states_files(folder.path)) < 61


def test_single_kept_checkpoint_leaves_only_its_own_version(tmp_path: Path) -> None:
    store, folder = disk_store(tmp_path / "kept", is_shared=False), StoreFolder(tmp_path / "kept")
    for number in range(5):
        path = checkpoint(folder, store, number)
        assert recorded(store) == 1
        assert len(states_files(folder.path)) == 1
        path.unlink()


def test_unreadable_checkpoint_or_index_keeps_its_states(tmp_path: Path) -> None:
    store, folder = disk_store(tmp_path / "kept"), StoreFolder(tmp_path / "kept")
    checkpoint(folder, store, 1).write_bytes(b"damaged")
    broken = disk_store(folder.path, OTHER)
    broken.index.path.write_bytes(b"damaged" * 999)
    StoreFolder(folder.path).collect(rank=0)
    assert {file.parent.name for file in states_files(folder.path)} == {store.name, broken.name}


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.EIO])
def test_renamed_checkpoint_that_cannot_be_opened_keeps_its_states(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    store, folder = disk_store(tmp_path / "kept", is_shared=False), StoreFolder(tmp_path / "kept")
    checkpoint(folder, store, 1).rename(tmp_path / "mine.ckpt")
    with monkeypatch.context() as patch:
        patch.setattr(io, "open", refuse)  # `zipfile` opens files with it
        StoreFolder(folder.path).collect(rank=0)
    assert recorded(store) == 1
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", refuse)
        patch.setattr(os, "scandir", refuse)
        StoreFolder(folder.path).collect(rank=0)
    assert recorded(store) == 1


@pytest.mark.parametrize("content", few([b"", b"SQLite format 3\0", b"damaged" * 999], [b"damaged" * 999]))
def test_garbage_collection_keeps_a_corrupt_index_and_its_states(content: bytes, tmp_path: Path) -> None:
    fit(max_rounds=1, save=tmp_path / "a.ckpt", client_states_dir=tmp_path / "kept")
    gc.collect()  # closes the run's store
    (index,), states = (tmp_path / "kept").glob("*/index.sqlite"), states_files(tmp_path / "kept")
    whole = index.read_bytes()
    index.write_bytes(content)
    StoreFolder(tmp_path / "kept").collect(rank=0)
    assert index.read_bytes() == content
    assert states_files(tmp_path / "kept") == states
    index.write_bytes(whole)
    fit(load=tmp_path / "a.ckpt")


@pytest.fixture
def two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for the stores of two runs of this process and of a killed run."""
    monkeypatch.setattr(client_states, "_RUNS", {RUN, OTHER})
    return tmp_path / "kept"


def shards(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()}


def test_process_removes_its_own_shards_and_those_of_killed_runs(two_runs: Path) -> None:
    first, second = disk_store(two_runs, is_shared=True), disk_store(two_runs, rank=1)  # the second belongs to a peer
    disk_store(two_runs, KILLED, rank=1)
    assert len(shards(two_runs)) == 3
    del first
    gc.collect()
    assert shards(two_runs) == {second.name}
    client_states._clean_after(second, 1, is_shared=True)
    del second
    gc.collect()
    assert not shards(two_runs)


def test_states_of_live_stores_are_kept(two_runs: Path) -> None:
    alive, gone = disk_store(two_runs, is_shared=False), disk_store(two_runs, OTHER, is_shared=False)
    disk_store(two_runs, KILLED, rank=1)
    del gone
    gc.collect()
    assert shards(two_runs) == {alive.name}
    assert same(alive.get(0), {"c": torch.ones(3)})


class _Operations(TorchDispatchMode):
    """Notes PyTorch's operations, as a trace does."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.noted.append(str(func))
        return func(*args, **(kwargs or {}))


def test_store_collected_while_a_step_is_traced_leaves_no_operation_in_the_trace(two_runs: Path) -> None:
    store, operations = disk_store(two_runs, is_shared=False), _Operations()
    saved = torch.load(path := checkpoint(StoreFolder(two_runs), store, 1), weights_only=True)
    torch.save({**saved, "state_dict": OrderedDict(w=torch.ones(3))}, path.with_name("renamed.ckpt"))
    path.unlink()
    with operations:
        del store
        gc.collect()
    assert shards(two_runs)  # the renamed checkpoint has been read
    assert not operations.noted


def test_processes_ending_together_wait_for_each_other(two_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, other, waited = disk_store(two_runs, rank=1), StoreFolder(two_runs), []
    client_states._clean_after(ended, 1, is_shared=True)
    monkeypatch.setattr("time.sleep", lambda seconds: (waited.append(seconds), other.lock.release()))
    other.acquire()
    del ended
    gc.collect()
    assert waited
    assert not shards(two_runs)


# ------------------------------------------------------------------ several processes


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["clients", "ddp"])
def test_states_move_from_one_process_to_two_and_back(tmp_path: Path, strategy: str) -> None:
    one, two, back = (keeping(tmp_path / name) for name in ("one", "two", "back"))
    module = {"module": partial(Net, dropout=0.0)}  # ddp processes draw other masks
    alone = fit("memory", **module, max_rounds=6)
    fit(**module, **{**one, "max_rounds": 2})

    def work() -> Outcome:
        both = {"strategy": strategy, "devices": 2, **module}
        fit(load=tmp_path / "one" / "epoch=1.ckpt", **{**two, "max_rounds": 4}, **both)
        return fit(load=tmp_path / "two" / "epoch=3.ckpt", **{**two, "max_rounds": 5}, **both)

    outcomes = in_processes(work, tmp_path)
    assert not any(o.error for o in outcomes), outcomes[0].trace + outcomes[1].trace
    left = {file.parent.name for file in states_files(tmp_path / "two" / "client_states")}
    for start in ("two/epoch=4.ckpt", "two/epoch=2.ckpt", "one/epoch=0.ckpt"):
        weights, states = fit(load=tmp_path / start, **module, **back)
        assert (weights - alone[0]).norm() < 1e-5 * alone[0].norm()
        assert states.keys() == alone[1].keys()
        assert all((states[i]["c_i"] - kept["c_i"]).norm() < 1e-4 for i, kept in alone[1].items())
    if strategy == "clients":
        assert any(name.endswith("-0001") for name in left)


@pytest.mark.thorough
def test_concurrent_writes_survive_garbage_collection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, waited = StoreFolder._wanted, []

    def late(folder: StoreFolder, found: set[tuple[str, str]]) -> set[str]:
        """Delay the first look at the checkpoints until the other process is in the next round."""
        before = states_files(folder.path)
        if os.environ["RANK"] == "0" and not waited:
            wait_until(lambda: states_files(folder.path) > before)
        waited.append(states_files(folder.path) > before)
        return wanted(folder, found)

    def work() -> list[bool]:
        monkeypatch.setattr(StoreFolder, "_wanted", late)
        monkeypatch.setattr(Rounds, "_check_drawn", lambda *_: None)  # the store does not rely on this barrier
        fit(**{**keeping(tmp_path), "max_rounds": 3}, clients_per_round=6, strategy="clients", devices=2)
        return waited

    outcomes = in_processes(work, tmp_path)
    assert not any(o.error for o in outcomes), outcomes[0].trace + outcomes[1].trace
    assert outcomes[0].value[0]
    fit(load=tmp_path / "epoch=2.ckpt", max_rounds=4, clients_per_round=6)


@pytest.mark.thorough
def test_forked_process_that_drops_its_copy_keeps_the_states(tmp_path: Path) -> None:
    kept = [trainer(client_states="disk", algorithm=Scaffold(), max_rounds=2)]
    kept[0].fit(seeded(), data(sizes=SIZES))
    count = len(kept[0].fit_loop.state.clients.state_dict())

    def drop() -> None:
        kept.clear()
        gc.collect()

    process = multiprocessing.get_context("fork").Process(target=drop)
    process.start()
    process.join(HANGS)
    assert process.exitcode == 0
    assert states_files(tmp_path / "client_states")
    assert len(kept[0].fit_loop.state.clients.state_dict()) == count > 0
    drop()
    assert not states_files(tmp_path / "client_states")


@pytest.mark.thorough
def test_each_process_can_read_its_states_until_it_drops_them(tmp_path: Path) -> None:
    def work() -> int:
        rank, dropped = int(os.environ["RANK"]), tmp_path / "dropped"
        both = {"strategy": "clients", "devices": 2, "clients_per_round": 6}
        fitted = trainer(client_states="disk", algorithm=Scaffold(), max_rounds=1, **both)  # one round reads no states
        fitted.fit(seeded(), data(sizes=SIZES))
        if rank == 1:
            wait_until(dropped.exists)
        found = fitted.fit_loop.state.clients.state_dict()
        del fitted
        gc.collect()
        dropped.touch()
        return len(found)

    outcomes = in_processes(work, tmp_path)
    assert not any(o.error for o in outcomes), outcomes[0].trace + outcomes[1].trace
    assert [o.value for o in outcomes] == [3, 3]
    assert not states_files(tmp_path / "client_states")


class Slow(TorchCheckpointIO):
    """Writes its first file more slowly than rounds run."""

    seconds = 0.5

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(self.seconds)
        self.seconds = 0.0
        super().save_checkpoint(*args, **kwargs)


@pytest.mark.thorough
def test_states_of_a_checkpoint_written_in_the_background_are_kept(tmp_path: Path) -> None:
    options: dict[str, Any] = {**keeping(tmp_path), "plugins": AsyncCheckpointIO(Slow()), "algorithm": Scaffold()}
    run(**{**options, "max_rounds": 3})
    straight = run(algorithm=Scaffold(), max_rounds=4)
    for epoch in range(3):
        resumed = run(algorithm=Scaffold(), max_rounds=4, load=tmp_path / f"epoch={epoch}.ckpt")
        assert torch.equal(resumed[0], straight[0])
