"""The folder of a grid. Finished cells are stored atomically by key, and one command at a time uses the folder."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout

from lightning_fed.core.errors import FederatedError
from lightning_fed.lab.records import Record, read_record


@contextmanager
def writing_to(out: Path) -> Iterator[None]:
    """Name the results folder in errors of writing to it, such as a full disk.

    Raises:
        FederatedError: In place of an ``OSError``.
    """
    try:
        yield
    except OSError as error:
        raise FederatedError(
            f"The results cannot be written to {out}: {error.strerror or error}. Make room, or give another --out."
        ) from error


class Store:
    """The finished cells of a grid. As a context manager, it locks the folder against other commands.

    Args:
        out: The folder of the grid's results. Its subfolder ``cells`` has the cells.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.cells = out / "cells"
        self._lock = FileLock(out / ".lock", timeout=0)
        self._read: dict[str, Record] = {}

    def __enter__(self) -> "Store":
        """Make the folder and take its lock.

        Raises:
            FederatedError: If another command works in the folder, or it cannot be made.
        """
        try:
            self.cells.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except Timeout as error:
            raise FederatedError(
                f"Another command works in {self.out}. Wait for its end, or give another folder with --out."
            ) from error
        except OSError as error:
            raise FederatedError(
                f"{self.out} cannot be used: {error.strerror or error}. Give another --out."
            ) from error
        for left in self.cells.glob(".*"):  # left by killed cells; this command has made none yet
            shutil.rmtree(left, ignore_errors=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the lock."""
        self._lock.release()

    def get(self, key: str) -> Record | None:
        """Return a finished cell, or None if it is not finished.

        Raises:
            FederatedError: If its files are damaged.
        """
        if key not in self._read and (record := read_record(self.cells / key)) is not None:
            self._read[key] = record
        return self._read.get(key)

    def has(self, key: str) -> bool:
        """Return whether a cell is finished."""
        return key in self._read or (self.cells / key / "cell.json").is_file()

    def note_failure(self, key: str, name: str, cause: str) -> None:
        """Write the cause of a cell's failure to ``<key>.failed.json``."""
        text = json.dumps({"cell": name, "cause": cause}, indent=1)
        (self.cells / f"{key}.failed.json").write_text(text, encoding="utf-8")

    def failure(self, key: str) -> str | None:
        """Return the cause if a cell's last run failed, else None."""
        path = self.cells / f"{key}.failed.json"
        if not path.is_file():
            return None
        try:
            return str(json.loads(path.read_text(encoding="utf-8"))["cause"])
        except (ValueError, KeyError, TypeError):
            return f"{path} is damaged"

    def forget_failures(self, keys: Iterable[str]) -> None:
        """Delete the failures of cells that are about to run again."""
        for key in keys:
            (self.cells / f"{key}.failed.json").unlink(missing_ok=True)


def settle(work: Path, final: Path) -> None:
    """Rename a complete folder to its final name atomically. If a finished cell is already there, keep that one."""
    try:
        os.rename(work, final)
    except OSError:
        if not (final / "cell.json").is_file():
            raise
        shutil.rmtree(work, ignore_errors=True)
