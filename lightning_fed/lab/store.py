"""The folder of a grid: finished cells by key, written at once or not at all, and one command at a time."""

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
    """Name the folder whose disk is full, or that takes no files, where results are written.

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
    """The finished cells of a grid, to be used as a context: nobody else can work in the folder meanwhile.

    Args:
        out: The folder of the grid's results; the cells are in ``cells`` inside.
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
        for left in self.cells.glob(".*"):  # of cells that were killed; this command's own come later
            shutil.rmtree(left, ignore_errors=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the lock back."""
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
        """Note why a cell failed, in ``<key>.failed.json``."""
        text = json.dumps({"cell": name, "cause": cause}, indent=1)
        (self.cells / f"{key}.failed.json").write_text(text, encoding="utf-8")

    def failure(self, key: str) -> str | None:
        """Return why a cell failed when it was last run, None if it did not."""
        path = self.cells / f"{key}.failed.json"
        if not path.is_file():
            return None
        try:
            return str(json.loads(path.read_text(encoding="utf-8"))["cause"])
        except (ValueError, KeyError, TypeError):
            return f"{path} is damaged"

    def forget_failures(self, keys: Iterable[str]) -> None:
        """Forget that cells have failed, as they are about to be tried again or are not part of the grid."""
        for key in keys:
            (self.cells / f"{key}.failed.json").unlink(missing_ok=True)


def settle(work: Path, final: Path) -> None:
    """Let a folder that is complete appear under its final name, in one step; another one there stays."""
    try:
        os.rename(work, final)
    except OSError:
        if not (final / "cell.json").is_file():
            raise
        shutil.rmtree(work, ignore_errors=True)
