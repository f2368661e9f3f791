"""Assumptions of tests that fork and kill processes."""

import multiprocessing
import time
from pathlib import Path

import pytest
from tqdm import tqdm

from lightning_fed.compat.private import Tqdm
from tests.helpers.processes import wait_until


@pytest.mark.parametrize("bar", [tqdm, Tqdm])
def test_killed_fork_releases_the_progress_bar_lock(bar: type[tqdm], tmp_path: Path) -> None:
    holds = tmp_path / "holds"
    bar.get_lock()  # created before the fork, as by any earlier test that showed a bar

    def hold() -> None:
        with bar.get_lock():
            holds.touch()
            time.sleep(60)

    process = multiprocessing.get_context("fork").Process(target=hold, daemon=True)
    process.start()
    wait_until(holds.exists)
    process.kill()
    process.join()
    assert bar.get_lock().acquire(timeout=5)
    bar.get_lock().release()
