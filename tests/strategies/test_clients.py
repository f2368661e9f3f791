"""Clients shared by processes on several machines: same bits as on one machine, and lost processes are named."""

import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn

from lightning_fed import FederatedCallback
from lightning_fed.algorithms import Mime, Scaffold, SGDm
from lightning_fed.server import TrimmedMean
from lightning_fed.strategies import ClientsStrategy
from tests.behaviour.test_processes import UNEVEN, end
from tests.helpers.engines import Ordinary, assert_close
from tests.helpers.hosts import Host, two_hosts
from tests.helpers.processes import Outcome, in_processes
from tests.helpers.selection import few
from tests.helpers.training import FEATURES, classification, data, same


class Wide(Ordinary):
    """Has too many parameters for each process to send its whole vector to all."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 3001), nn.Tanh(), nn.Linear(3001, 8))


class Kills(FederatedCallback):
    """Kills processes in the third round, in the middle of their work."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks

    def on_client_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if trainer.current_epoch == 2 and trainer.global_rank in self.ranks:
            os.kill(os.getpid(), signal.SIGKILL)


class PullsThePlug(FederatedCallback):
    """Disconnects the host of a process in the third round."""

    def __init__(self, host: Host, rank: int) -> None:
        self.host, self.rank = host, rank

    def on_client_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if trainer.current_epoch == 2 and trainer.global_rank == self.rank:
            self.host.pull_the_plug()


RUNS: dict[str, Callable[..., dict[str, Any]]] = {
    "states that move": partial(end, algorithm=Scaffold(), precision="32-true", **UNEVEN),
    "momentum at once": partial(end, "vectorized", algorithm=Mime(base=SGDm()), clients_per_round=5),
    "a larger model": partial(end, make=Wide, precision="32-true", clients_per_round=5, max_rounds=2),
    "states that move, of a larger model": partial(
        end, make=Wide, algorithm=Scaffold(), precision="32-true", **{**UNEVEN, "max_rounds": 2}
    ),
    "columns": partial(end, aggregator=TrimmedMean(0.2), clients_per_round=5),
}


def of_all(count: int, share_memory: bool, num_nodes: int = 1, names: Sequence[str] = tuple(RUNS)) -> dict[str, Any]:
    """Return the result of each run, in processes with or without shared memory."""
    found = {}
    for name, run in ((name, RUNS[name]) for name in names):
        strategy = ClientsStrategy(share_memory=share_memory)
        found[name] = run(strategy=strategy, devices=count // num_nodes, num_nodes=num_nodes)
    return found


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    for outcome in outcomes:
        assert not outcome.error, outcome.trace
    return [outcome.value for outcome in outcomes]


def assert_same_bits(those: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> None:
    for one, other in zip(those, others, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert same(one[name]["state"], other[name]["state"]), name
            assert one[name]["metrics"] == other[name]["metrics"], name
            assert one[name]["trained"] == other[name]["trained"], name


@pytest.mark.thorough
@pytest.mark.parametrize("count", [2, 3, 4])
def test_results_have_identical_bits_with_or_without_shared_memory(count: int, tmp_path: Path) -> None:
    names = ["states that move, of a larger model"] if count == 3 else list(RUNS)

    def work() -> Any:
        return [of_all(count, share_memory, names=names) for share_memory in (True, False)]

    one, other = zip(*values(in_processes(work, tmp_path, count)), strict=True)
    assert_same_bits(one, other)


def test_killed_process_is_named_by_the_others(tmp_path: Path) -> None:
    def work() -> Any:
        return end(callbacks=[Kills(1)], strategy=ClientsStrategy(share_memory=False), devices=3, clients_per_round=6)

    first, killed, third = in_processes(work, tmp_path, 3)
    assert killed.error == "killed"
    for rank, outcome in ((0, first), (2, third)):
        assert re.search(rf"FederatedError: Process {rank} on \S+ has lost process 1 \(pid \d+\) on", outcome.error)
        assert "Process 0" not in outcome.error[20:]


class Gathers(Ordinary):
    """Gathers the losses of all processes, as contrastive losses gather examples."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self.step = step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.step == "training":
            self.all_gather(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.step == "validation":
            self.all_gather(batch[0])

    def on_train_epoch_end(self) -> None:
        assert self.all_gather(torch.tensor(self.trainer.global_rank)).tolist() == [0, 1]


class Barrier(FederatedCallback):
    """Waits for the other processes after every client."""

    def on_client_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        trainer.strategy.barrier()


@pytest.mark.parametrize(
    ("step", "call", "does"),
    few(
        [
            pytest.param("training", "self.all_gather()", "trains its own clients", id="training"),
            pytest.param("validation", "self.all_gather()", "evaluates its own batches", id="validation"),
            pytest.param("client", "trainer.strategy.barrier()", "trains its own clients", id="client"),
            pytest.param("none", "", "", id="none"),
        ],
        ["training"],
    ),
)
def test_collective_calls_during_per_process_work_are_rejected(step: str, call: str, does: str, tmp_path: Path) -> None:
    batches = partial(data, val=classification(12, 7), eval_batch_size=4)  # three batches for two processes

    def work() -> Any:
        callbacks = [Barrier()] if step == "client" else []
        options: dict[str, Any] = {"max_rounds": 1, "num_sanity_val_steps": 0, "datamodule": batches}
        end(make=partial(Gathers, step), callbacks=callbacks, strategy="clients", devices=2, **options)

    for outcome in in_processes(work, tmp_path, timeout=60):
        assert (f"{call} waits for all processes, and here each of them {does}" in outcome.error) == bool(call)
        assert bool(outcome.error) == bool(call), outcome.trace


@pytest.mark.thorough
@pytest.mark.parametrize(("size", "is_refused"), [(8, False), (9, True)])
def test_collective_calls_are_rejected_with_too_few_batch_examples(size: int, is_refused: bool, tmp_path: Path) -> None:
    def work() -> Any:
        options: dict[str, Any] = {"max_rounds": 1, "clients_per_round": 1.0, "datamodule": lambda: data((size,))}
        end(make=partial(Gathers, "training"), strategy="ddp", devices=2, limit_val_batches=0, **options)

    first, _ = in_processes(work, tmp_path, timeout=60)
    assert ("a batch that has fewer examples than there are processes" in first.error) == is_refused
    assert bool(first.error) == is_refused, first.trace


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with two_hosts() as hosts:
        yield hosts


@pytest.mark.thorough
def test_two_hosts_match_one_with_identical_bits(hosts: list[Host], tmp_path: Path) -> None:
    one = values(in_processes(lambda: of_all(4, True), tmp_path, 4))
    two = values(in_processes(lambda: of_all(4, False, num_nodes=2), tmp_path, 4, hosts=hosts))
    assert_same_bits(one, two)


def saved(folder: Path, *callbacks: Any, **options: Any) -> dict[str, Any]:
    saver = ModelCheckpoint(folder / "checkpoints", save_last=True)
    options = {
        "algorithm": Scaffold(),
        "enable_checkpointing": True,
        "max_rounds": 4,
        "clients_per_round": 6,
        **options,
    }
    return end(callbacks=[saver, *callbacks], **options)


def on_two(folder: Path, *callbacks: Any) -> dict[str, Any]:
    return saved(folder, *callbacks, strategy=ClientsStrategy(share_memory=False), devices=2, num_nodes=2)


@pytest.mark.thorough
def test_killed_host_is_named_and_the_run_resumes_without_it(hosts: list[Host], tmp_path: Path) -> None:
    first, second, *killed = in_processes(partial(on_two, tmp_path, Kills(2, 3)), tmp_path, 4, hosts=hosts)
    assert [outcome.error for outcome in killed] == ["killed"] * 2
    for rank, outcome in enumerate((first, second)):
        names = rf"FederatedError: Process {rank} on {hosts[0].name} has lost "
        assert re.search(rf"{names}processes 2 \(pid \d+\), 3 \(pid \d+\) on {hosts[1].name}\.", outcome.error)
    whole = saved(tmp_path / "whole")
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert torch.load(last, weights_only=True)["epoch"] == 1
    resumed = partial(saved, tmp_path / "resumed", ckpt_path=last)
    assert_close(whole["state"], resumed()["state"])
    for part in values(in_processes(lambda: resumed(strategy="clients", devices=2), tmp_path)):
        assert_close(whole["state"], part["state"])


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, 2])
def test_disconnected_host_is_named(rank: int, hosts: list[Host], tmp_path: Path) -> None:
    unplugged = PullsThePlug(hosts[rank // 2], rank)
    outcomes = in_processes(partial(on_two, tmp_path, unplugged), tmp_path, 4, hosts=hosts)
    for rank, outcome in enumerate(outcomes):
        own, other = hosts if rank < 2 else reversed(hosts)
        numbers = [r for r in range(4) if r // 2 != rank // 2]
        names = r"processes {} \(pid \d+\), {} \(pid \d+\)".format(*numbers)
        assert re.search(rf"Process {rank} on {own.name} has lost {names} on {other.name}\.", outcome.error)
        assert ("Process 0, which writes logs and checkpoints, is among them." in outcome.error) == (rank > 1)
