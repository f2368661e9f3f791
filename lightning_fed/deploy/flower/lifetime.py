"""A process that does not outlive another one. No PyTorch here."""

import os
import select
import threading
import time

__all__ = ["STARTED_BY", "end_with"]

STARTED_BY = os.getppid()
"""The process that has started this one; of an orphan, the system's first one, if it was one already."""

_LOOK = 1.0  # seconds between two looks at the other process, where the system does not tell of its end


def end_with(other: int) -> None:
    """End this process, whatever it does, as soon as another one has ended.

    What is kept is not harmed: states of clients and checkpoints are on the disk as a whole or not at all.

    Args:
        other: The other one's id.
    """
    threading.Thread(target=_wait_and_end, args=(other,), daemon=True).start()


def _wait_and_end(other: int) -> None:
    try:
        if hasattr(os, "pidfd_open"):  # Linux tells at once, and of no other process that has got the same number
            select.select([os.pidfd_open(other)], [], [])
        else:
            while True:
                os.kill(other, 0)
                time.sleep(_LOOK)
    except ProcessLookupError:
        pass
    os._exit(0)
