"""How processes part."""

import subprocess
import sys

import pytest

SCRIPT = """
import atexit
import torch.distributed as dist
atexit.register(lambda: print("in a group" if dist.is_initialized() else "parted"))  # runs last, as it is the first
from lightning_fed import FederatedTrainer
trainer = FederatedTrainer(strategy="clients", devices=1, accelerator="cpu", local_epochs=1, logger=False)
for _ in range(2):
    trainer.strategy.setup_environment()
print("together" if dist.is_initialized() else "alone")
"""


@pytest.mark.parametrize(("end", "after"), [("", "parted"), ("raise SystemExit(2)", "parted"), ("1 / 0", "in a group")])
def test_the_group_is_left_before_python_ends_unless_by_an_error(end: str, after: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT + end], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-2:] == ["together", after], done.stderr
