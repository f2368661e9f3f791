"""Client states on disk: a SQLite index for each process, over one immutable file of states a round.

Each fit and process has a *shard*: a folder with ``index.sqlite`` and the files ``1.states``, ``2.states``, ... A shard
is complete by itself: a run that resumes links the files that it needs into its own shards. A checkpoint names the
shards of its version. What it needs of them stays as long as it exists.
"""

import ctypes
import json
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

# Commit n writes file n. A state belongs to the versions from the number of its file until just before `until`, which
# is NULL for the newest one. `live`, `clients` and `total` add up lengths, numbers and checksums of a file's newest.
_TABLES = """
CREATE TABLE files (id INTEGER PRIMARY KEY, bytes INTEGER, live INTEGER, clients INTEGER, total INTEGER);
CREATE TABLE states (file INTEGER, client INTEGER, until INTEGER, offset INTEGER, length INTEGER, checksum INTEGER,
    PRIMARY KEY (file, client)) WITHOUT ROWID;
CREATE TABLE versions (name TEXT, checkpoint TEXT, number INTEGER, PRIMARY KEY (name, checkpoint));
"""
_LOOKUPS = """
CREATE UNIQUE INDEX newest ON states (client) WHERE until IS NULL;
CREATE INDEX superseded ON states (until) WHERE until IS NOT NULL;
PRAGMA journal_mode = WAL;
"""
_VERSION = """
CREATE TEMP VIEW version AS SELECT client, file, offset, length, checksum, bytes FROM states JOIN files ON id = file
    WHERE file <= {number} AND (until IS NULL OR until > {number})
"""
_CHECK = (
    "SELECT COUNT(*), SUM(client + checksum), SUM(client >= 0 AND client < ? AND typeof(client) = 'integer'"
    " AND typeof(offset) = 'integer' AND typeof(length) = 'integer' AND typeof(checksum) = 'integer'"
    " AND typeof(bytes) = 'integer') FROM version"
)


class Shard(NamedTuple):
    """A process's part of a version.

    Attributes:
        name: The name of its folder.
        number: The number of the newest file in it.
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

    def connect(self) -> sqlite3.Connection:
        """Return the connection; it is opened if it is not open."""
        if self._db is None:
            uri = f"{self.path.absolute().as_uri()}?mode=rw"
            db = sqlite3.connect(uri, self.patience, isolation_level=None, check_same_thread=False, uri=True)
            db.executescript("PRAGMA locking_mode = EXCLUSIVE; PRAGMA synchronous = NORMAL; PRAGMA cache_size = -1024;")
            self._db = db
            _OPEN.add(self)
        return self._db

    @contextmanager
    def creating(self) -> Iterator[Path]:
        """Yield a new index to fill, and put it in its place: a shard without an index was never used."""
        new = self.folder / "index.new"
        self.folder.mkdir(exist_ok=True)
        new.unlink(missing_ok=True)
        with closing(sqlite3.connect(new)) as db:
            db.executescript(_TABLES)
            yield new
            db.executescript(_LOOKUPS)
        os.replace(new, self.path)

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
        return bool(self.connect().execute("PRAGMA user_version").fetchone()[0])

    def versions(self) -> set[tuple[str, str]]:
        """Return the names of versions, each with a checkpoint that refers to it."""
        return set(self.connect().execute("SELECT name, checkpoint FROM versions"))

    def trim(self, wanted: set[str], is_live: bool) -> None:
        """Delete the versions that are not wanted, and the states and files that no other version needs.

        Args:
            wanted: The names of versions.
            is_live: Whether a store uses the shard, so that the newest states stay.
        """
        gone = {name for name, _ in self.versions()} - wanted
        if not gone and (is_live or self.is_trimmed()):
            return
        with self.transaction() as db:
            db.executemany("DELETE FROM versions WHERE name = ?", [(name,) for name in gone])
            db.execute(
                "DELETE FROM states WHERE (until IS NOT NULL OR ?) AND NOT EXISTS"
                " (SELECT 1 FROM versions WHERE file <= number AND (until IS NULL OR until > number))",
                (not is_live,),
            )
            if not is_live:
                db.execute("PRAGMA user_version = 1")
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


class _Reader:
    """Reads states of a shard, and keeps the last file open.

    They are read, and not mapped into memory: a mapped file that somebody truncates ends the process, and its pages
    count as the process's memory.
    """

    def __init__(self, index: Index) -> None:
        self._index, self._number, self._size = index, 0, 0
        self._file: FileIO | None = None

    def tensors(self, device: torch.device, number: int, client: int, offset: int, length: int, checksum: int) -> State:
        """Return a client's state; it is refused by name if it is damaged."""
        data = self.read(number, client, offset, length, checksum)
        try:
            return {name: value.to(device) for name, value in sorted(load(data).items())}  # which has no order
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            path = self._index.file(number)
            raise FederatedError(f"{path} holds no tensors for the client with index {client}: {error}.") from error

    def read(self, number: int, client: int, offset: int, length: int, checksum: int) -> bytes:
        """Return a client's state as it was written."""
        data = b""
        try:
            if self._file is None or number != self._number:
                self.close()
                self._number, self._file = number, open(self._index.file(number), "rb", buffering=0)  # noqa: SIM115
                self._size = os.fstat(self._file.fileno()).st_size
            if 0 <= offset < offset + length <= self._size:
                self._file.seek(offset)
                while len(data) < length and (part := self._file.read(length - len(data))):
                    data = data + part if data else part
        except OSError as error:
            raise _missing(self._index.file(number), error) from error
        if not data or len(data) != length or zlib.crc32(data, client) != checksum:
            path = self._index.file(number)
            raise FederatedError(f"{path} is damaged: what it holds of the client with index {client} was changed.")
        return data

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


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
        self._number = 0  # of the newest file
        self._staged: dict[int, tuple[int, int, int]] = {}  # offset, length and checksum
        self._file: FileIO | None = None  # of the round
        self._path = self.index.folder  # of this file
        self._end = 0  # of what was written to it
        self._unsynced: list[Path] = []  # files that may not be on the disk yet
        self._reader = _Reader(self.index)
        self._header: tuple[list[Any], bytes, list[str]] = ([], b"", [])  # of the last state's kind
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
            if not self.index.is_open and (not self.index.path.exists() or self.index.is_trimmed()):
                self.index.close()
                raise FederatedError(
                    f"Client states of this run are gone: {self.index.folder} is not what it was. Another run that was"
                    " started there since has removed what no checkpoint needed."
                )
            try:
                yield self.index.connect()
            finally:
                if self._rests:
                    self._reader.close()
                    self.index.close()

    def get(self, index: int) -> State | None:
        """Read a client's committed state, None if it has none yet.

        Raises:
            FederatedError: If its file is damaged.
        """
        return self._newest(index, index).get(index)

    def state_dict(self) -> dict[int, State]:
        """Return all committed states, in memory."""
        return self._newest(0, self.num_clients)

    def _newest(self, *between: int) -> dict[int, State]:
        newest = (
            "SELECT file, client, offset, length, checksum FROM states WHERE until IS NULL AND client BETWEEN ? AND ?"
            " ORDER BY client"
        )
        with self._open() as db:
            rows = () if db is None else db.execute(newest, between)
            return {row[1]: self._reader.tensors(self.device, *row) for row in rows}

    def stage(self, index: int, state: State) -> None:
        """Write a client's new state, which is not to be seen until the round is complete."""
        if state:
            self._append(index, self._bytes({name: v.detach().cpu().contiguous() for name, v in state.items()}))

    def stage_all(self, indices: Sequence[int], states: State) -> None:
        """Write several clients' new states [S, ...]."""
        rows = {name: value.detach().cpu().contiguous() for name, value in states.items()}
        for row, index in enumerate(indices if states else ()):
            self._append(index, self._bytes({name: value[row] for name, value in rows.items()}))

    def _bytes(self, state: State) -> bytes:
        """Return a state in the safetensors format; states of one kind differ only in what follows the header."""
        kind = [(name, value.dtype, value.shape) for name, value in state.items()]
        if kind != self._header[0]:
            try:
                data = save({name: value.clone() for name, value in state.items()})  # no two share memory
            except (SafetensorError, ValueError, KeyError) as error:
                kinds = {name: str(value.dtype) for name, value in state.items()}
                raise FederatedError(
                    f"Client states of {kinds} cannot be kept on disk: {error}. Use dense tensors of common types, or"
                    " set client_states='memory'."
                ) from error
            end = 8 + int.from_bytes(data[:8], "little")
            places = json.loads(data[8:end])
            self._header = (kind, data[:end], sorted(state, key=lambda name: places[name]["data_offsets"]))
        _, header, names = self._header
        return b"".join([header, *(state[name].reshape(-1).view(torch.uint8).numpy().data for name in names)])

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
        number = self._number + 1
        with _named(self.index.path):
            if not self._number:
                with self.index.creating():
                    pass
            self._rewrite()
            rows = [(number, client, *place) for client, place in sorted(self._staged.items())]
            sums = [sum(row[3] for row in rows), len(rows), sum(row[1] + row[4] for row in rows)]
            with self.index.transaction() as db:
                db.executemany("UPDATE states SET until = ? WHERE client = ? AND until IS NULL", [r[:2] for r in rows])
                db.executemany("INSERT INTO states VALUES (?, ?, NULL, ?, ?, ?)", rows)
                db.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?)", (number, self._end, *sums))
                gone = db.execute(
                    "SELECT SUM(length), COUNT(*), SUM(client + checksum), file FROM states WHERE until = ?"
                    " GROUP BY file",
                    (number,),
                )
                subtract = "UPDATE files SET live = live - ?, clients = clients - ?, total = total - ? WHERE id = ?"
                db.executemany(subtract, gone.fetchall())
                db.execute(
                    "DELETE FROM states WHERE until = ? AND file > (SELECT COALESCE(MAX(number), -1) FROM versions)",
                    (number,),
                )
                unused = self.index.drop_files(db)
        self._number, self._staged = number, {}
        self._reader.close()
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
            for client, *place in self.index.connect().execute(rows, (file,)):
                if client not in self._staged:
                    self._append(client, self._reader.read(file, client, *place))

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
                with self.index.transaction():
                    db.execute("UPDATE states SET until = ? WHERE until IS NULL", (self._number,))
                    db.execute("UPDATE files SET live = 0, clients = 0, total = 0")
        for index, state in states.items():
            if is_mine(int(index)):
                self.stage(int(index), state)
        self.commit()

    def rest(self) -> None:
        """Close all files until the next state is staged; whatever reads them closes them again."""
        self._rests = True
        self._reader.close()
        with _named(self.index.path):
            self.index.close()

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
        last = 0
        with _named(self.index.path), self.index.creating() as new:
            for shard in shards:
                source = Index(folder / shard.name)
                with _checked(source, shard, self.num_clients) as db:
                    db.create_function("is_mine", 1, is_mine)
                    db.execute("ATTACH ? AS new", (str(new),))
                    db.execute("PRAGMA new.synchronous = OFF")
                    db.execute("BEGIN")
                    db.execute(
                        "INSERT INTO new.states SELECT file + ?, client, NULL, offset, length, checksum FROM version"
                        " WHERE is_mine(client)",
                        (last,),
                    )
                    db.execute(
                        "INSERT INTO new.files SELECT file, bytes, SUM(length), COUNT(*), SUM(client + checksum)"
                        " FROM new.states JOIN main.files ON id = file - :last WHERE file > :last GROUP BY file",
                        {"last": last},
                    )
                    linked = db.execute("SELECT id, bytes FROM new.files WHERE id > ?", (last,)).fetchall()
                    db.execute("COMMIT")
                for number, size in linked:
                    self._link(source.file(number - last), self.index.file(number), size)
                last += shard.number
        self._number = last

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
    states, cpu = {}, torch.device("cpu")
    for shard in shards:
        index = Index(folder / shard.name)
        with _checked(index, shard, num_clients) as db, closing(_Reader(index)) as reader:
            for client, file, *place, _ in db.execute("SELECT * FROM version"):
                if is_mine(client):
                    states[client] = reader.tensors(cpu, file, client, *place)
    return dict(sorted(states.items()))


@contextmanager
def _checked(index: Index, shard: Shard, num_clients: int) -> Iterator[sqlite3.Connection]:
    """Yield a connection to a copy of an index, with a view of a version, which is what the checkpoint says.

    It is a copy because the folder may be read-only, and opening an index that a killed process left changes it.

    Raises:
        FederatedError: If the index is missing or damaged.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, index.path.name)
        try:
            shutil.copyfile(index.path, copy)
            with suppress(FileNotFoundError):
                shutil.copyfile(f"{index.path}-wal", f"{copy}-wal")
        except OSError as error:
            raise _missing(index.path, error) from error
        with closing(sqlite3.connect(copy, isolation_level=None)) as db:
            try:
                db.execute(_VERSION.format(number=shard.number))
                clients, total, sound = db.execute(_CHECK, (num_clients,)).fetchone()
            except sqlite3.Error as error:
                raise FederatedError(f"{index.path} is damaged: {error}.") from error
            if (clients, total or 0, sound or 0) != (shard.clients, shard.total, clients):
                raise FederatedError(f"{index.path} is damaged: it is not what was written there.")
            yield db


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
