"""Client states on disk: a SQLite index per process, over one immutable file of states per round.

Each fit and process has a *shard*: a folder with ``index.sqlite`` and the files ``1.states``, ``2.states``, ... A shard
is self-contained: a resumed run links the files that it needs into its own shards. A checkpoint lists the shards of its
version. The files that it needs are kept as long as it exists.
"""

import ctypes
import errno
import os
import shutil
import sqlite3
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from lightning_fed.core.disk import flush_folder
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.types import State
from lightning_fed.server.client_states.store import ClientStore, MemoryClientStore

_SMALL_FILES = 256  # the number of small files that triggers their merge

_NEWEST = "CREATE UNIQUE INDEX newest ON states (client) WHERE until IS NULL;"
# Commit n writes file n. A state belongs to the versions from its file's number until just before `until`, NULL for the
# newest state. The version '' keeps the newest states for the store that uses them. For a file's newest states, `live`
# is their total length, `clients` their number, and `total` the sum of client indices and checksums.
_SCHEMA = """
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
CREATE TABLE files (id INTEGER PRIMARY KEY, bytes INTEGER NOT NULL, live INTEGER, clients INTEGER, total INTEGER);
CREATE TABLE states (file INTEGER, client INTEGER, until INTEGER, offset INTEGER, length INTEGER, checksum INTEGER,
    PRIMARY KEY (file, client)) WITHOUT ROWID;
CREATE TABLE versions (name TEXT, checkpoint TEXT, number INTEGER, PRIMARY KEY (name, checkpoint));
INSERT INTO versions VALUES ('', '', 9223372036854775807);
CREATE INDEX by_number ON versions (number);
CREATE INDEX superseded ON states (until) WHERE until IS NOT NULL;
CREATE VIEW current AS SELECT file, client, offset, length, checksum FROM states WHERE until IS NULL;
"""
_PART = "SELECT file, client, offset, length, checksum FROM source.states WHERE client % ? = ?"
_COUNT_TAKEN = """
INSERT INTO main.files SELECT file, CAST(bytes AS INTEGER), SUM(length), COUNT(*), SUM(client + checksum)
    FROM main.states LEFT JOIN source.files ON id = file - :last WHERE file > :last GROUP BY file
"""
_COUNT_COMMIT = """
INSERT INTO files SELECT file, :bytes, SUM(sign * length), SUM(sign), SUM(sign * (client + checksum)) FROM (
    SELECT 1 AS sign, * FROM states WHERE file = :number UNION ALL SELECT -1, * FROM states WHERE until = :number
) GROUP BY file ON CONFLICT (id) DO UPDATE
    SET live = live + excluded.live, clients = clients + excluded.clients, total = total + excluded.total
"""
_DELETE_SUPERSEDED = """DELETE FROM states WHERE until >= ? AND NOT EXISTS (
    SELECT 1 FROM versions WHERE number >= file AND number < until)
"""
_DELETE_NEWEST = "DELETE FROM states WHERE until IS NULL AND file > (SELECT COALESCE(MAX(number), -1) FROM versions)"
# the newest states in files that are mostly out of date, and in small files if there are many, up to a byte limit
_TO_REWRITE = """SELECT * FROM current WHERE file IN (
    SELECT id FROM (SELECT id, SUM(live) OVER (ORDER BY live, id) AS sum FROM files WHERE live > 0 AND (
        2 * live <= bytes OR bytes < :small
            AND (SELECT COUNT(*) FROM files WHERE live > 0 AND bytes < :small) >= :many
    )) WHERE sum <= :budget)
"""


class Shard(NamedTuple):
    """A process's part of a version."""

    name: str  # the name of its folder
    number: int  # the number of the last commit
    clients: int  # the number of clients with a state
    total: int  # sum of client indices and checksums


class Index:
    """The SQLite file of a shard, opened on first use, and the shard's files of states.

    With the write-ahead log, a commit appends once, and a kill leaves complete transactions. The connection locks the
    file exclusively, so SQLite needs no shared memory, which network file systems lack.
    """

    patience = 5.0  # seconds to wait while another process has it open

    def __init__(self, folder: Path, is_used: bool = False) -> None:
        self.folder, self.path = folder, folder / "index.sqlite"
        self.is_used = is_used  # a store of this process uses it, and needs the newest states
        self._db: sqlite3.Connection | None = None

    def connect(self) -> sqlite3.Connection:
        """Return the connection, which stays open until :meth:`close`."""
        if self._db is not None:
            return self._db
        if self.path.exists() or not self.is_used:
            uri = f"{self.path.absolute().as_uri()}?mode=rw"
            db = sqlite3.connect(uri, self.patience, isolation_level=None, check_same_thread=False, uri=True)
            db.executescript("PRAGMA locking_mode = EXCLUSIVE; PRAGMA synchronous = NORMAL; PRAGMA cache_size = -1024;")
            if not self.is_used or db.execute("SELECT 1 FROM versions WHERE name = ''").fetchone():
                self._db = db
                return db
            db.close()
        raise FederatedError(
            f"Client states of this run are gone: {self.folder} has changed. Another run that was started there"
            " since has removed what no checkpoint needed."
        )

    @contextmanager
    def opened(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection; close it afterwards if this opened it."""
        was_open = self._db is not None
        try:
            yield self.connect()
        finally:
            if not was_open:
                self.close()

    def close(self) -> None:
        """Close the connection, which leaves a single file."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def file(self, number: int) -> Path:
        """Return the path of a file of states."""
        return self.folder / f"{number}.states"

    def read(self, number: int, client: int, offset: int, length: int, checksum: int) -> bytes:
        """Return the bytes of a client's state; raise an error that names the file if they are damaged."""
        path = self.file(number)  # not mapped into memory: truncation by another process would kill this one
        with _named(path, reads=True), open(path, "rb") as file, suppress(TypeError, OverflowError):
            file.seek(offset)  # in a modified index, this may not be a number
            data = file.read(min(length, os.fstat(file.fileno()).st_size))
            if (len(data), zlib.crc32(data, client)) == (length, checksum):
                return data
        raise FederatedError(f"{path} is damaged: the stored state of the client with index {client} was changed.")

    def states(self, rows: Iterable[tuple[int, int, int, int, int]]) -> dict[int, State]:
        """Return the states that rows of the index refer to, by client."""
        states = {}
        for number, client, *location in rows:
            data = self.read(number, client, *location)
            try:
                tensors = sorted(load(data).items())  # the file may have any order
            except (SafetensorError, ValueError, KeyError, TypeError) as error:
                path = self.file(number)
                raise FederatedError(f"{path} holds no tensors for the client with index {client}: {error}.") from error
            states[client] = dict(tensors)
        return states

    def versions(self) -> set[tuple[str, str]]:
        """Return the names of all versions, each with the checkpoint that refers to it."""
        return set(self.connect().execute("SELECT name, checkpoint FROM versions WHERE name <> ''"))

    def trim(self, wanted: set[str]) -> None:
        """Delete everything except the wanted versions and the states of this process's stores."""
        kept = {*wanted, ""} if self.is_used else wanted
        gone = [row for row in self.connect().execute("SELECT DISTINCT name FROM versions") if row[0] not in kept]
        if gone:
            with self.connect() as db:
                db.execute("BEGIN")
                db.executemany("DELETE FROM versions WHERE name = ?", gone)
                db.execute(_DELETE_SUPERSEDED, (0,))
                db.execute(_DELETE_NEWEST)
            self.sweep()

    def sweep(self) -> None:
        """Delete files that contain no needed state."""
        db = self.connect()
        unused = db.execute("SELECT id FROM files WHERE NOT EXISTS (SELECT 1 FROM states WHERE file = id)").fetchall()
        db.executemany("DELETE FROM files WHERE id = ?", unused)
        paths = {self.file(number) for (number,) in unused}
        if not self.is_used:  # also delete files that a killed process left
            paths = {*self.folder.glob("*.states")} - {self.file(n) for (n,) in db.execute("SELECT id FROM files")}
        for path in paths:
            with suppress(OSError):
                path.unlink()


INDICES: "weakref.WeakValueDictionary[Path, Index]" = weakref.WeakValueDictionary()
"""The indices of this process's stores, by folder."""


def _leave_connections_to_parent() -> None:
    """Drop connections in a forked process without closing them, which would write to the parent's files."""
    for index in list(INDICES.values()):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(index._db))
        index._db = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_connections_to_parent)


class DiskClientStore(ClientStore):
    """Client states in the files of a new shard, in the safetensors format; reading runs no code.

    Staged states are appended to a new file per round. Later rounds gradually copy files that are more than half out of
    date, and small files if there are many. So the disk use is at most about twice the size of the newest states.
    """

    rewrite_bytes = 2**26  # a round copies at most this number of bytes, or as many as it writes if more

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.index = INDICES[folder / name] = Index(folder / name, is_used=True)
        self._number = self._flushed = 0  # the last commit, and the last one that is on the disk
        self._staged: dict[int, tuple[int, int, int]] = {}  # offset, length and checksum
        with _named(self.index.path):
            self.index.folder.mkdir()
        self.load_version(folder, [])

    def __reduce__(self) -> Any:
        """Pickle as a store in memory, which outlives this store's files."""
        store = MemoryClientStore()
        store.load_state_dict(self.state_dict())
        return copy, (store,)

    def __len__(self) -> int:
        """The number of clients with a state."""
        with self._open() as db:
            return int(db.execute("SELECT COUNT(*) FROM current").fetchone()[0])

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with _named(self.index.path), self.index.opened() as db:
            yield db

    def get(self, index: int) -> State | None:
        """Return a client's committed state, or None; raise an error that names the file if it is damaged."""
        if not self._number:  # opening the index would take longer than a small client's local work
            return None
        with self._open() as db:
            row = db.execute("SELECT * FROM current WHERE client = ?", (index,))
            return self.index.states(row).get(index)

    def state_dict(self) -> dict[int, State]:
        """Read all committed states into memory."""
        with self._open() as db:
            return self.index.states(db.execute("SELECT * FROM current ORDER BY client"))

    def stage(self, index: int, state: State) -> None:
        """Write a client's new state, which becomes visible when the round is complete."""
        if state:
            self._append([(index, _to_bytes(state))])

    def stage_all(self, indices: Sequence[int], states: State) -> None:
        """Write several clients' new states [S, ...]."""
        rows = {name: value.detach().cpu() for name, value in states.items()}
        if rows:
            self._append((i, _to_bytes({name: rows[name][at] for name in rows})) for at, i in enumerate(indices))

    def _append(self, states: Iterable[tuple[int, bytes]]) -> None:
        """Append to the round's file, after any bytes left by a failed write."""
        path, locations = self.index.file(self._number + 1), {}
        with _named(path):
            self.index.connect()  # stays open until the fit ends; later readers close it again
            with open(path, "ab") as file:
                for index, data in states:
                    locations[index] = (file.tell(), len(data), zlib.crc32(data, index))
                    file.write(data)
        self._staged |= locations

    def commit(self) -> None:
        """Make the staged states the newest ones, in one transaction."""
        if not self._staged:
            return
        number = self._number + 1
        path, small = self.index.file(number), self.rewrite_bytes // 64
        with self._open() as db:
            limits = {"budget": max(self.rewrite_bytes, path.stat().st_size), "small": small, "many": _SMALL_FILES}
            rewritten = db.execute(_TO_REWRITE, limits)
            self._append((row[1], self.index.read(*row)) for row in rewritten if row[1] not in self._staged)
            rows = [(number, client, *location) for client, location in sorted(self._staged.items())]
            with db:
                db.execute("BEGIN")
                db.executemany("UPDATE states SET until = ? WHERE client = ? AND until IS NULL", [r[:2] for r in rows])
                db.executemany("INSERT INTO states VALUES (?, ?, NULL, ?, ?, ?)", rows)
                db.execute(_COUNT_COMMIT, {"number": number, "bytes": path.stat().st_size})
                db.execute(_DELETE_SUPERSEDED, (number,))
            self._number, self._staged = number, {}
            self.index.sweep()

    def discard(self) -> None:
        """Discard the staged states and their file."""
        self._staged = {}
        with suppress(OSError):
            self.index.file(self._number + 1).unlink()

    def load_state_dict(self, states: Mapping[int, Any], is_mine: Callable[[int], bool] = lambda index: True) -> None:
        """Load the states of this process's clients. The store must be new."""
        self._append((int(i), _to_bytes(state)) for i, state in states.items() if state and is_mine(int(i)))
        self.commit()

    def record(self, name: str, checkpoint: str) -> Shard:
        """Save the newest states as a version once they are on the disk; return the checkpoint's entry."""
        with self._open() as db:
            new = db.execute("SELECT id FROM files WHERE id > ?", (self._flushed,)).fetchall()
            paths = [self.index.file(number) for (number,) in new]
            if len(paths) > 1:
                with ThreadPoolExecutor() as pool:
                    list(pool.map(_flush, paths))
            elif paths:  # no thread: a system limit may refuse it
                _flush(paths[0])
            self._flushed = self._number
            flush_folder(self.index.folder)
            flush_folder(self.folder)
            db.execute("INSERT INTO versions VALUES (?, ?, ?)", (name, checkpoint, self._number))
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            sums = db.execute("SELECT COALESCE(SUM(clients), 0), COALESCE(SUM(total), 0) FROM files").fetchone()
        return Shard(self.name, self._number, *sums)

    def load_version(self, folder: Path, shards: Sequence[Shard], rank: int = 0, processes: int = 1) -> None:
        """Load this process's part of a version, checking only the sizes of its files. The store must be new."""
        new = self.index.folder / "index.new"  # a shard without an index was never used
        with _named(self.index.path), closing(sqlite3.connect(new, isolation_level=None)) as db:
            db.executescript(_SCHEMA)
            for shard in shards:
                last, source = self._number, Index(folder / shard.name)
                with _attached(db, source.path, shard):
                    db.execute(
                        "INSERT INTO main.states SELECT file + ?, client, NULL, offset, length, checksum"
                        " FROM source.states WHERE client % ? = ?",
                        (last, processes, rank),
                    )
                    db.execute(_COUNT_TAKEN, {"last": last})
                for number, size in db.execute("SELECT id, bytes FROM files WHERE id > ?", (last,)):
                    _link(source.file(number - last), self.index.file(number), size)
                self._number = self._flushed = last + shard.number
            db.executescript(_NEWEST + "PRAGMA journal_mode = WAL;")
        os.replace(new, self.index.path)


def read_version(folder: Path, shards: Sequence[Shard], rank: int = 0, processes: int = 1) -> dict[int, State]:
    """Return a version's states, in memory; see :meth:`DiskClientStore.load_version`."""
    states: dict[int, State] = {}
    for shard in shards:
        index = Index(folder / shard.name)
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as db, _attached(db, index.path, shard):
            states |= index.states(db.execute(_PART, (processes, rank)))
    return dict(sorted(states.items()))


@contextmanager
def _attached(db: sqlite3.Connection, path: Path, shard: Shard) -> Iterator[None]:
    """Attach a copy of an index with one version's states, and check them; a store may be using the original."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        taken = Path(folder, path.name)
        with _named(path, reads=True):
            shutil.copyfile(path, taken)
            with suppress(FileNotFoundError):
                shutil.copyfile(f"{path}-wal", f"{taken}-wal")
            db.execute("ATTACH ? AS source", (str(taken),))
            db.execute("DELETE FROM source.states WHERE file > :number OR until <= :number", {"number": shard.number})
            found = db.execute("SELECT COUNT(*), COALESCE(SUM(client + checksum), 0) FROM source.states").fetchone()
        if found != (shard.clients, shard.total):
            raise FederatedError(f"{path} is damaged: it is not what was written there.")
        yield
        db.execute("DETACH source")


def _link(source: Path, target: Path, size: int) -> None:
    """Hard-link a file of another shard into this one, or copy it if the file system has no hard links."""
    with _named(source, reads=True):
        if (found := source.stat().st_size) != size:
            raise FederatedError(f"{source} is damaged: it has {found:,} bytes, and {size:,} were written.")
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)
            _flush(target)


def _to_bytes(state: State) -> bytes:
    try:
        return save({name: v.detach().cpu().clone(memory_format=torch.contiguous_format) for name, v in state.items()})
    except (SafetensorError, ValueError, KeyError) as error:
        kinds = {name: str(value.dtype) for name, value in state.items()}
        raise FederatedError(
            f"Client states of {kinds} cannot be kept on disk: {error}. Use dense tensors of common types, or set"
            " client_states='memory'."
        ) from error


@contextmanager
def _named(path: Path, reads: bool = False) -> Iterator[None]:
    """Convert disk and SQLite errors into errors that name the file."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        why = getattr(error, "strerror", error)
        if reads and isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            text = f"{path} cannot be copied: {why}. Make room in {tempfile.gettempdir()} and for the run's own files."
        elif reads and isinstance(error, OSError):
            text = (
                f"{path}, which holds kept client states, cannot be read: {why}. Copy the whole folder"
                f" {path.parent.parent.name!r} along with a checkpoint, and leave its files alone."
            )
        elif isinstance(error, OSError | sqlite3.OperationalError) and not reads:
            text = (
                f"Client states cannot be written to {str(path)!r}: {why}. Checkpoints written so far keep their"
                " states; make room, and resume from the last one."
            )
        else:
            text = f"{path} is damaged: {why}."
        raise FederatedError(text) from error


def _flush(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
