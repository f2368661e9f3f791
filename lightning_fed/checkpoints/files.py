"""Atomic checkpoint files, whose checksums are verified on reading."""

import errno
import os
import pickle
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch.serialization import get_crc32_options, set_crc32_options

from lightning_fed.compat.package import pl
from lightning_fed.compat.private import rank_zero_warn
from lightning_fed.core.disk import flush_folder
from lightning_fed.core.errors import FederatedError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_PART = ".part"
_UNREADABLE = (zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, RuntimeError, ValueError, KeyError)


class AtomicCheckpointIO(pl.plugins.io.TorchCheckpointIO):
    """Writes a checkpoint to a temporary file, flushes and renames it; verifies its content on reading.

    If the process or the machine dies at any time, a checkpoint is the old or the new one. A link such as ``last``
    points to a complete one. Each local file is newer than the one saved or loaded before it, even if the clock was set
    back, since ``ckpt_path="last"`` is the newest. fsspec handles remote paths, and uploads complete files.
    """

    _newest = 0  # the time of the last file, in nanoseconds

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save a checkpoint; if a local file cannot be written, the existing file stays."""
        file = local_path(path)
        if file is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        part = file.with_name(f".{file.name}.{os.getpid()}{_PART}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as stream:
                _lock(stream)
                _write(checkpoint, stream)
            if (written := part.stat().st_mtime_ns) <= self._newest:
                written = self._newest + 1
                os.utime(part, ns=(written, written))
            os.replace(part, file)
            self._newest = written
            flush_folder(file.parent)
        except OSError as error:
            reason = error.strerror or str(error)
            raise FederatedError(
                f"The checkpoint {file} could not be written: {reason}. Earlier files are unchanged. Make room, or save"
                " elsewhere (ModelCheckpoint's dirpath), and resume with ckpt_path='last'."
            ) from error
        finally:
            part.unlink(missing_ok=True)

    def load_checkpoint(
        self,
        path: Any,
        map_location: Callable[..., Any] | None = lambda storage, loc: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint with valid checksums; the error for a damaged one names the newest valid one."""
        file = local_path(path)
        if file is not None and file.exists():
            if not os.access(file, os.R_OK):
                reason = os.strerror(errno.EACCES)
                raise FederatedError(f"The checkpoint {file} cannot be read: {reason}. Let this user read it.")
            if fault := damage_of(file):
                raise FederatedError(f"The checkpoint {file} is damaged: {fault}. {_remedy_for(file)}")
            self._newest = max(self._newest, file.stat().st_mtime_ns)
        try:
            return super().load_checkpoint(path, map_location, weights_only is None or weights_only)  # type: ignore[no-any-return]
        except FileNotFoundError as error:
            raise FederatedError(f"There is no checkpoint {path}. Correct ckpt_path.") from error
        except pickle.UnpicklingError as error:
            reason = str(error).strip().partition("\n")[0]
            raise FederatedError(
                f"The checkpoint {path} holds more than tensors and plain containers, which would run code when it is"
                f" read: {reason} Pass weights_only=False if you trust its writer."
            ) from error
        except (RuntimeError, EOFError, zipfile.BadZipFile) as error:
            reason = str(error).strip().partition("\n")[0]
            raise FederatedError(f"The checkpoint {path} cannot be read: {reason}") from error

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, and point links to it to the newest remaining one."""
        file = local_path(path)
        if file is not None and file.exists() and not file.is_symlink():
            others = [other for other in by_age(file.parent) if other.resolve() != file.resolve()]
            for name in _links_to(file) if others else ():
                link(others[0].resolve(), name)
        super().remove_checkpoint(path)


def local_path(path: Any) -> Path | None:
    """Return the local file of a path or URL, or None if it is remote."""
    system, stripped = url_to_fs(str(path))
    return Path(stripped) if isinstance(system, LocalFileSystem) else None


def damage_of(file: Path) -> str | None:
    """Return the fault of a local checkpoint, or None if every byte of its content is as written."""
    if not file.is_file():
        return "it is not a file"
    try:
        with zipfile.ZipFile(file) as archive:
            names = {name.rpartition("/")[2] for name in archive.namelist()}
            bad = archive.testzip()
    except _UNREADABLE as error:
        return f"it is truncated, or not a checkpoint ({error})"
    if bad is not None:
        return f"the checksum of {bad} is not that of its bytes"
    return None if "data.pkl" in names else "it is an archive, but not one of torch.save"


def resumable(file: Path) -> bool:
    """Return whether a valid checkpoint contains more than weights."""
    with zipfile.ZipFile(file) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        return b"optimizer_states" in archive.read(name)


def newest_valid(folder: Path, other_than: Path | None = None) -> Path | None:
    """Return the newest valid checkpoint of a folder that can be resumed, without links."""
    unwanted = None if other_than is None else other_than.resolve()
    for file in by_age(folder):
        if file.resolve() != unwanted and not file.is_symlink() and damage_of(file) is None and resumable(file):
            return file
    return None


def by_age(*folders: Path) -> list[Path]:
    """Return the checkpoint files of folders, newest first, links after their targets."""
    files = [file for folder in folders if folder.is_dir() for file in folder.glob("*.ckpt") if file.is_file()]
    return sorted(files, key=lambda file: (-file.stat().st_mtime_ns, file.is_symlink(), file.name))


def link(file: Path, name: Path) -> None:
    """Point a link to a file in its folder or below, atomically.

    If the system does not support links (Windows without the permission, some network disks), it copies the file.
    """
    part = name.with_name(f".{name.name}.{os.getpid()}{_PART}")
    part.unlink(missing_ok=True)
    try:
        part.symlink_to(os.path.relpath(file, name.parent))
    except (OSError, NotImplementedError):
        _copy(file, part)
        rank_zero_warn(f"{name.parent} cannot hold symbolic links: {name.name} is a copy of the checkpoint instead.")
    os.replace(part, name)
    flush_folder(name.parent)


def remove_temporary_files(folder: Path) -> list[Path]:
    """Remove a folder's files of killed saves, and return them; skip saves in progress and undeletable files."""
    gone = []
    for part in folder.glob(f".*{_PART}") if folder.is_dir() else ():
        with suppress(OSError):
            if _is_abandoned(part):
                part.unlink(missing_ok=True)
                gone.append(part)
    return gone


class _Stream:
    """A file for ``torch.save`` that keeps the errors of the disk, which ``torch.save`` would change."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write, unless the disk has already failed."""
        if self.error is None:
            try:
                self._stream.write(data)
            except OSError as error:
                self.error = error
        return len(data)

    def flush(self) -> None:
        """Do nothing: the file is flushed at its end."""


def _write(checkpoint: dict[str, Any], stream: IO[bytes]) -> None:
    out, checks = _Stream(stream), get_crc32_options()
    set_crc32_options(True)  # otherwise damage could not be detected
    try:
        torch.save(checkpoint, out)  # type: ignore[arg-type]
    finally:
        set_crc32_options(checks)
    if out.error is not None:
        raise out.error
    stream.flush()
    os.fsync(stream.fileno())


def _copy(file: Path, part: Path) -> None:
    with file.open("rb") as source, part.open("wb") as stream:
        _lock(stream)
        shutil.copyfileobj(source, stream)
        stream.flush()
        os.fsync(stream.fileno())


def _lock(stream: IO[bytes]) -> None:
    """Lock a file while it is written; the lock ends with the process."""
    if fcntl is not None:
        with suppress(OSError):  # the file system may not support locks
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_abandoned(part: Path) -> bool:
    if fcntl is None or part.is_symlink():
        return True
    try:
        with part.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _links_to(file: Path) -> list[Path]:
    with os.scandir(file.parent) as entries:
        names = [Path(entry.path) for entry in entries if entry.is_symlink() and not entry.name.endswith(_PART)]
    return [name for name in names if name.resolve() == file.resolve()]


def _remedy_for(file: Path) -> str:
    sound = newest_valid(file.parent, other_than=file)
    if sound is None:
        return "There is no valid checkpoint next to it. Start a new run, without ckpt_path."
    return f"The newest valid one next to it: ckpt_path={str(sound)!r}."
