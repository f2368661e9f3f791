"""What must be on the disk before something else may refer to it."""

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["flush_folder"]


def flush_folder(folder: Path) -> None:
    """Wait until names made or changed in a folder are on the disk, if the system lets a folder be flushed."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
