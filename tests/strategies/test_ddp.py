"""Splitting batches within a client with Lightning's DDP, rejected strategies, and leaving the process group."""

import atexit
import ctypes
import gc
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn

from lightning_fed import FederatedError, FederatedTrainer
from lightning_fed.settings.module_checks import check_batch_statistics
from lightning_fed.strategies import WithinClientStrategy
from tests.helpers.ids import spelled
from tests.helpers.processes import HANGS, in_processes
from tests.helpers.training import QUIET, fit, seeded


def test_ddp_strategies_become_the_batch_splitting_strategy() -> None:
    for strategy in ("ddp", "ddp_spawn", "ddp_find_unused_parameters_false", "auto", DDPStrategy()):
        made = FederatedTrainer(**{**QUIET, "local_epochs": 1, "devices": 2, "strategy": strategy})
        assert type(made.strategy) is WithinClientStrategy
        assert not made._accelerator_connector.use_distributed_sampler


class OwnDDP(DDPStrategy):
    pass


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("fsdp", "The strategy fsdp is not supported: it shards the parameters.*strategy='clients'"),
        ("deepspeed_stage_2", "The strategy deepspeed_stage_2 is not supported: it keeps parameters"),
        ("xla", "The strategy xla is not supported: it records steps"),
        (FSDPStrategy(), "The strategy FSDPStrategy is not supported: it shards"),
        (ModelParallelStrategy(), "The strategy ModelParallelStrategy is not supported: it spreads the parameters"),
        (OwnDDP(), "The strategy OwnDDP is not supported: it changes how gradients are reduced"),
        (DDPStrategy(model_averaging_period=3), "model_averaging_period=3.* is not supported.*Leave model_averaging"),
        (DDPStrategy(ddp_comm_hook=print), "ddp_comm_hook=.* is not supported"),
    ],
    ids=spelled,
)
def test_unsupported_strategies_are_rejected(strategy: Any, message: str) -> None:
    with pytest.raises(FederatedError, match=message):
        FederatedTrainer(**{**QUIET, "local_epochs": 1, "strategy": strategy})


def test_vectorized_engine_is_rejected_with_split_batches() -> None:
    with pytest.raises(FederatedError, match="engine='vectorized' cannot be combined with strategy='ddp' on 2 devices"):
        fit(engine="vectorized", devices=2, strategy="ddp")


def test_batch_norm_in_evaluation_mode_is_accepted() -> None:
    module = seeded()
    module.norm = nn.BatchNorm1d(3)
    with pytest.raises(FederatedError, match=r"norm \(BatchNorm1d\) normalises .* Use GroupNorm"):
        check_batch_statistics(module)
    module.norm.eval()
    check_batch_statistics(module)


@pytest.mark.thorough
def test_ddp_with_one_process_matches_a_plain_run(tmp_path: Path) -> None:
    # in another process: processes forked by other tests would take this process's group for theirs
    (outcome,) = in_processes(lambda: fit(strategy="ddp", devices=1), tmp_path, count=1)
    assert torch.equal(outcome.value, fit())


SCRIPT = """
import atexit
import sys
import torch.distributed as dist
atexit.register(lambda: print("in a group" if dist.is_initialized() else "parted"))  # runs last, as it is the first
from lightning_fed import FederatedTrainer
if "own" in sys.argv:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
trainer = FederatedTrainer(strategy="clients", devices=1, accelerator="cpu", local_epochs=1, logger=False)
for _ in range(2):
    trainer.strategy.setup_environment()
print("together" if dist.is_initialized() else "alone")
"""


Run = Callable[[str, list[str], Path], None]


def in_a_new_python(script: str, arguments: list[str], folder: Path) -> None:
    """Run a script, and save its output."""
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        command = [sys.executable, "-c", script, *arguments]
        subprocess.run(command, stdout=out, stderr=err, timeout=HANGS, check=False)


def in_a_forked_python(script: str, arguments: list[str], folder: Path) -> None:
    """Do the same in a fork of this process, which skips the imports and ends like any Python process."""

    def run() -> None:
        atexit._clear()  # drops the exit handlers of the test process
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):  # left by a failed test
            vars(sys).pop(name, None)
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        sys.stdout, sys.stderr = out, err
        sys.argv = ["-c", *arguments]
        gc.freeze()  # keeps the exit from scanning all objects of the tests
        ctypes.pythonapi.PyRun_SimpleString(script.encode())  # shows and records an error as the interpreter does
        atexit._run_exitfuncs()  # as at Python's exit, without the time to free all memory
        out.flush()
        os._exit(0)

    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        process = multiprocessing.get_context("fork").Process(target=run, daemon=True)
        process.start()
        process.join(HANGS)
        process.kill()


@pytest.mark.parametrize("run", [in_a_forked_python, pytest.param(in_a_new_python, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("end", "arguments", "after"),
    [
        ("", [], "parted"),
        pytest.param("raise SystemExit(2)", [], "parted", marks=pytest.mark.thorough),  # same as a normal end
        ("1 / 0", [], "in a group"),
        ("", ["own"], "in a group"),
    ],
    ids=["end", "exit", "error", "group of one's own"],
)
def test_process_group_is_destroyed_before_python_exits(
    end: str, arguments: list[str], after: str, run: Run, tmp_path: Path
) -> None:
    run(SCRIPT + end, arguments, tmp_path)
    assert (tmp_path / "out").read_text().splitlines()[-2:] == ["together", after], (tmp_path / "err").read_text()
