"""Client states on the site's own disk: the last two versions of each, written atomically."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load, save

from lightning_fed.core.disk import flush_folder
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import ClientId, State

_AGREED = "agreed.json"
Version: TypeAlias = tuple[int, str]
_log = logging.getLogger("lightning_fed.deploy.site")


class SiteStates:
    """A folder for this user alone, with a subfolder of agreements and client states for each run.

    A state's version has two parts: the round after which it holds, counted from 1, and a name of the round's start,
    "fit". So two servers that continue one run do not share states, nor do two starts of a round. Version 0 means that
    a client has not taken part yet and has no state.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = FileLock(folder / ".lock", timeout=0, mode=0o600)
            self._lock.acquire()
        except Timeout as error:
            raise FederatedError(
                f"Another site, here or in another process, works with the folder {folder}. Close it, or give another"
                " state_dir."
            ) from error
        except OSError as error:
            raise FederatedError(f"The site's folder {folder} cannot be used: {error.strerror or error}.") from error
        if os.name == "posix" and folder.stat().st_mode & 0o022:
            _log.warning("Others can write into the site's folder %s. Set its mode to 0700.", folder)
        for left in folder.rglob(".*.new"):  # left by a killed process
            left.unlink()

    def close(self) -> None:
        """Release the folder for other processes."""
        self._lock.release()

    def agreed(self, run: str) -> dict[str, Any] | None:
        """Return the ids of all clients of a run, the words of columns and the server's facts, None before them."""
        path = self.folder / run / _AGREED
        if not path.is_file():
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return {"clients": found["clients"], "words": found.get("words", {}), "facts": found.get("facts", {})}
        except (ValueError, KeyError, TypeError) as error:
            raise FederatedError(f"{path} is damaged: {error}. Delete the folder, and start a new run.") from error

    def agree(self, run: str, agreed: Mapping[str, Any]) -> None:
        """Save what :meth:`agreed` returns."""
        if (before := self.agreed(run)) == agreed:
            return
        if before is not None and before["clients"] != agreed["clients"]:
            raise FederatedError(
                f"The server registers run {run} with other clients than before, or in another order. States here are"
                " kept by a client's place among them. Start a new run."
            )
        folder = self.folder / run
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it may have been removed since the start
        folder.chmod(0o700)  # regardless of the umask
        write_private(folder / _AGREED, json.dumps(agreed, indent=1).encode())

    def read(self, run: str, client: ClientId, index: int, version: Version) -> State | None:
        """Return a version of a client's state by its stored index; None for a new client."""
        number, fit = version
        if number == 0:
            return None
        path = self._path(run, index, version)
        if not path.is_file():
            held = ", ".join(f"{number} of fit {fit}" for number, fit in self._versions(run, index)) or "none"
            raise FederatedError(
                f"Client {client!r} is asked to continue from its state after {number} rounds, of fit {fit}, and"
                f" {self.folder} has versions {held}. Give the site its earlier state_dir, or start a new run."
            )
        try:
            state: State = load(path.read_bytes())
        except SafetensorError as error:
            raise FederatedError(f"{path} is damaged ({error}). Restore it, or start a new run.") from error
        return state

    def write(self, run: str, index: int, before: Version, version: Version, state: State) -> None:
        """Save a client's new state; keep its predecessor, and the last two in case this task is an old one."""
        own = {name: value.detach().cpu().contiguous() for name, value in state.items()}
        write_private(self._path(run, index, version), save(own))
        held = self._versions(run, index)
        for old in {*held[:-2]} - {before, version}:
            self._path(run, index, old).unlink()

    def _path(self, run: str, index: int, version: Version) -> Path:
        number, fit = version
        return self.folder / run / f"{index}.{number}.{fit}.state"

    def _versions(self, run: str, index: int) -> list[Version]:
        """Return the versions here by round, and those of one round as they were written."""
        found = {path: path.name.split(".") for path in (self.folder / run).glob(f"{index}.*.*.state")}
        ordered = sorted(found, key=lambda path: (int(found[path][1]), path.stat().st_mtime_ns))
        return [(int(found[path][1]), found[path][2]) for path in ordered]


def write_private(path: Path, content: bytes) -> None:
    """Atomically write a file for this user alone."""
    work = path.with_name(f".{path.name}.new")
    try:
        work.unlink(missing_ok=True)
        append_private(work, content)
        os.replace(work, path)
    except OSError as error:
        work.unlink(missing_ok=True)
        raise FederatedError(
            f"{path} cannot be written: {error.strerror or error}. Earlier states are unchanged."
        ) from error
    flush_folder(path.parent)  # the new name also survives a power cut


def append_private(path: Path, content: bytes) -> None:
    """Append to a file for this user alone, all or nothing, and wait until it is on the disk."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab", buffering=0) as file:
        os.chmod(path, 0o600)  # regardless of the umask
        before, rest = os.fstat(file.fileno()).st_size, memoryview(content)
        try:
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except OSError:  # such as a full disk: the next append must not follow a partial one
            os.ftruncate(file.fileno(), before)
            raise
