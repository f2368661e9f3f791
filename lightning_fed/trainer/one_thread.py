"""One thread of a process fits at a time: all threads share the global random generators."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_fed.core.errors import FederatedError

_fitting = threading.RLock()


def _forget() -> None:
    """Allow a forked process to fit, since it does not contain a thread that was fitting."""
    global _fitting
    _fitting = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@contextmanager
def one_thread() -> Iterator[None]:
    """Refuse a fit while another thread of the process is fitting; within a fit, its thread may fit another module.

    Every client seeds PyTorch's, Python's and NumPy's global generators. A second fit would seed them in between, and
    both would train with other dropout masks and augmentations than alone.

    Raises:
        FederatedError: If another thread is fitting.
    """
    fitting = _fitting
    if not fitting.acquire(blocking=False):
        raise FederatedError(
            "FederatedTrainer.fit is running in another thread of this process, and both fits would draw from the same"
            " global random generators. Run one fit after the other, or each in its own process (with Optuna, n_jobs=1"
            " in several processes)."
        )
    try:
        yield
    finally:
        fitting.release()
