"""How processes part."""

import subprocess
import sys

import pytest

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
def test_the_group_is_left_before_python_ends(end: str, arguments: list[str], after: str) -> None:
    command = [sys.executable, "-c", SCRIPT + end, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-2:] == ["together", after], done.stderr
