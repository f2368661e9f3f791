"""What the tests rely on when they fork and kill processes."""

import multiprocessing
import time
from pathlib import Path

from tqdm import tqdm

from tests.helpers.processes import wait_until


def test_a_fork_that_is_killed_does_not_keep_the_lock_of_progress_bars(tmp_path: Path) -> None:
    holds = tmp_path / "holds"
    tqdm.get_lock()  # made before the fork, as by any test that has shown a bar

    def hold() -> None:
        with tqdm.get_lock():
            holds.touch()
            time.sleep(60)

    process = multiprocessing.get_context("fork").Process(target=hold, daemon=True)
    process.start()
    wait_until(holds.exists)
    process.kill()
    process.join()
    locks = tqdm.get_lock().locks
    assert [lock.acquire(timeout=5) for lock in locks] == [True] * len(locks)
    for lock in locks:
        lock.release()
