"""The origin of a cell: the commit of the code, and checksums of the data files that it read."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

_opened: set[str] | None = None  # the opened files, while a caller records them


@cache
def commit() -> str | None:
    """Return the commit of the code, with "-dirty" if files differ from it; None if it is not in a repository."""
    folder, git = Path(__file__).parents[2], shutil.which("git")
    if git is None or not (folder / ".git").exists():
        return None
    command = [git, "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.strip() or None


@contextmanager
def files_read(root: str | None) -> Iterator[set[str]]:
    """Yield a set. On exit, it receives the files in a folder that this process opened within the context.

    Args:
        root: The folder; None collects nothing.
    """
    global _opened
    _listen()
    found: set[str] = set()
    _opened = set()
    try:
        yield found
    finally:
        opened, _opened = _opened, None
        if root is not None:
            folder = Path(os.path.abspath(root))
            paths = (Path(os.path.abspath(name)) for name in opened)
            found |= {str(path) for path in paths if path.is_relative_to(folder) and path.is_file()}


def checksums(files: set[str], root: str) -> dict[str, str]:
    """Return the SHA-256 of files by their paths in a folder."""
    return {Path(path).relative_to(os.path.abspath(root)).as_posix(): _sha256(path) for path in sorted(files)}


def changed_file(sums: Mapping[str, str], root: str) -> str | None:
    """Return the first file whose SHA-256 differs from that in :func:`checksums`, or None.

    Deleted files count as unchanged, since a finished cell no longer needs them.
    """
    paths = {os.path.join(os.path.abspath(root), name): value for name, value in sums.items()}
    return next((path for path, value in paths.items() if os.path.isfile(path) and _sha256(path) != value), None)


def _sha256(path: str) -> str:
    return _digest(path, os.stat(path).st_mtime_ns)


@lru_cache(maxsize=256)
def _digest(path: str, changed: int) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


@cache
def _listen() -> None:
    """Add an audit hook that records opened files. Python cannot remove such a hook, so this runs only once."""

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and _opened is not None and isinstance(args[0], str | os.PathLike):
            _opened.add(os.fspath(args[0]))

    sys.addaudithook(note)
