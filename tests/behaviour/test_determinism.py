"""The same seed gives the same bits in another process, and with other hash seeds, loader workers and file orders."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lightning_fed import FederatedCallback, FederatedDataModule
from lightning_fed.algorithms import FedAvg, FedProx, Mime, Scaffold, SGDm
from lightning_fed.data import ClientFolder, ClientImages, Dirichlet, LeafDataModule
from lightning_fed.server import FedAdam, SystemsHeterogeneity, WeightedSampler
from tests.helpers.engines import RandomAlways
from tests.helpers.processes import HANGS
from tests.helpers.training import CLASSES, classification, data, seeded, trainer

ROOT = Path(__file__).parents[2]
NAMES = ("ann", "bob", "cy", "dee", "eve", "flo")
METHODS = {"FedAvg": FedAvg, "Scaffold": Scaffold, "Mime": lambda: Mime(SGDm(0.5))}
ENGINES = ("sequential", "vectorized")


class Listed(Dataset[Any]):
    """Single examples, which need a loader."""

    def __init__(self, seed: int, size: int) -> None:
        self.tensors = classification(size, seed).tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tensors[0][index], self.tensors[1][index]


def listed(num_workers: int = 0) -> FederatedDataModule:
    """Return named clients whose examples go through a DataLoader."""
    clients = {name: Listed(seed, 6 + seed) for seed, name in enumerate(NAMES)}
    return FederatedDataModule(clients=clients, batch_size=4, num_workers=num_workers)


def checksum(datamodule: FederatedDataModule, **options: Any) -> str:
    """Train with dropout, and return a checksum of the server parameters and the client states."""
    run = trainer(server_optimizer=lambda p: FedAdam(p, lr=0.1), weighting=None, **options)
    run.fit(seeded(), datamodule)
    state = run.fit_loop.state
    digest = hashlib.sha256(state.x.numpy().tobytes())
    for index, kept in sorted(state.clients.state_dict().items()):
        digest.update(repr(index).encode())
        for name in sorted(kept):
            digest.update(name.encode() + kept[name].numpy().tobytes())
    return digest.hexdigest()


def checksums(folder: str) -> dict[str, str]:
    """Return the checksums of several runs, by name."""
    torch.set_num_threads(1)
    cut = FederatedDataModule(train=classification(90, 3), partition=Dirichlet(num_clients=6, alpha=0.5), batch_size=4)
    sampler = WeightedSampler(3, weights={name: 1.0 + len(name) for name in NAMES})
    found = {
        f"{name}, {engine}": checksum(listed(), algorithm=make(), engine=engine)
        for name, make in METHODS.items()
        for engine in ENGINES
    }
    found["weights by name"] = checksum(listed(), sampler=sampler)
    found["stragglers"] = checksum(cut, heterogeneity=SystemsHeterogeneity(stragglers=0.5, dropout=0.2), local_epochs=2)
    found["files"] = checksum(ClientFolder(folder, batch_size=4), algorithm=Scaffold())
    return found


def write_clients(folder: Path) -> Path:
    for seed, name in enumerate(NAMES):
        (folder / name).mkdir(parents=True)
        x, y = classification(6 + seed, seed).tensors
        np.savez(folder / name / "train.npz", x=x.numpy(), y=y.numpy())
    return folder


def elsewhere(folder: Path, hash_seed: str) -> dict[str, str]:
    """Return the checksums that another process computes."""
    module = "tests.behaviour.test_determinism"
    code = f"import json; from {module} import checksums; print(json.dumps(checksums({str(folder)!r})))"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=HANGS, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.thorough
def test_other_processes_and_hash_seeds_give_identical_bits(tmp_path: Path) -> None:
    folder = write_clients(tmp_path / "clients")
    here = checksums(str(folder))
    assert elsewhere(folder, "0") == elsewhere(folder, "1") == here
    assert len({here[f"{name}, sequential"] for name in METHODS}) == len(METHODS)  # checksums distinguish methods


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ENGINES)
def test_loader_workers_do_not_change_the_result(engine: str) -> None:
    options = {"engine": engine, "max_rounds": 1}
    assert checksum(listed(num_workers=2), **options) == checksum(listed(), **options)


def test_different_seed_gives_different_result() -> None:
    assert checksum(listed(), seed=1) != checksum(listed())


class LossesAtX(FederatedCallback):
    """Record every round's loss and mu, and a client's loss after it. Change the global random state."""

    def __init__(self, elsewhere: int) -> None:
        self.elsewhere = elsewhere
        self.rounds: list[list[float]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        torch.manual_seed(self.elsewhere)

    def on_client_start(self, trainer: Any, pl_module: Any, round: int, client_id: Any) -> None:
        if len(self.rounds) <= round:
            self.rounds += [[] for _ in range(round + 1 - len(self.rounds))]
            state = trainer.fit_loop.round_state
            self.rounds[round] += [float(state["loss"]), float(state["mu"])]

    def on_round_end(self, trainer: Any, pl_module: Any, round_report: Any) -> None:
        self.rounds[round_report.round].append(trainer.fit_loop.training_loss(0))
        torch.manual_seed(self.elsewhere)


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ENGINES)
def test_losses_random_in_eval_mode_depend_only_on_seed(engine: str, tmp_path: Path) -> None:
    def run(rounds: int, elsewhere: int, ckpt_path: Path | None = None) -> list[list[float]]:
        seen, method = LossesAtX(elsewhere), FedProx(0.1, adaptive={"step": 0.1, "patience": 1})
        trained = trainer(algorithm=method, engine=engine, max_rounds=rounds, callbacks=seen)
        trained.fit(seeded(RandomAlways), data(), ckpt_path=ckpt_path)
        trained.save_checkpoint(tmp_path / f"{rounds}.ckpt")
        return seen.rounds

    straight = run(3, elsewhere=1)
    assert run(3, elsewhere=2) == straight
    run(1, elsewhere=3)
    assert run(3, elsewhere=4, ckpt_path=tmp_path / "1.ckpt")[1:] == straight[1:]


# ------------------------------------------------------------------ the order of files on disk


class Entries:
    """A folder's entries in another order."""

    def __init__(self, entries: list[Any]) -> None:
        self.entries = entries

    def __enter__(self) -> Iterator[Any]:
        return iter(self.entries)

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(self.entries)


@contextmanager
def folders_listed(backwards: bool) -> Iterator[None]:
    """Make the operating system's functions list folders by name, or backwards."""
    scandir, listdir, iterdir = os.scandir, os.listdir, Path.iterdir

    def by_name(entries: Any) -> list[Any]:
        return sorted(entries, key=lambda entry: entry.name, reverse=backwards)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "scandir", lambda *path: Entries(by_name(scandir(*path))))
        patch.setattr(os, "listdir", lambda *path: sorted(listdir(*path), reverse=backwards))
        patch.setattr(Path, "iterdir", lambda self: iter(by_name(iterdir(self))))
        yield


def images(folder: Path) -> Path:
    from PIL import Image

    for client in NAMES[:3]:
        for name in ("cat", "dog"):
            (folder / client / name).mkdir(parents=True)
            for number in range(3):
                shade = (len(client) * 40, len(name) * number * 20, number * 60)
                Image.new("RGB", (2, 2), shade).save(folder / client / name / f"{number}.png")
    return folder


def leaf(folder: Path) -> Path:
    folder.mkdir()
    for number, name in enumerate(NAMES[:4]):
        x, y = classification(7, number).tensors
        users = {name: {"x": x.tolist(), "y": y.tolist()}}
        content = {"users": [name], "num_samples": [7], "user_data": users}
        (folder / f"part_{number}.json").write_text(json.dumps(content))
    return folder


def examples(data: ClientImages) -> list[Any]:
    return [(i, [(x.tolist(), y) for x, y in data.client_dataset(i)]) for i in data.client_ids]  # type: ignore[attr-defined]


FOUND: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Any]]] = {
    "ClientFolder": (write_clients, lambda path: checksum(ClientFolder(str(path)), algorithm=Scaffold())),
    "ClientImages": (images, lambda path: examples(ClientImages(str(path), ["cat", "dog"]))),
    "LeafDataModule": (leaf, lambda path: checksum(LeafDataModule(str(path), num_classes=CLASSES))),
}


@pytest.mark.parametrize("name", FOUND)
def test_directory_listing_order_does_not_change_the_result(name: str, tmp_path: Path) -> None:
    write, read = FOUND[name]
    path, found = write(tmp_path / "data"), []
    for backwards in (False, True):
        with folders_listed(backwards):
            found.append(read(path))
    assert found[0] == found[1]
