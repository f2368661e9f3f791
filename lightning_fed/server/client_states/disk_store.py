"""Client states on disk: a SQLite index for each process, over one immutable file of states a round.

Each fit and process has a *shard*: a folder with ``index.sqlite`` and the files ``1.states``, ``2.states``, ... A shard
is complete by itself: a run that resumes links the files that it needs into its own shards. A checkpoint names the
shards of its version. What it needs of them stays as long as it exists.
"""

import ctypes
import os
import re
import shutil
import sqlite3
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import State
from lightning_fed.server.client_states.store import ClientStore, MemoryClientStore

__all__ = [
    "INDEX",
    "DiskClientStore",
    "Index",
    "Shard",
    "forget_store",
    "is_shard",
    "live_store",
    "read_version",
    "sync_folder",
]

INDEX = "index.sqlite"
_NAME = re.compile(r"[0-9a-f]{16}-\d{4,}")
_SMALL_FILES = 256  # so many are merged
_PRAGMAS = ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = NORMAL", "wal_autocheckpoint = 8192")
_COMPLETE, _TRIMMED = 0, 1  # user_version of an index: whether it still has the newest state of every client

# A state belongs to the versions from `since` until just before `until`, which is NULL for the newest one.
# `live`, `clients` and `total` add up lengths, numbers and checksums of a file's newest states.
_SCHEMA = """
BEGIN;
CREATE TABLE IF NOT EXISTS files (id INTEGER PRIMARY KEY, bytes INTEGER, live INTEGER DEFAULT 0,
    clients INTEGER DEFAULT 0, total INTEGER DEFAULT 0);
CREATE TABLE IF NOT EXISTS states (client INTEGER, since INTEGER, until INTEGER, file INTEGER, offset INTEGER,
    length INTEGER, checksum INTEGER, PRIMARY KEY (client, since)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS versions (name TEXT, checkpoint TEXT, number INTEGER, PRIMARY KEY (name, checkpoint));
CREATE INDEX IF NOT EXISTS by_file ON states (file);
CREATE INDEX IF NOT EXISTS superseded ON states (until) WHERE until IS NOT NULL;
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON states BEGIN UPDATE files SET live = live + new.length,
    clients = clients + 1, total = total + new.client + new.checksum WHERE id = new.file; END;
CREATE TRIGGER IF NOT EXISTS replaced AFTER UPDATE OF until ON states BEGIN UPDATE files SET live = live - old.length,
    clients = clients - 1, total = total - old.client - old.checksum WHERE id = old.file; END;
CREATE TRIGGER IF NOT EXISTS deleted AFTER DELETE ON states WHEN old.until IS NULL BEGIN UPDATE files SET
    live = live - old.length, clients = clients - 1, total = total - old.client - old.checksum WHERE id = old.file; END;
COMMIT;
"""


class Shard(NamedTuple):
    """A process's part of a version.

    Attributes:
        name: The name of its folder.
        number: The number of commits before the version.
        clients: The number of states.
        total: The sum of the states' client indices and checksums.
    """

    name: str
    number: int
    clients: int
    total: int

    @classmethod
    def parse(cls, saved: Any) -> "Shard":
        """Return a shard that a checkpoint holds as a list.

        Raises:
            ValueError: If it is anything else, or names a folder elsewhere.
        """
        if not isinstance(saved, (list, tuple)) or len(saved) != 4 or not all(type(n) is int for n in saved[1:]):
            raise ValueError(f"{saved!r} is not a shard")
        if not isinstance(saved[0], str) or not is_shard(saved[0]):
            raise ValueError(f"{saved[0]!r} is not the name of a shard")
        return cls(*saved)


def is_shard(name: str) -> bool:
    """Whether this is the name of a shard."""
    return bool(_NAME.fullmatch(name))


class Index:
    """The SQLite file of a shard.

    With the write-ahead log, a commit appends once, and a kill leaves whole transactions. The connection locks the file
    for itself, so SQLite needs no memory that is shared between processes, which network file systems do not have.

    Args:
        folder: The shard's folder.
        patience: How many seconds to wait for a process that has it open.
    """

    connection: type[sqlite3.Connection] = sqlite3.Connection

    def __init__(self, folder: Path, patience: float = 5.0) -> None:
        self.folder, self.path, self.patience = folder, folder / INDEX, patience
        self._db: sqlite3.Connection | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a connection."""
        return self._db is not None

    def connect(self, create: bool = False) -> sqlite3.Connection:
        """Return the connection; it is opened if it is not open.

        Raises:
            sqlite3.Error: If that is not possible.
        """
        if self._db is None:
            uri = f"{self.path.absolute().as_uri()}?mode={'rwc' if create else 'rw'}"
            db = self.connection(uri, self.patience, isolation_level=None, check_same_thread=False, uri=True)
            for pragma in (
                "locking_mode = EXCLUSIVE",
                "journal_mode = WAL",
                "synchronous = NORMAL",
                "wal_autocheckpoint = 8192",
            ):
                db.execute(f"PRAGMA {pragma}")
            db.executescript(_SCHEMA)
            self._db = db
            _OPEN.add(self)
        return self._db

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit what is done inside, or nothing of it."""
        db = self.connect()
        db.execute("BEGIN IMMEDIATE")
        try:
            yield db
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise

    def file(self, number: int) -> Path:
        """Return the path of a file of states."""
        return self.folder / f"{int(number)}.states"

    def versions(self) -> set[tuple[str, str]]:
        """Return the names of versions, each with a checkpoint that refers to it."""
        return set(self.connect().execute("SELECT name, checkpoint FROM versions"))

    def trim(self, wanted: set[str], is_live: bool) -> None:
        """Delete the versions that are not wanted, and the states and files that no other version needs.

        Args:
            wanted: The names of versions.
            is_live: Whether a store uses the shard, so that the newest states stay.
        """
        db = self.connect()
        gone = [name for (name,) in db.execute("SELECT DISTINCT name FROM versions") if name not in wanted]
        (trimmed,) = db.execute("PRAGMA user_version").fetchone()
        if not gone and (is_live or trimmed == _TRIMMED):
            return
        with self.transaction():
            db.executemany("DELETE FROM versions WHERE name = ?", [(name,) for name in gone])
            db.execute(
                "DELETE FROM states WHERE until IS NOT NULL"
                " AND NOT EXISTS (SELECT 1 FROM versions WHERE since <= number AND number < until)"
            )
            if not is_live:
                db.execute(
                    "DELETE FROM states WHERE until IS NULL"
                    " AND NOT EXISTS (SELECT 1 FROM versions WHERE since <= number)"
                )
                db.execute(f"PRAGMA user_version = {_TRIMMED}")
            unused = self.drop_files(db)
        if not is_live:  # also those that a killed process left
            kept = {self.file(number) for (number,) in db.execute("SELECT id FROM files")}
            unused = [path for path in self.folder.glob("*.states") if path not in kept]
        _unlink(unused)

    def drop_files(self, db: sqlite3.Connection) -> list[Path]:
        """Drop the files without a state from the index, and return their paths."""
        unused = "WHERE clients = 0 AND NOT EXISTS (SELECT 1 FROM states WHERE file = files.id)"
        numbers = db.execute(f"SELECT id FROM files {unused}").fetchall()  # noqa: S608
        db.executemany("DELETE FROM files WHERE id = ?", numbers)
        return [self.file(number) for (number,) in numbers]

    def close(self) -> None:
        """Close the connection, which leaves a single file."""
        if self._db is not None:
            self._db.close()
            self._db = None


_OPEN: "weakref.WeakSet[Index]" = weakref.WeakSet()


def _leave_connections_to_parent() -> None:
    """Forget all connections in a forked process, without closing them: that would write to the parent's files."""
    for index in list(_OPEN):
        if index._db is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(index._db))
            index._db = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_connections_to_parent)

_LIVE: "weakref.WeakValueDictionary[Path, DiskClientStore]" = weakref.WeakValueDictionary()


def live_store(shard: Path) -> "DiskClientStore | None":
    """Return this process's store that uses a shard, if there is one."""
    return _LIVE.get(shard)


def forget_store(shard: Path) -> None:
    """Let a shard be deleted, whose store is going."""
    _LIVE.pop(shard, None)


class DiskClientStore(ClientStore):
    """Client states in the files of a shard, in the safetensors format; reading runs no code.

    The states of a round are appended to a new file as they are staged. Files of which more than half is out of date,
    and small ones when there are many, are copied into the file of a later round, little by little: the newest states
    take at most about twice their size.

    Args:
        folder: The store's folder.
        name: The shard's name.
        num_clients: The number of clients, N.
        device: Where states are read to.
    """

    rewrite_bytes = 2**26  # that a round copies, or as many as it writes if these are more

    def __init__(self, folder: Path, name: str, num_clients: int, device: torch.device) -> None:
        self.folder, self.name, self.num_clients, self.device = folder, name, num_clients, device
        self.index = Index(folder / name)
        self._number = 0  # of commits; the states of commit n are in file n
        self._staged: dict[int, tuple[int, int, int]] = {}  # offset, length and checksum
        self._file: FileIO | None = None  # of the round
        self._path = self.index.folder  # of this file
        self._end = 0  # of what was written to it
        self._unsynced: list[Path] = []  # files that may not be on the disk yet
        self._rests = False  # until the next state is staged: files are closed when they have been read
        _LIVE[self.index.folder] = self

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy holds the states in memory: it outlives the files, which are this store's alone."""
        return _in_memory, (self.state_dict(), self.device)

    def __len__(self) -> int:
        """The number of clients with a kept state."""
        with self._open() as db:
            return 0 if db is None else int(db.execute("SELECT COALESCE(SUM(clients), 0) FROM files").fetchone()[0])

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection | None]:
        """Yield the connection, None before the first commit.

        Raises:
            FederatedError: If the index cannot be used.
        """
        with _named(self.index.path):
            if self._number and not self.index.is_open and (not self.index.path.exists() or self._is_trimmed()):
                raise self._gone()
            try:
                yield self.index.connect() if self._number else None
            finally:
                if self._rests:
                    self.index.close()

    def _is_trimmed(self) -> bool:
        return bool(self.index.connect().execute("PRAGMA user_version").fetchone()[0] == _TRIMMED)

    def _gone(self) -> FederatedError:
        return FederatedError(
            f"Client states of this run are gone: {self.index.folder} is not what it was. Another run that was started"
            " there since has removed what no checkpoint needed."
        )

    # ------------------------------------------------------------------ states

    def get(self, index: int) -> State | None:
        """Read a client's committed state, None if it has none yet.

        Raises:
            FederatedError: If its file is damaged.
        """
        newest = "SELECT file, offset, length, checksum FROM states WHERE client = ? AND until IS NULL"
        with self._open() as db:
            row = None if db is None else db.execute(newest, (index,)).fetchone()
        return None if row is None else self._load(index, *row)

    def _load(self, index: int, file: int, offset: int, length: int, checksum: int) -> State:
        path = self.index.file(file)
        return _tensors(_read(path, index, offset, length, checksum), path, index, self.device)

    def state_dict(self) -> dict[int, State]:
        """Return all committed states, in memory."""
        query = "SELECT client, file, offset, length, checksum FROM states WHERE until IS NULL ORDER BY client"
        with self._open() as db:
            return {} if db is None else {row[0]: self._load(*row) for row in db.execute(query)}

    def stage(self, index: int, state: State) -> None:
        """Write a client's new state, which is not to be seen until the round is complete."""
        if not state:
            return
        # copies: two names may share memory, and rows of a chunk lie apart
        copies = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in state.items()}
        try:
            data = save(copies)
        except (SafetensorError, ValueError, KeyError) as error:
            kinds = {name: str(value.dtype) for name, value in copies.items()}
            raise FederatedError(
                f"Client states of {kinds} cannot be kept on disk: {error}. Use dense tensors of common types, or set"
                " client_states='memory'."
            ) from error
        self._append(index, data)

    def _append(self, index: int, data: bytes) -> None:
        self._rests = False
        if self._file is None:
            self._path = self.index.file(self._number + 1)
        with _named(self._path):
            if self._file is None:
                self.index.folder.mkdir(exist_ok=True)
                self._file = open(self._path, "xb", buffering=0)  # noqa: SIM115
            _write(self._file, data, self._end)
        self._staged[index] = (self._end, len(data), zlib.crc32(data, index))
        self._end += len(data)

    def commit(self) -> None:
        """Make the staged states the newest ones, in one transaction."""
        if not self._staged:
            return
        with _named(self.index.path):
            self.index.connect(create=self._number == 0)
            self._rewrite()
            number, clients = self._number + 1, list(self._staged)
            with self.index.transaction() as db:
                needed = db.execute("SELECT COALESCE(MAX(number), -1) FROM versions").fetchone()[0]
                db.execute("INSERT INTO files (id, bytes) VALUES (?, ?)", (number, self._end))
                db.executemany(
                    "DELETE FROM states WHERE client = ? AND until IS NULL AND since > ?",
                    [(c, needed) for c in clients],
                )
                db.executemany(
                    "UPDATE states SET until = ? WHERE client = ? AND until IS NULL", [(number, c) for c in clients]
                )
                db.executemany(
                    "INSERT INTO states VALUES (?, ?, NULL, ?, ?, ?, ?)",
                    [(client, number, number, *place) for client, place in self._staged.items()],
                )
                db.execute("DELETE FROM states WHERE until = ? AND since > ?", (number, needed))
                unused = self.index.drop_files(db)
        self._number, self._staged = number, {}
        self._unsynced.append(self._close_file())
        _unlink(unused)

    def _rewrite(self) -> None:
        """Copy the newest states out of files that are mostly out of date, and out of small ones if there are many."""
        small = self.rewrite_bytes // 64
        budget = max(self.rewrite_bytes, self._end)
        files = self.index.connect().execute(
            "SELECT id, live FROM files WHERE live > 0 AND (2 * live <= bytes OR bytes < :small AND"
            " (SELECT COUNT(*) FROM files WHERE live > 0 AND bytes < :small) >= :many) ORDER BY live",
            {"small": small, "many": _SMALL_FILES},
        )
        rows = "SELECT client, offset, length, checksum FROM states WHERE file = ? AND until IS NULL"
        for file, live in files.fetchall():
            budget -= live
            if budget < 0:
                return
            for client, *place in self.index.connect().execute(rows, (file,)).fetchall():
                if client not in self._staged:
                    self._append(client, _read(self.index.file(file), client, *place))

    def discard(self) -> None:
        """Forget the staged states."""
        self._staged = {}
        if self._file is not None:
            _unlink([self._close_file()])

    def _close_file(self) -> Path:
        assert self._file is not None
        self._file.close()
        self._file, self._end = None, 0
        return self._path

    def load_state_dict(
        self, states: Mapping[int, Any], device: torch.device, is_mine: Callable[[int], bool] = lambda index: True
    ) -> None:
        """Replace all states by those of the clients that are this process's own."""
        self.discard()
        self.device = device
        with self._open() as db:
            if db is not None:
                self._number += 1
                db.execute("UPDATE states SET until = ? WHERE until IS NULL", (self._number,))
        for index, state in states.items():
            if is_mine(int(index)):
                self.stage(int(index), state)
        self.commit()

    def rest(self) -> None:
        """Close all files until the next state is staged; whatever reads them closes them again."""
        self._rests = True
        with _named(self.index.path):
            self.index.close()

    # ------------------------------------------------------------------ versions

    def record(self, name: str, checkpoint: str) -> Shard | None:
        """Keep the newest states for a checkpoint, when they are safely on the disk.

        Args:
            name: The name of the version.
            checkpoint: The path of the checkpoint, relative to the store's folder.

        Returns:
            What the checkpoint must hold; None if no client has a state.

        Raises:
            FederatedError: If the disk fails, or the files are gone.
        """
        if not self._number:
            return None
        if not self.index.path.exists():
            raise self._gone()
        with self._open() as db:
            assert db is not None
            self.sync()
            db.execute("INSERT INTO versions VALUES (?, ?, ?)", (name, checkpoint, self._number))
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            clients, total = db.execute("SELECT SUM(clients), SUM(total) FROM files").fetchone()
        return Shard(self.name, self._number, clients or 0, total or 0)

    def sync(self) -> None:
        """Wait until the files of all commits are on the disk."""
        while self._unsynced:
            with _named(self._unsynced[-1]), suppress(FileNotFoundError), open(self._unsynced[-1], "rb") as file:
                os.fsync(file.fileno())
            self._unsynced.pop()
        sync_folder(self.index.folder)
        sync_folder(self.folder)

    def load_version(
        self, folder: Path, shards: Sequence[Shard], is_mine: Callable[[int], bool] = lambda index: True
    ) -> None:
        """Take the states of a version; of its files only the size is looked at. The store must be new.

        Args:
            folder: The folder of the version's store.
            shards: The version.
            is_mine: Which clients' states this process keeps.

        Raises:
            FederatedError: If a file is missing or damaged.
        """
        assert self._number == 0
        of_version = "FROM old.states WHERE since <= :number AND (until IS NULL OR until > :number) AND is_mine(client)"
        with _named(self.index.path):
            self.index.folder.mkdir(exist_ok=True)
            db = self.index.connect(create=True)
            db.create_function("is_mine", 1, is_mine)
            db.execute("CREATE TEMP TABLE linked (old INTEGER PRIMARY KEY, new INTEGER)")
            for shard in shards:
                with _attached(db, folder, shard, self.num_clients), self.index.transaction():
                    source, at = Index(folder / shard.name), {"number": shard.number}
                    for (file,) in db.execute(f"SELECT DISTINCT file {of_version}", at).fetchall():
                        self._number += 1
                        size = db.execute("SELECT bytes FROM old.files WHERE id = ?", (file,)).fetchone()
                        self._link(source.file(file), self.index.file(self._number), *(size or (None,)))
                        db.execute("INSERT INTO files (id, bytes) VALUES (?, ?)", (self._number, *size))
                        db.execute("INSERT INTO linked VALUES (?, ?)", (file, self._number))
                    db.execute(
                        "INSERT INTO states SELECT client, 0, NULL, (SELECT new FROM linked WHERE old = file),"  # noqa: S608
                        f" offset, length, checksum {of_version} ORDER BY client",
                        at,
                    )
                    db.execute("DELETE FROM linked")

    def _link(self, source: Path, target: Path, size: int | None) -> None:
        """Give a file of another shard a second name in this one, or copy it if the file system has no such links."""
        try:
            if (found := source.stat().st_size) != size:
                raise FederatedError(f"{source} is damaged: it has {found:,} bytes, and {size or 0:,} were written.")
            try:
                os.link(source, target)
            except OSError:
                shutil.copyfile(source, target)
                self._unsynced.append(target)
        except OSError as error:
            raise _missing(source, error) from error


def read_version(
    folder: Path, shards: Sequence[Shard], num_clients: int, is_mine: Callable[[int], bool] = lambda index: True
) -> dict[int, State]:
    """Return a version's states, in memory; see :meth:`DiskClientStore.load_version`."""
    query = (
        "SELECT client, file, offset, length, checksum FROM old.states WHERE since <= :number"
        " AND (until IS NULL OR until > :number)"
    )
    states = {}
    for shard in shards:
        index = Index(folder / shard.name)
        with _named(index.path), _attached(sqlite3.connect(":memory:"), folder, shard, num_clients) as db:
            for client, file, *place in db.execute(query, {"number": shard.number}):
                if is_mine(client):
                    path = index.file(file)
                    states[client] = _tensors(_read(path, client, *place), path, client, torch.device("cpu"))
    return dict(sorted(states.items()))


@contextmanager
def _attached(db: sqlite3.Connection, folder: Path, shard: Shard, num_clients: int) -> Iterator[sqlite3.Connection]:
    """Attach a copy of a shard's index as ``old``, when it holds what the checkpoint says.

    A copy, because the folder may be read-only, and because opening an index that a killed process left changes it.
    """
    source = folder / shard.name / INDEX
    with tempfile.TemporaryDirectory() as temporary:
        for name in (INDEX, f"{INDEX}-wal"):
            try:
                shutil.copyfile(source.with_name(name), Path(temporary, name))
            except OSError as error:
                if name == INDEX:
                    raise _missing(source, error) from error
        db.execute("ATTACH ? AS old", (str(Path(temporary, INDEX)),))
        try:
            try:
                found = db.execute(
                    "SELECT COUNT(*), COALESCE(SUM(client + checksum), 0), COALESCE(MIN(client), 0),"
                    " COALESCE(MAX(client), 0) FROM old.states WHERE since <= ? AND (until IS NULL OR until > ?)",
                    (shard.number, shard.number),
                ).fetchone()
            except sqlite3.Error as error:
                raise FederatedError(f"{source} is damaged: {error}.") from error
            inside = all(type(client) is int and 0 <= client < num_clients for client in found[2:])
            if found[:2] != (shard.clients, shard.total) or not inside:
                raise FederatedError(f"{source} is damaged: it is not what was written there.")
            yield db
        finally:
            db.execute("DETACH old")


def _read(path: Path, client: int, offset: int, length: int, checksum: int) -> bytes:
    """Return a client's state as it was written.

    It is read, and not mapped into memory: a mapped file that somebody truncates ends the process, and its pages count
    as the process's memory.

    Raises:
        FederatedError: If the file is missing or damaged.
    """
    data = b""
    try:
        with open(path, "rb", buffering=0) as file, suppress(TypeError, ValueError, OverflowError):
            if 0 <= offset < offset + length <= os.fstat(file.fileno()).st_size:
                file.seek(offset)
                while len(data) < length and (part := file.read(length - len(data))):
                    data += part
    except OSError as error:
        raise _missing(path, error) from error
    if not data or len(data) != length or zlib.crc32(data, client) != checksum:
        raise FederatedError(f"{path} is damaged: what it holds of the client with index {client} was changed.")
    return data


def _tensors(data: bytes, path: Path, index: int, device: torch.device) -> State:
    try:
        return {name: value.to(device) for name, value in sorted(load(data).items())}  # which has no order
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise FederatedError(f"{path} holds no tensors for the client with index {index}: {error}.") from error


def _write(file: FileIO, data: bytes, offset: int) -> None:
    """Write all of the data at an offset, over what a write that failed may have left there."""
    rest = memoryview(data)
    file.seek(offset)
    while rest:
        rest = rest[file.write(rest) :]


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Raise errors of the disk and of SQLite as errors that name the file."""
    try:
        yield
    except FederatedError:
        raise
    except (OSError, sqlite3.OperationalError) as error:
        raise FederatedError(
            f"Client states cannot be written to {str(path)!r}: {getattr(error, 'strerror', error)}. Checkpoints"
            " written so far keep their states; make room, and resume from the last one."
        ) from error
    except (sqlite3.Error, ValueError) as error:
        raise FederatedError(f"{path} is damaged: {error}.") from error


def _missing(path: Path, error: OSError) -> FederatedError:
    return FederatedError(
        f"{path}, which holds kept client states, cannot be read: {error.strerror}. Copy the whole folder"
        f" {path.parent.parent.name!r} along with a checkpoint, and leave its files alone."
    )


def _unlink(paths: Sequence[Path]) -> None:
    for path in paths:
        with suppress(OSError):
            path.unlink()


def sync_folder(folder: Path) -> None:
    """Wait until names made or changed in a folder are on the disk, where the system can say so."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            with suppress(OSError):
                os.fsync(handle)
        finally:
            os.close(handle)


def _in_memory(states: Mapping[int, State], device: torch.device) -> MemoryClientStore:
    store = MemoryClientStore()
    store.load_state_dict(states, device)
    return store
