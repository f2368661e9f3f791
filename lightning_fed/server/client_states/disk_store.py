"""Client states on disk: a SQLite index for each process, over one immutable file of states a round.

Each fit and process has a *shard*: a folder with ``index.sqlite`` and the files ``1.states``, ``2.states``, ... A shard
is complete by itself: a run that resumes links the files that it needs into its own shards. A checkpoint names the
shards of its version. What it needs of them stays as long as it exists.
"""

import ctypes
import os
import shutil
import sqlite3
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from lightning_fed.core.disk import flush_folder
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import State
from lightning_fed.server.client_states.store import ClientStore, MemoryClientStore

__all__ = ["DiskClientStore", "Index", "Shard", "read_version"]

_SMALL_FILES = 256  # so many are merged
_COMPLETE, _TRIMMED = 0, 1  # user_version of an index: whether it still has the newest state of every client

# A state belongs to the versions from `since` until just before `until`, which is NULL for the newest one.
# `live`, `clients` and `total` add up lengths, numbers and checksums of a file's newest states.
_SCHEMA = """
PRAGMA locking_mode = EXCLUSIVE;
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
PRAGMA wal_autocheckpoint = 8192;
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


class Index:
    """The SQLite file of a shard.

    With the write-ahead log, a commit appends once, and a kill leaves whole transactions. The connection locks the file
    for itself, so SQLite needs no memory that is shared between processes, which network file systems do not have.

    Args:
        folder: The shard's folder.
        patience: How many seconds to wait for a process that has it open.
    """

    def __init__(self, folder: Path, patience: float = 5.0) -> None:
        self.folder, self.path, self.patience = folder, folder / "index.sqlite", patience
        self._db: sqlite3.Connection | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a connection."""
        return self._db is not None

    def connect(self, create: bool = False) -> sqlite3.Connection:
        """Return the connection; it is opened if it is not open."""
        if self._db is None:
            uri = f"{self.path.absolute().as_uri()}?mode={'rwc' if create else 'rw'}"
            db = sqlite3.connect(uri, self.patience, isolation_level=None, check_same_thread=False, uri=True)
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
        return self.folder / f"{number}.states"

    def is_trimmed(self) -> bool:
        """Whether the newest states were deleted, because no store seemed to use the shard."""
        return bool(self.connect().execute("PRAGMA user_version").fetchone()[0] == _TRIMMED)

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
        if not gone and (is_live or self.is_trimmed()):
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
        unused = "SELECT id FROM files WHERE NOT EXISTS (SELECT 1 FROM states WHERE file = files.id)"
        numbers = db.execute(unused).fetchall()
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
            FederatedError: If the index cannot be used, or another run has removed what it held.
        """
        if not self._number:
            yield None
            return
        with _named(self.index.path):
            is_there, was_open = self.index.path.exists(), self.index.is_open
            if is_there and (was_open or not self.index.is_trimmed()):
                try:
                    yield self.index.connect()
                finally:
                    if self._rests:
                        self.index.close()
                return
        self.index.close()
        raise FederatedError(
            f"Client states of this run are gone: {self.index.folder} is not what it was. Another run that was started"
            " there since has removed what no checkpoint needed."
        )

    def get(self, index: int) -> State | None:
        """Read a client's committed state, None if it has none yet.

        Raises:
            FederatedError: If its file is damaged.
        """
        newest = "SELECT client, file, offset, length, checksum FROM states WHERE client = ? AND until IS NULL"
        with self._open() as db:
            row = None if db is None else db.execute(newest, (index,)).fetchone()
        return None if row is None else _tensors(self.index, self.device, *row)

    def state_dict(self) -> dict[int, State]:
        """Return all committed states, in memory."""
        newest = "SELECT client, file, offset, length, checksum FROM states WHERE until IS NULL ORDER BY client"
        with self._open() as db:
            rows = [] if db is None else db.execute(newest)
            return {row[0]: _tensors(self.index, self.device, *row) for row in rows}

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
            number = self._number + 1
            with self.index.transaction() as db:
                needed = db.execute("SELECT COALESCE(MAX(number), -1) FROM versions").fetchone()[0]
                db.execute("INSERT INTO files (id, bytes) VALUES (?, ?)", (number, self._end))
                older = [(number, client) for client in self._staged]
                db.executemany("UPDATE states SET until = ? WHERE client = ? AND until IS NULL", older)
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
        budget, small = max(self.rewrite_bytes, self._end), self.rewrite_bytes // 64
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
        with self._open() as db:
            if db is None:
                return None
            while self._unsynced:
                with suppress(FileNotFoundError), open(self._unsynced[-1], "rb") as file:
                    os.fsync(file.fileno())
                self._unsynced.pop()
            flush_folder(self.index.folder)
            flush_folder(self.folder)
            db.execute("INSERT INTO versions VALUES (?, ?, ?)", (name, checkpoint, self._number))
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            clients, total = db.execute("SELECT SUM(clients), SUM(total) FROM files").fetchone()
        return Shard(self.name, self._number, clients or 0, total or 0)

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
        number = 0
        with _named(self.index.path):
            self.index.folder.mkdir(exist_ok=True)
            self.index.connect(create=True)
            with self.index.transaction() as db:
                for shard in shards:
                    source, linked = Index(folder / shard.name), dict[int, int]()
                    for client, file, *place, size in _rows(source, shard, self.num_clients, is_mine):
                        if file not in linked:
                            linked[file] = number = number + 1
                            self._link(source.file(file), self.index.file(number), size)
                            db.execute("INSERT INTO files (id, bytes) VALUES (?, ?)", (number, size))
                        db.execute("INSERT INTO states VALUES (?, 0, NULL, ?, ?, ?, ?)", (client, linked[file], *place))
        self._number = number

    def _link(self, source: Path, target: Path, size: int) -> None:
        """Give a file of another shard a second name in this one, or copy it if the file system has no such links."""
        try:
            if (found := source.stat().st_size) != size:
                raise FederatedError(f"{source} is damaged: it has {found:,} bytes, and {size:,} were written.")
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
    states = {}
    for shard in shards:
        index = Index(folder / shard.name)
        for client, *place, _ in _rows(index, shard, num_clients, is_mine):
            states[client] = _tensors(index, torch.device("cpu"), client, *place)
    return dict(sorted(states.items()))


def _rows(index: Index, shard: Shard, num_clients: int, is_mine: Callable[[int], bool]) -> Iterator[tuple[int, ...]]:
    """Yield client, file, offset, length, checksum and size of the file of a version's states.

    They are read from a copy: the folder may be read-only, and opening an index that a killed process left changes it.

    Raises:
        FederatedError: At the end, if the index is not what the checkpoint says.
    """
    query = (
        "SELECT client, file, offset, length, checksum, bytes FROM states JOIN files ON id = file"
        " WHERE since <= :number AND (until IS NULL OR until > :number)"
    )
    count = total = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, index.path.name)
        try:
            shutil.copyfile(index.path, copy)
            with suppress(FileNotFoundError):
                shutil.copyfile(f"{index.path}-wal", f"{copy}-wal")
        except OSError as error:
            raise _missing(index.path, error) from error
        try:
            with closing(sqlite3.connect(copy)) as db:
                for row in db.execute(query, {"number": shard.number}):
                    if not all(type(number) is int for number in row) or not 0 <= row[0] < num_clients:
                        raise TypeError(f"{row} is not the place of a client's state")
                    count, total = count + 1, total + row[0] + row[4]
                    if is_mine(row[0]):
                        yield row
        except (sqlite3.Error, TypeError) as error:
            raise FederatedError(f"{index.path} is damaged: {error}.") from error
    if (count, total) != (shard.clients, shard.total):
        raise FederatedError(f"{index.path} is damaged: it is not what was written there.")


def _tensors(
    index: Index, device: torch.device, client: int, file: int, offset: int, length: int, checksum: int
) -> State:
    path = index.file(file)
    data = _read(path, client, offset, length, checksum)
    try:
        return {name: value.to(device) for name, value in sorted(load(data).items())}  # which has no order
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise FederatedError(f"{path} holds no tensors for the client with index {client}: {error}.") from error


def _read(path: Path, client: int, offset: int, length: int, checksum: int) -> bytes:
    """Return a client's state as it was written.

    It is read, and not mapped into memory: a mapped file that somebody truncates ends the process, and its pages count
    as the process's memory.

    Raises:
        FederatedError: If the file is missing or damaged.
    """
    data = b""
    try:
        with open(path, "rb", buffering=0) as file:
            if 0 <= offset < offset + length <= os.fstat(file.fileno()).st_size:
                file.seek(offset)
                while len(data) < length and (part := file.read(length - len(data))):
                    data += part
    except OSError as error:
        raise _missing(path, error) from error
    if not data or len(data) != length or zlib.crc32(data, client) != checksum:
        raise FederatedError(f"{path} is damaged: what it holds of the client with index {client} was changed.")
    return data


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
    except sqlite3.Error as error:
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


def _in_memory(states: Mapping[int, State], device: torch.device) -> MemoryClientStore:
    store = MemoryClientStore()
    store.load_state_dict(states, device)
    return store
