"""Real processes, struck at random moments, resume from the disk and end with the same bits."""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from lightning_fed import FederatedCallback, FederatedDataModule, FederatedTrainer, algorithms
from lightning_fed.checkpoints.client_states import is_reference, shards_of
from lightning_fed.checkpoints.files import damage_of
from lightning_fed.data import Dirichlet
from lightning_fed.models import MLPClassifier
from lightning_fed.server import (
    BernoulliSampler,
    CoordinateMedian,
    FedAdam,
    FedAvgM,
    FedYogi,
    RoundRobinSampler,
    SystemsHeterogeneity,
    TopK,
    UniformSampler,
)
from lightning_fed.server.client_states.disk_store import read_version
from tests.helpers.kills import EXITS, KINDS, WHERE, Places, Strike, killed_when, struck_together
from tests.helpers.training import QUIET, rounds_in, same

ROUNDS, BLOWS = 8, len(KINDS)  # each within a round and a half, so that even the last one hits before the run ends
WHEREABOUTS = ("dirpath", "best_model_path", "best_k_models", "kth_best_model_path", "last_model_path")


class Plateau(MLPClassifier):
    """A module with a schedule that monitors validation, and with momentum in its local optimizer."""

    momentum = 0.5

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams["lr"], momentum=self.momentum)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.7, threshold=0.05)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


@cache
def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return some handwritten digits to train on and to validate with."""
    x, y = load_digits(return_X_y=True)
    images, labels = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    return TensorDataset(images[:600], labels[:600]), TensorDataset(images[600:700], labels[600:700])


def work(folder: Path, places: FederatedCallback | None = None, **options: Any) -> None:
    """Run or resume a fit of some rounds, with a checkpoint after each."""
    torch.manual_seed(1)
    model = Plateau(in_features=64, num_classes=10, hidden=[8], lr=0.2)
    model.momentum = options.pop("momentum", 0.5)
    keep = ModelCheckpoint(**{"dirpath": folder, "save_last": True, **options.pop("keep", {})})
    callbacks = [EarlyStopping("val_loss", patience=ROUNDS), keep, *([places] if places else [])]
    run = {
        "algorithm": algorithms.Scaffold(),
        "clients_per_round": 4,
        "local_epochs": 1,
        "max_rounds": ROUNDS,
        "server_optimizer": partial(FedAdam, lr=0.05),
        "seed": 0,
    }
    kwargs = {**QUIET, "enable_checkpointing": True, **run, **options}
    trainer = FederatedTrainer(default_root_dir=folder, callbacks=callbacks, **kwargs)
    data = FederatedDataModule(train=digits()[0], val=digits()[1], partition=Dirichlet(8, 0.3), batch_size=32)
    trainer.fit(model, data, ckpt_path="last")
    if places is not None:
        places.moment.strike = None  # only a fit handles signals
    trainer.save_checkpoint(folder / "end")


def end(folder: Path) -> dict[str, Any]:
    """Return a run's final checkpoint and client states, without paths, times and Lightning's counters."""
    found = torch.load(folder / "end", weights_only=True)
    for state in found["callbacks"].values():
        for name in WHEREABOUTS:
            state.pop(name, None)
    run = found["loops"]["fit_loop"]["state_dict"]
    if is_reference(run["client_states"]):
        shards = shards_of(run["client_states"])
        run["client_states"] = read_version(folder / "client_states", shards)
    run["metrics"] = {name: value for name, value in run["metrics"].items() if "seconds" not in name}
    return {**found, "loops": run}


def strikes(seed: int, number: int, counts: dict[str, int]) -> list[Strike]:
    """Return strikes of every kind, at random places and moments within about a round and a half."""
    stream, found = random.Random(seed), []
    for i in range(number):
        kind = KINDS[(seed + i) % len(KINDS)]
        where = stream.choice(("write", "flush") if kind == "disk full" else WHERE)
        found.append(Strike(kind, where, stream.randrange(max(1, 3 * counts[where] // (2 * ROUNDS))), stream.random()))
    return found


def survive(
    fit: Callable[..., None], folder: Path, seed: int, number: int, processes: int = 1
) -> list[tuple[str, str]]:
    """Compare an undisturbed run with one that is struck and resumed repeatedly, and return the strikes that hit.

    With several processes, each strike hits one of them, and all must end.
    """
    whole, hurt, nothing = folder / "whole", folder / "hurt", [None] * processes
    ends = struck_together(partial(fit, whole), nothing, folder)
    assert {code for code, _ in ends} == {0}
    fallen = []
    for i, blow in enumerate(strikes(seed, number, json.loads(ends[0][1]))):
        rank = 0 if blow.where in ("write", "flush", "rename", "renamed") else i % processes
        blows = [blow if other == rank else None for other in range(processes)]
        code, at = struck_together(partial(fit, hurt), blows, folder)[rank]
        assert code == (EXITS[blow.kind] if at else 0), (blow, at)
        assert all(damage_of(file) is None for file in hurt.glob("*.ckpt")), (blow, at)
        fallen += [(blow.kind, at)] if at else []
    assert {code for code, _ in struck_together(partial(fit, hurt), nothing, folder)} == {0}
    assert not list(hurt.glob(".*"))
    assert same(end(hurt), end(whole))
    return fallen


BEST = {"monitor": "val_acc", "mode": "max", "save_last": True}
RUNS = {
    "last": {},
    "link": {"keep": {"save_last": "link"}},
    "best": {"keep": {"monitor": "val_acc", "mode": "max", "save_last": "link", "save_top_k": 2}},
    "rare": {"keep": {"every_n_epochs": 3}},
    "vectorized": {"engine": "vectorized", "keep": {"save_last": "link"}},
    "full gradients": {"algorithm": algorithms.MimeLite()},
    "kept optimizers": {"algorithm": algorithms.FedDyn(0.1), "local_optimizer_state": "keep"},
    "states on disk": {"client_states": "disk", "local_optimizer_state": "keep", "keep": {"save_top_k": 2, **BEST}},
    "stragglers": {"heterogeneity": SystemsHeterogeneity(stragglers=0.3, dropout=0.3)},
    "compressed": {"compression": TopK(0.2), "aggregator": CoordinateMedian(), "engine": "auto"},
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", RUNS)
def test_repeatedly_killed_run_ends_with_identical_bits(name: str, tmp_path: Path) -> None:
    options = RUNS[name]
    digits()  # cached before the processes fork
    fallen = survive(lambda folder, places: work(folder, places, **options), tmp_path, list(RUNS).index(name), BLOWS)
    assert len(fallen) == BLOWS, fallen


@pytest.mark.thorough
def test_externally_killed_run_ends_with_identical_bits(tmp_path: Path) -> None:
    digits()
    whole, hurt, stream, kills = tmp_path / "whole", tmp_path / "hurt", random.Random(0), 0
    options, started = {"client_states": "disk", "max_rounds": 16}, time.perf_counter()
    assert killed_when(partial(work, whole, **options), lambda: False) == 0
    round_seconds = (time.perf_counter() - started) / 16

    def rounds() -> int:
        return max((int(file.name[len("epoch=") :].split("-")[0]) for file in hurt.glob("epoch=*")), default=-1)

    while True:
        wanted = rounds() + 2
        if (
            killed_when(
                partial(work, hurt, **options), lambda n=wanted: rounds() >= n, stream.uniform(0.0, 2 * round_seconds)
            )
            is not None
        ):
            break
        kills += 1
        assert all(damage_of(file) is None for file in hurt.glob("*.ckpt"))
    assert kills > 2
    assert same(end(hurt), end(whole))


class KilledAt(FederatedCallback):
    """Kills its process when a round begins."""

    def __init__(self, round: int) -> None:
        self.round = round

    def on_round_start(self, trainer: Any, pl_module: Any, round: int) -> None:
        if round == self.round:
            os.kill(os.getpid(), signal.SIGKILL)


LONG_AGO = [pytest.param(how, n, id=f"{how}, {n}") for how in (True, "link") for n in (1, 2)]


@pytest.mark.thorough
@pytest.mark.parametrize(("save_last", "processes"), LONG_AGO)
def test_run_killed_long_after_best_round_resumes_from_last(save_last: Any, processes: int, tmp_path: Path) -> None:
    digits()
    whole, hurt, nothing = tmp_path / "whole", tmp_path / "hurt", [None] * processes
    keep = {"monitor": "val_loss", "mode": "max", "save_last": save_last}  # the first round is the best
    options = {"keep": keep, **({"devices": processes, "strategy": "clients"} if processes > 1 else {})}
    assert {code for code, _ in struck_together(lambda _: work(whole, **options), nothing, tmp_path)} == {0}
    ends = struck_together(lambda _: work(hurt, KilledAt(ROUNDS - 3), **options), nothing, tmp_path)
    assert {code for code, _ in ends} == {-signal.SIGKILL}
    assert [file.name for file in hurt.glob("epoch=*")] == ["epoch=0-step=1.ckpt"]
    assert rounds_in(hurt / "last.ckpt") == ROUNDS - 3
    assert {code for code, _ in struck_together(lambda _: work(hurt, **options), nothing, tmp_path)} == {0}
    assert rounds_in(hurt / "last.ckpt") == ROUNDS
    assert same(end(hurt), end(whole))


BOTH = {
    "SIGTERM to one": ("step", ["SIGTERM", None], [0, 0]),
    "SIGTERM to the other": ("step", [None, "SIGTERM"], [0, 0]),
    "SIGTERM to both": ("step", ["SIGTERM", "SIGTERM"], [0, 0]),
    "SIGINT to one": ("step", [None, "SIGINT"], [1, 1]),
    "SIGINT to both, at once": ("hook", ["SIGINT", "SIGINT"], [1, 1]),
    "an exception in one": ("step", [None, "exception"], [1, 1]),
    "SIGKILL of one": ("hook", [None, "SIGKILL"], [1, -9]),
    "a full disk": ("write", ["disk full", None], [1, 1]),
    "SIGTERM between rounds": ("renamed", ["SIGTERM", None], [0, 0]),
}


FEW_BLOWS = ("SIGTERM to one", "SIGKILL of one", "a full disk")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        pytest.param("clients", FEW_BLOWS, id="clients"),
        pytest.param("clients", tuple(BOTH), id="clients, all blows"),
        pytest.param("ddp", tuple(BOTH), id="ddp, all blows"),
    ],
)
def test_both_processes_end_if_one_is_killed_and_resume_exactly(
    strategy: str, names: Sequence[str], tmp_path: Path
) -> None:
    digits()
    stream = random.Random(3)

    def fit(folder: Path, places: Places) -> None:
        work(folder, places, devices=2, strategy=strategy)

    ends = struck_together(partial(fit, tmp_path / "whole"), [None, None], tmp_path)
    assert [code for code, _ in ends] == [0, 0]
    counts = [json.loads(text) for _, text in ends]
    for what in names:
        where, kinds, codes = BOTH[what]
        at = [stream.randrange(max(1, count[where] // ROUNDS)) for count in counts]
        blows = [None if kind is None else Strike(kind, where, k) for kind, k in zip(kinds, at, strict=True)]
        found = struck_together(partial(fit, tmp_path / "hurt"), blows, tmp_path)
        assert [code for code, _ in found] == codes, (what, found)
    assert [code for code, _ in struck_together(partial(fit, tmp_path / "hurt"), [None, None], tmp_path)] == [0, 0]
    assert same(end(tmp_path / "hurt"), end(tmp_path / "whole"))


METHODS = [
    algorithms.FedAvg(),
    algorithms.FedProx(mu=0.1),
    algorithms.FedDane(mu=0.1),
    algorithms.Scaffold(option="i"),
    algorithms.Scaffold(option="ii"),
    algorithms.MimeLite(),
    algorithms.Mime(),
    algorithms.CMime(base=algorithms.SGDm()),
    algorithms.MimeMVR(a=0.2),
    algorithms.FedCM(alpha=0.2),
    algorithms.FedDyn(alpha=0.1),
    algorithms.FedNova(),
    algorithms.ServerOnly(),
]
SERVERS = [None, partial(FedAvgM, lr=1.0), partial(FedAdam, lr=0.05), partial(FedYogi, lr=0.05)]
SAMPLERS = [UniformSampler(4), BernoulliSampler(0.5), RoundRobinSampler(3)]
SCHEDULES = [None, partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.5)]
PRECISIONS = ["32-true", "64-true", "bf16-mixed"]


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("method", range(len(METHODS)), ids=lambda i: repr(METHODS[i]))
def test_killed_runs_of_combined_options_have_identical_bits(
    method: int, engine: str, processes: int, tmp_path: Path
) -> None:
    digits()
    number = 4 * method + 2 * (engine == "vectorized") + processes
    options = {
        "algorithm": METHODS[method],
        "engine": engine,
        "server_optimizer": SERVERS[number % len(SERVERS)],
        "server_lr_scheduler": SCHEDULES[number // 4 % len(SCHEDULES)],
        "sampler": SAMPLERS[number % len(SAMPLERS)],
        "clients_per_round": None,
        "precision": PRECISIONS[number // 3 % len(PRECISIONS)],
        "keep": {"save_last": "link" if number % 2 else True},
        "client_states": "disk" if (number // 4 + number) % 2 else "memory",
    }
    if not METHODS[method].local_work:
        options["local_epochs"] = None
    if isinstance(METHODS[method], algorithms.CMime):
        options["momentum"] = 0.0
    if processes > 1:
        options |= {"devices": processes, "strategy": "clients"}
    fallen = survive(lambda folder, places: work(folder, places, **options), tmp_path, number, 6, processes)
    assert len(fallen) >= 4, fallen
