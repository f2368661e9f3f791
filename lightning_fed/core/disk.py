"""Flush folders to disk, for files that other files refer to."""

import os
from contextlib import suppress
from pathlib import Path


def flush_folder(folder: Path) -> None:
    """Wait until new or changed names in a folder are on the disk, if the system can flush folders."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
