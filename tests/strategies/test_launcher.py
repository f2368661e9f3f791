"""Processes started from within Python, and the results that the parent gets."""

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
    """An exception that pickle cannot restore."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


class Ends(FederatedCallback):
    """Ends the fit in one process, or in all."""

    def __init__(self, error: Exception, rank: int | None = None) -> None:
        self.error, self.rank = error, rank

    def on_round_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if self.rank in (None, trainer.global_rank):
            raise self.error


class Threads(FederatedCallback):
    """Writes the number of threads of each process to a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_round_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        (self.folder / f"{trainer.global_rank}").write_text(str(torch.get_num_threads()))


class DiesAtItsBar(FederatedCallback):
    """Kills the first process while it holds the lock of progress bars, as it does to draw one."""

    def on_round_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_rank == 0:
            with Tqdm.get_lock():
                os.kill(os.getpid(), signal.SIGKILL)


def test_child_exception_is_raised_with_its_type_and_traceback() -> None:
    with pytest.raises(KeyError, match="mine") as caught:
        trainer(strategy="clients_fork", callbacks=Ends(KeyError("mine")), **TWO).fit(seeded(), data())
    assert isinstance(caught.value.__cause__, ProcessRaisedException)
    assert "in on_round_end" in str(caught.value.__cause__)


def test_unpicklable_exception_is_not_sent_to_the_parent() -> None:
    launcher = RoundLauncher.__new__(RoundLauncher)
    launcher._start_method, launcher._errors = "spawn", multiprocessing.get_context("fork").SimpleQueue()

    def fails(error: Exception) -> None:
        raise error

    for error, arrives in (
        (TooManyWordsError("lost", "words"), False),
        (KeyError("x" * 2**16), False),
        (KeyError(1), True),
    ):
        with pytest.raises(type(error)):
            launcher._in_child(fails, error)
        assert (launcher._first_error() is not None) == arrives, error


@pytest.mark.thorough
def test_unpicklable_exception_is_raised_as_text() -> None:
    with pytest.raises(ProcessRaisedException, match="lost words"):
        trainer(strategy="clients_fork", callbacks=Ends(TooManyWordsError("lost", "words")), **TWO).fit(
            seeded(), data()
        )


def test_original_error_precedes_errors_it_caused_elsewhere() -> None:
    launcher = RoundLauncher.__new__(RoundLauncher)
    own, heard = FederatedError("own"), OtherProcessError("Process 1 failed: own")
    launcher._errors = multiprocessing.get_context("fork").SimpleQueue()
    for error in (heard, own):
        launcher._errors.put(error)
    assert str(launcher._first_error()) == "own"
    with pytest.raises(OtherProcessError, match="Process 1 failed: own"):
        Failure.raise_first([None, Failure.of(own)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the forked processes' checkpoint and numbers of threads."""
    return tmp_path_factory.mktemp("forked")


@pytest.fixture(scope="module")
def forked(folder: Path) -> Any:
    """Return a trainer whose processes have trained for two rounds, with three threads in the parent."""
    callbacks = [ModelCheckpoint(folder, "last"), Threads(folder)]
    run = trainer(
        **TWO,
        strategy="clients_fork",
        precision="64-true",
        callbacks=callbacks,
        enable_checkpointing=True,
        max_rounds=2,
    )
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "3")  # otherwise Lightning gives each process its share of the cores
            run.fit(seeded(), data())
    finally:
        torch.set_num_threads(before)
    return run


@pytest.mark.thorough
def test_forked_processes_use_one_thread(forked: Any, folder: Path) -> None:
    assert [(folder / f"{rank}").read_text() for rank in range(2)] == ["1", "1"]


def test_parent_has_the_module_trained_by_forked_processes(forked: Any, folder: Path) -> None:
    assert_has_the_module(forked, folder, torch.float64)


@pytest.mark.thorough
def test_parent_has_the_module_trained_in_half_precision(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "last")
    options = {"precision": "bf16-true", "callbacks": saver, "enable_checkpointing": True, "max_rounds": 2}
    run = trainer(**TWO, strategy="clients_fork", **options)
    run.fit(seeded(), data())
    assert_has_the_module(run, tmp_path, torch.bfloat16)


def assert_has_the_module(run: Any, folder: Path, dtype: torch.dtype) -> None:
    saved = torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]
    assert {value.dtype for value in saved.values()} == {dtype}
    for copied in (run, pickle.loads(pickle.dumps(run)), copy.deepcopy(run)):
        assert same(dict(copied.lightning_module.state_dict()), dict(saved))


def test_parent_knows_the_round_and_reports_the_lost_state(forked: Any, tmp_path: Path) -> None:
    assert_knows_the_round(forked, tmp_path)


@pytest.mark.thorough
def test_parent_knows_the_round_with_split_batches(tmp_path: Path) -> None:
    forked = trainer(strategy="ddp_notebook", max_rounds=2, **TWO)
    forked.fit(seeded(), data())
    assert_knows_the_round(forked, tmp_path)


def assert_knows_the_round(forked: Any, tmp_path: Path) -> None:
    assert (forked.fit_loop.round, forked.current_epoch, forked.global_step) == (2, 2, 2)
    with pytest.raises(FederatedError, match=r"server state after round 1 has ended with the processes"):
        _ = forked.fit_loop.state
    with pytest.raises(FederatedError, match=r"What a checkpoint holds after round 1 .* ModelCheckpoint"):
        forked.save_checkpoint(tmp_path / "whole.ckpt")
    forked.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    forked.max_rounds = 3
    with pytest.raises(FederatedError, match=r"A second fit of this trainer .* ckpt_path"):
        forked.fit(seeded(), data())


def test_fork_killed_at_its_progress_bar_does_not_lock_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = TqdmDefaultWriteLock()
    monkeypatch.setattr(Tqdm, "_lock", lock, raising=False)  # as outside the tests, which give each fork its own lock
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        trainer(strategy="clients_fork", callbacks=DiesAtItsBar(), **TWO).fit(seeded(), data())
    assert all(each.acquire(timeout=5) for each in lock.locks)
    lock.release()


@pytest.mark.parametrize(("strategy", "instead"), [("clients", "clients_fork"), ("ddp", "ddp_notebook")])
def test_notebook_error_suggests_a_supported_strategy(
    strategy: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    with pytest.raises(FederatedError, match=rf"strategy='{strategy}' starts the script .* strategy='{instead}'"):
        trainer(strategy=strategy, **TWO)


def test_fork_within_a_process_group_is_rejected() -> None:
    trainer(accelerator="cpu", strategy="clients", max_rounds=1).fit(seeded(), data())
    try:
        with pytest.raises(FederatedError, match=r"this process is in a process group.*destroy_process_group\(\)"):
            trainer(**TWO, strategy="clients_fork").fit(seeded(), data())
    finally:
        torch.distributed.destroy_process_group()
    run = trainer(**TWO, strategy="clients_fork", max_rounds=1)
    run.fit(seeded(), data())
    assert run.fit_loop.round == 1


@pytest.mark.parametrize("strategy", ["clients", "ddp"])
@pytest.mark.parametrize("program", ["-c", "-", ""])
def test_launch_without_a_script_is_rejected(strategy: str, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [program])
    refused = trainer(strategy=strategy, **TWO)
    with pytest.raises(FederatedError, match=f"strategy='{strategy}' starts.*pass strategy='{strategy}_fork'"):
        refused.fit(seeded(), data())
    with pytest.raises(FederatedError, match=f"strategy='{strategy}' starts"):
        refused.validate(seeded(), data())
    trainer(strategy=strategy, accelerator="cpu", devices=1, max_rounds=0).fit(seeded(), data())
