"""The folder of a store of client states: which of its files belong to which checkpoint, and which to none."""

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from lightning_fed.core.errors import FederatedError
from lightning_fed.server.client_states.segments import INDEX, STATES, Segment, sync_folder

__all__ = ["Reference", "StoreFolder", "Version", "find_store", "is_reference", "relative"]

_FORMAT = 1
_GARBAGE = 8  # at most one in so many versions is garbage when a checkpoint has been saved
_VERSION = re.compile(r"round-\d{6,}-[0-9a-f]{16}")
_SEGMENT_FILE = re.compile(rf"(\d{{6}}-[0-9a-f]{{8}}-\d{{4}}-\d{{6}})({re.escape(STATES)}|{re.escape(INDEX)})")

Reference = Mapping[str, str]


@dataclass(frozen=True)
class Version:
    """The client states after some round, as segments that hold them.

    Attributes:
        checkpoints: The checkpoints that refer to it, relative to the store's folder.
        run: What the states belong to: method, seed and model, in words.
        clients: The number of clients.
        segments: Where the states are; of several states of a client the last one counts.
    """

    checkpoints: tuple[str, ...]
    run: Mapping[str, str]
    clients: int
    segments: tuple[Segment, ...]

    def to_json(self) -> str:
        """Return the version as it is written."""
        return json.dumps({"format": _FORMAT, **asdict(self), "segments": [astuple(s) for s in self.segments]})

    @classmethod
    def parse(cls, text: bytes) -> "Version":
        """Return what :meth:`to_json` wrote.

        Raises:
            ValueError: If it is nothing of the kind.
        """
        try:
            saved = json.loads(text)
            if saved["format"] != _FORMAT:
                raise ValueError(f"it has format {saved['format']!r}, this version of lightning_fed reads {_FORMAT}")
            run = {str(name): str(value) for name, value in saved["run"].items()}
            segments = tuple(Segment.parse(s) for s in saved["segments"])
            return cls(tuple(str(p) for p in saved["checkpoints"]), run, int(saved["clients"]), segments)
        except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise ValueError(f"it is no version of client states ({error!r})") from error


class StoreFolder:
    """A folder of segments, and of one small file for each checkpoint that says which of them it needs.

    One run at a time uses it. What no checkpoint and no running fit needs is removed by :meth:`collect`.

    Args:
        path: The folder.
    """

    patience = 10.0  # seconds to wait for another run; a killed one may leave data loaders that hold the lock that long

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path / "lock", thread_local=False)
        self._awaited: set[str] = set()  # versions whose checkpoint was not seen yet
        self._read: dict[Path, tuple[tuple[int, ...], str | None]] = {}
        self._written = self._kept = 0  # versions since the garbage was collected, and that were left then

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy locks the folder for itself."""
        return type(self), (self.path,)

    # ------------------------------------------------------------------ one run at a time

    def acquire(self) -> None:
        """Make the folder if it is missing, and keep other runs out.

        Raises:
            FederatedError: If it cannot be made, or another run uses it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=self.patience)
        except Timeout:
            raise FederatedError(
                f"Another run keeps its client states in {self.path}. Wait for its end, or give this run a folder of"
                " its own: client_states_dir=..."
            ) from None
        except OSError as error:
            raise FederatedError(
                f"client_states_dir={str(self.path)!r} cannot be used: {error.strerror}. Give a folder on a local disk."
            ) from error

    def release(self) -> None:
        """Let other runs in."""
        self._lock.release(force=True)

    @property
    def is_mine(self) -> bool:
        """Whether other runs are kept out."""
        return bool(self._lock.is_locked)

    def new_prefix(self, base: Iterable[Segment] = ()) -> str:
        """Return the start of the names of a run's segments, which sort after all there are."""
        taken = self.segments() | {segment.name for segment in base}
        return f"{1 + max((int(name[:6]) for name in taken), default=0):06d}-{secrets.token_hex(4)}"

    # ------------------------------------------------------------------ versions

    def write(self, round: int, version: Version) -> str:
        """Write a version for a checkpoint that is about to be written, and return its name."""
        name = f"round-{round:06d}-{secrets.token_hex(8)}"
        self._put(name, version)
        self._awaited.add(name)
        self._written += 1
        return name

    def _put(self, name: str, version: Version) -> None:
        path = self.path / f"{name}.json"
        temporary = path.with_suffix(".tmp")
        try:
            with open(temporary, "w") as file:
                file.write(version.to_json())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise FederatedError(
                f"{path} cannot be written: {error.strerror}. Checkpoints written so far keep their client states."
            ) from error
        sync_folder(self.path)

    def read(self, name: str) -> Version:
        """Return a version.

        Raises:
            FederatedError: If it is missing or damaged.
        """
        path = self.path / f"{name}.json"
        try:
            if not _VERSION.fullmatch(name):
                raise ValueError(f"{name!r} is no version's name")
            return Version.parse(path.read_bytes())
        except FileNotFoundError:
            raise FederatedError(
                f"The client states of this checkpoint are gone: {path} is missing. Copy the folder"
                f" {self.path.name!r} along with a checkpoint, and leave its files alone."
            ) from None
        except (OSError, ValueError) as error:
            raise FederatedError(f"{path} is damaged: {error}.") from error

    def register(self, name: str, checkpoint: Path) -> None:
        """Note where a version's checkpoint is, if it was moved without the folder or the folder without it."""
        version, found = self.read(name), relative(checkpoint, self.path)
        if found not in version.checkpoints:
            self._put(name, Version((*version.checkpoints, found), version.run, version.clients, version.segments))

    def adopt(self, source: Path, segments: Sequence[Segment]) -> None:
        """Take over another folder's segments, without copying them where the file system allows two names."""
        for segment in segments:
            for suffix in (STATES, INDEX):
                here, there = self.path / (segment.name + suffix), source / (segment.name + suffix)
                if here.exists():
                    continue
                try:
                    os.link(there, here)
                except OSError:
                    _copy(there, here)
        sync_folder(self.path)

    # ------------------------------------------------------------------ garbage

    def segments(self) -> set[str]:
        """Return the names of the segments that there are now."""
        found = (_SEGMENT_FILE.fullmatch(path.name) for path in self.path.iterdir())
        return {match.group(1) for match in found if match}

    def collect_if_due(self, unused: Iterable[str] = ()) -> None:
        """Call :meth:`collect`, unless only few of the versions can have become garbage since it was last called.

        It looks at all versions and checkpoints there are. A run that keeps thousands of checkpoints would spend more
        time there with every one that it adds.
        """
        if _GARBAGE * self._written >= self._kept:
            self.collect(unused)

    def collect(self, unused: Iterable[str] = ()) -> None:
        """Remove the versions that no checkpoint refers to, and unused segments that no other version needs.

        Args:
            unused: Names of segments that no fit reads or writes, in any process. Others stay: they may have come since
                it was asked who uses what.
        """
        try:
            versions = {path.stem: self.read(path.stem) for path in self.path.glob("round-*.json")}
        except FederatedError:
            return  # a damaged version may need anything
        wanted = self._wanted(versions)
        self._written, self._kept = 0, len(wanted)
        for name in versions.keys() - wanted:
            (self.path / f"{name}.json").unlink(missing_ok=True)
        for file in self.path.glob("*.tmp"):  # left by a run that was killed
            file.unlink(missing_ok=True)
        for segment in set(unused) - {part.name for name in wanted for part in versions[name].segments}:
            for suffix in (STATES, INDEX):
                (self.path / (segment + suffix)).unlink(missing_ok=True)

    def _wanted(self, versions: Mapping[str, Version]) -> set[str]:
        """Return the versions that a checkpoint refers to, or may refer to.

        Checkpoints are asked themselves: one may have been renamed, or replaced by another of the same name.
        """
        wanted: set[str] = set()
        known = {name: [self.path / p for p in version.checkpoints] for name, version in versions.items()}
        files = {os.path.normpath(path) for paths in known.values() for path in paths}
        kinds = {Path(file).suffix for file in files}
        for folder in {Path(file).parent for file in files}:
            if folder.is_dir():
                files.update(str(f) for f in folder.iterdir() if f.suffix in kinds and f.is_file())
        referred = {file: self._refers_to(Path(file)) for file in files if os.path.exists(file)}
        self._read = {path: found for path, found in self._read.items() if str(path) in referred}
        for name, paths in known.items():
            unknown = any(referred.get(os.path.normpath(path), "") is None for path in paths)
            seen = name in referred.values()
            if seen:
                self._awaited.discard(name)
            if seen or unknown or name in self._awaited:
                wanted.add(name)
        return wanted

    def _refers_to(self, checkpoint: Path) -> str | None:
        """Return the version that a checkpoint refers to, "" if to none, None if it cannot be read."""
        about = checkpoint.stat()
        stamp = (about.st_mtime_ns, about.st_size, about.st_ino)
        if self._read.get(checkpoint, ((), None))[0] != stamp:
            self._read[checkpoint] = (stamp, _referred_version(checkpoint))
        return self._read[checkpoint][1]


def is_reference(client_states: Any) -> bool:
    """Whether a checkpoint's client states are in a store beside it, and not in the checkpoint."""
    return isinstance(client_states, Mapping) and "version" in client_states


def find_store(reference: Reference, checkpoint: Path) -> Path:
    """Return the folder that a checkpoint refers to.

    Raises:
        FederatedError: If it is missing; the message says what to copy along.
    """
    path, version = Path(str(reference.get("path"))), str(reference.get("version"))
    beside = [checkpoint.parent / path, checkpoint.parent / path.name]
    linked = [folder.resolve() for folder in (*beside, checkpoint.resolve().parent / path)]
    folders = [Path(os.path.abspath(folder)) for folder in beside] + linked
    for found in ((f for f in folders if (f / f"{version}.json").is_file()), (f for f in folders if f.is_dir())):
        if (folder := next(found, None)) is not None:
            return folder
    raise FederatedError(
        f"{checkpoint} keeps its client states in the folder {str(path)!r} beside it, and there is none. Copy that"
        f" folder along with the checkpoint: it is expected at {folders[0]}."
    )


def _referred_version(checkpoint: Path) -> str | None:
    try:
        saved = torch.load(checkpoint, map_location="meta", weights_only=True, mmap=True)
    except Exception:  # whatever a damaged file leads to
        return None
    try:
        states = saved["loops"]["fit_loop"]["state_dict"]["client_states"]
    except (KeyError, TypeError, IndexError):
        return ""
    return str(states["version"]) if is_reference(states) else ""


def relative(path: Path, folder: Path) -> str:
    """Return a path as it is seen from a folder."""
    return Path(os.path.relpath(path.absolute(), folder.absolute())).as_posix()


def _copy(source: Path, target: Path) -> None:
    temporary = target.with_name(f"{target.name}.tmp")
    try:
        shutil.copyfile(source, temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise FederatedError(
            f"{source}, which holds kept client states, cannot be copied to {target}: {error.strerror}."
        ) from error
