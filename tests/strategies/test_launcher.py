"""Processes that are started from within Python, and what the parent knows of them afterwards."""

import copy
import multiprocessing
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.trainer.connectors import accelerator_connector
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from tqdm.std import TqdmDefaultWriteLock

from lightning_fed import FederatedCallback, FederatedError
from lightning_fed.compat.private import Tqdm
from lightning_fed.strategies.launcher import RoundLauncher
from lightning_fed.strategies.stopping import Failure, OtherProcessError
from tests.helpers.training import data, same, seeded, trainer

TWO: dict[str, Any] = {"accelerator": "cpu", "devices": 2}


class TooManyWordsError(Exception):
    """An exception that pickle cannot make again."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


class Ends(FederatedCallback):
    """Ends the fit in one of the processes, or in all."""

    def __init__(self, error: Exception, rank: int | None = None) -> None:
        self.error, self.rank = error, rank

    def on_round_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if self.rank in (None, trainer.global_rank):
            raise self.error


class Threads(FederatedCallback):
    """Writes down on how many threads a process computes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_round_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        (self.folder / f"{trainer.global_rank}").write_text(str(torch.get_num_threads()))


class DiesAtItsBar(FederatedCallback):
    """Kills the first process while it holds the lock of progress bars, as it does when it draws one."""

    def on_round_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_rank == 0:
            with Tqdm.get_lock():
                os.kill(os.getpid(), signal.SIGKILL)


def test_an_exception_of_a_child_process_is_raised_as_itself_with_its_trace() -> None:
    with pytest.raises(KeyError, match="mine") as caught:
        trainer(strategy="clients_fork", callbacks=Ends(KeyError("mine")), **TWO).fit(seeded(), data())
    assert isinstance(caught.value.__cause__, ProcessRaisedException)
    assert "in on_round_end" in str(caught.value.__cause__)


def test_an_exception_that_cannot_be_pickled_is_raised_as_text() -> None:
    with pytest.raises(ProcessRaisedException, match="lost words"):
        trainer(strategy="clients_fork", callbacks=Ends(TooManyWordsError("lost", "words")), **TWO).fit(
            seeded(), data()
        )


def test_the_first_error_of_a_process_goes_before_those_it_caused_elsewhere() -> None:
    launcher = RoundLauncher.__new__(RoundLauncher)
    own, heard = FederatedError("own"), OtherProcessError("Process 1 failed: own")
    launcher._errors = multiprocessing.get_context("fork").SimpleQueue()
    for error in (heard, own):
        launcher._errors.put(error)
    assert str(launcher._first_error()) == "own"
    with pytest.raises(OtherProcessError, match="Process 1 failed: own"):
        Failure.raise_first([None, Failure.of(own)])


@pytest.mark.parametrize("strategy", ["clients_fork", "ddp_notebook"])
def test_the_parent_knows_the_round_and_says_where_the_state_is(strategy: str, tmp_path: Path) -> None:
    forked = trainer(strategy=strategy, max_rounds=2, **TWO)
    forked.fit(seeded(), data())
    assert (forked.fit_loop.round, forked.current_epoch, forked.global_step) == (2, 2, 2)
    with pytest.raises(FederatedError, match=r"server state after round 1 has ended with the processes"):
        _ = forked.fit_loop.state
    with pytest.raises(FederatedError, match=r"What a checkpoint holds after round 1 .* ModelCheckpoint"):
        forked.save_checkpoint(tmp_path / "whole.ckpt")
    forked.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    forked.max_rounds = 3
    with pytest.raises(FederatedError, match=r"A second fit of this trainer .* ckpt_path"):
        forked.fit(seeded(), data())


def test_forked_processes_compute_on_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # or Lightning gives each process its share of the cores
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        trainer(strategy="clients_fork", callbacks=Threads(tmp_path), **TWO).fit(seeded(), data())
    finally:
        torch.set_num_threads(before)
    assert [file.read_text() for file in sorted(tmp_path.iterdir())] == ["1", "1"]


def test_a_fork_that_is_killed_at_its_bar_leaves_the_parent_its_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = TqdmDefaultWriteLock()
    monkeypatch.setattr(Tqdm, "_lock", lock, raising=False)  # as outside the tests, which give forks their own
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        trainer(strategy="clients_fork", callbacks=DiesAtItsBar(), **TWO).fit(seeded(), data())
    assert all(each.acquire(timeout=5) for each in lock.locks)
    lock.release()


@pytest.mark.parametrize(("strategy", "instead"), [("clients", "clients_fork"), ("ddp", "ddp_notebook")])
def test_a_notebook_is_told_which_strategy_it_can_have(
    strategy: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    with pytest.raises(FederatedError, match=rf"strategy='{strategy}' starts the script .* strategy='{instead}'"):
        trainer(strategy=strategy, **TWO)


DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16}


@pytest.mark.parametrize("precision", ["64-true", pytest.param("bf16-true", marks=pytest.mark.thorough)])
def test_the_parent_has_the_module_that_forked_processes_trained(precision: str, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "last")
    run = trainer(
        **TWO, strategy="clients_fork", precision=precision, callbacks=saver, enable_checkpointing=True, max_rounds=2
    )
    run.fit(seeded(), data())
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert {value.dtype for value in saved.values()} == {DTYPES[precision]}
    for copied in (run, pickle.loads(pickle.dumps(run)), copy.deepcopy(run)):
        assert same(dict(copied.lightning_module.state_dict()), dict(saved))


def test_a_process_of_a_group_is_not_forked() -> None:
    trainer(accelerator="cpu", strategy="clients", max_rounds=1).fit(seeded(), data())
    try:
        with pytest.raises(FederatedError, match=r"this process is in a process group.*destroy_process_group\(\)"):
            trainer(**TWO, strategy="clients_fork").fit(seeded(), data())
    finally:
        torch.distributed.destroy_process_group()
    run = trainer(**TWO, strategy="clients_fork", max_rounds=1)
    run.fit(seeded(), data())
    assert run.fit_loop.round == 1
