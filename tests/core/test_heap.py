"""What the C library does with freed memory."""

import platform
import subprocess
import sys

import pytest

# In a process of its own: what is freed in this one has raised the limit.
_FAULTS = """
import resource
import torch
from lightning_fed.core.heap import keep_freed_memory

vectors = [torch.zeros(0) for _ in range(40)]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        for vector in vectors:
            vector.resize_(2**18).fill_(1.0)  # 1 MB, 256 pages
        for vector in vectors:
            vector.untyped_storage().resize_(0)
            vector.resize_(0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
found = faults()
keep_freed_memory(2**26)
faults()
print(found, faults())
"""


@pytest.mark.thorough
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have other rules")
def test_memory_that_is_freed_and_needed_again_stays() -> None:
    printed = subprocess.run([sys.executable, "-c", _FAULTS], check=True, capture_output=True, text=True).stdout
    returned, kept = map(int, printed.split())
    assert returned > 3 * 5000
    assert kept < 100
