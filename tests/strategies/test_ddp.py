"""How processes part."""

import atexit
import ctypes
import gc
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.processes import HANGS

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
    """Run a script, and keep what it shows."""
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        command = [sys.executable, "-c", script, *arguments]
        subprocess.run(command, stdout=out, stderr=err, timeout=HANGS, check=False)


def in_a_forked_python(script: str, arguments: list[str], folder: Path) -> None:
    """Do the same in a copy of this process, which imports nothing anew, and ends as any Python does."""

    def run() -> None:
        atexit._clear()  # what the process of the tests does at its end
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):  # of a test that failed
            vars(sys).pop(name, None)
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        sys.stdout, sys.stderr = out, err
        sys.argv = ["-c", *arguments]
        gc.freeze()  # or the end would look through all that the tests have made
        ctypes.pythonapi.PyRun_SimpleString(script.encode())  # an error is shown and noted as the interpreter does it
        ctypes.pythonapi.Py_Exit(0)

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
        ("raise SystemExit(2)", [], "parted"),
        ("1 / 0", [], "in a group"),
        ("", ["own"], "in a group"),
    ],
    ids=["end", "exit", "error", "group of one's own"],
)
def test_the_group_is_left_before_python_ends(
    end: str, arguments: list[str], after: str, run: Run, tmp_path: Path
) -> None:
    run(SCRIPT + end, arguments, tmp_path)
    assert (tmp_path / "out").read_text().splitlines()[-2:] == ["together", after], (tmp_path / "err").read_text()
