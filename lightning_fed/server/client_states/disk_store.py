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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

__all__ = ["INDICES", "DiskClientStore", "Index", "Shard", "read_version"]

_SMALL_FILES = 256  # so many are merged

# Commit n writes file n. A state belongs to the versions from the number of its file until just before `until`, which
# is NULL for the newest one. `live`, `clients` and `total` add up lengths, numbers and checksums of a file's newest.
_NEWEST = "CREATE UNIQUE INDEX newest ON states (client) WHERE until IS NULL;"
_SCHEMA = """
PRAGMA synchronous = OFF;
BEGIN;
CREATE TABLE files (id INTEGER PRIMARY KEY, bytes INTEGER NOT NULL, live INTEGER, clients INTEGER, total INTEGER);
CREATE TABLE states (file INTEGER, client INTEGER, until INTEGER, offset INTEGER, length INTEGER, checksum INTEGER,
    PRIMARY KEY (file, client)) WITHOUT ROWID;
CREATE TABLE versions (name TEXT, checkpoint TEXT, number INTEGER, PRIMARY KEY (name, checkpoint));
CREATE INDEX superseded ON states (until) WHERE until IS NOT NULL;
CREATE VIEW current AS SELECT file, client, offset, length, checksum FROM states WHERE until IS NULL;
COMMIT;
PRAGMA journal_mode = WAL;
"""
_SUBTRACT_SUPERSEDED = """
INSERT INTO files SELECT file, 0, SUM(length), COUNT(*), SUM(client + checksum) FROM states WHERE until = ?
    GROUP BY file ON CONFLICT (id) DO UPDATE
    SET live = live - excluded.live, clients = clients - excluded.clients, total = total - excluded.total
"""
# the newest states in files that are mostly out of date, and in small ones if there are many, up to a number of bytes
_TO_REWRITE = """SELECT * FROM current WHERE file IN (
    SELECT id FROM (SELECT id, SUM(live) OVER (ORDER BY live, id) AS sum FROM files WHERE live > 0 AND (
        2 * live <= bytes OR bytes < :small
            AND (SELECT COUNT(*) FROM files WHERE live > 0 AND bytes < :small) >= :many
    )) WHERE sum <= :budget)
"""
_VERSION = """
CREATE TEMP VIEW version AS SELECT file, client, offset, length, checksum FROM source.states
    WHERE file <= {number} AND (until IS NULL OR until > {number})
    AND client >= 0 AND client < {num_clients} AND typeof(client) = 'integer'
"""


class Shard(NamedTuple):
    """A process's part of a version."""

    name: str  # of its folder
    number: int  # of the last commit
    clients: int  # with a state
    total: int  # of client indices and checksums


class Index:
    """The SQLite file of a shard, which is opened when it is used, and the files of states beside it.

    With the write-ahead log, a commit appends once, and a kill leaves whole transactions. The connection locks the file
    for itself, so SQLite needs no memory that is shared between processes, which network file systems do not have.
    """

    patience = 5.0  # seconds to wait for a process that has it open

    def __init__(self, folder: Path, is_used: bool = False) -> None:
        self.folder, self.path = folder, folder / "index.sqlite"
        self.is_used = is_used  # by a store of this process, so that the newest states stay
        self._db: sqlite3.Connection | None = None

    def connect(self) -> sqlite3.Connection:
        """Return the connection, which stays open until :meth:`close`."""
        if self._db is None:
            uri = f"{self.path.absolute().as_uri()}?mode=rw"
            db = sqlite3.connect(uri, self.patience, isolation_level=None, check_same_thread=False, uri=True)
            db.executescript("PRAGMA locking_mode = EXCLUSIVE; PRAGMA synchronous = NORMAL; PRAGMA cache_size = -1024;")
            self._db = db
        return self._db

    @contextmanager
    def opened(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection; one that is opened for this is closed again."""
        was_open = self._db is not None
        try:
            if self.is_used and not was_open and (not self.path.exists() or self._is_trimmed()):
                raise FederatedError(
                    f"Client states of this run are gone: {self.folder} is not what it was. Another run that was"
                    " started there since has removed what no checkpoint needed."
                )
            yield self.connect()
        finally:
            if not was_open:
                self.close()

    def file(self, number: int) -> Path:
        """Return the path of a file of states."""
        return self.folder / f"{number}.states"

    def read(self, number: int, client: int, offset: int, length: int, checksum: int) -> State:
        """Return a client's state; it is refused by name if it is damaged.

        The file is not mapped into memory: a mapped file that somebody truncates ends the process, and its pages count
        as the process's memory.
        """
        path = self.file(number)
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                data = file.read(min(length, os.fstat(file.fileno()).st_size))
            is_sound = (len(data), zlib.crc32(data, client)) == (length, checksum)
        except OSError as error:
            raise _missing(path, error) from error
        except (TypeError, OverflowError):  # what a changed index has in place of numbers
            is_sound = False
        if not is_sound:
            raise FederatedError(f"{path} is damaged: what it holds of the client with index {client} was changed.")
        try:
            return dict(sorted(load(data).items()))  # which has no order
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise FederatedError(f"{path} holds no tensors for the client with index {client}: {error}.") from error

    def versions(self) -> set[tuple[str, str]]:
        """Return the names of versions, each with a checkpoint that refers to it."""
        return set(self.connect().execute("SELECT name, checkpoint FROM versions"))

    def _is_trimmed(self) -> bool:
        """Whether the newest states were deleted, because no store seemed to use the shard."""
        return bool(self.connect().execute("PRAGMA user_version").fetchone()[0])

    def trim(self, wanted: set[str]) -> None:
        """Delete all that neither wanted versions nor a store of this process need."""
        gone = {name for name, _ in self.versions()} - wanted
        if not gone and (self.is_used or self._is_trimmed()):
            return
        with self.connect() as db:
            db.execute("BEGIN")
            db.executemany("DELETE FROM versions WHERE name = ?", [(name,) for name in gone])
            db.execute(
                "DELETE FROM states WHERE (until IS NOT NULL OR ?) AND NOT EXISTS"
                " (SELECT 1 FROM versions WHERE file <= number AND (until IS NULL OR until > number))",
                (not self.is_used,),
            )
            unused = self.drop_files()
            db.execute(f"PRAGMA user_version = {not self.is_used:d}")
        if not self.is_used:  # also those that a killed process left
            kept = {self.file(number) for (number,) in db.execute("SELECT id FROM files")}
            unused = [path for path in self.folder.glob("*.states") if path not in kept]
        _unlink(unused)

    def drop_files(self) -> list[Path]:
        """Drop the files without a state from the index, and return their paths."""
        unused = "SELECT id FROM files WHERE NOT EXISTS (SELECT 1 FROM states WHERE file = files.id)"
        numbers = self.connect().execute(unused).fetchall()
        self.connect().executemany("DELETE FROM files WHERE id = ?", numbers)
        return [self.file(number) for (number,) in numbers]

    def close(self) -> None:
        """Close the connection, which leaves a single file."""
        if self._db is not None:
            self._db.close()
            self._db = None


INDICES: "weakref.WeakValueDictionary[Path, Index]" = weakref.WeakValueDictionary()
"""The indices of this process's stores, by folder."""


def _leave_connections_to_parent() -> None:
    """Do not use connections in a forked process, nor close them: that would write to the parent's files."""
    for index in list(INDICES.values()):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(index._db))
        index._db = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_connections_to_parent)


class DiskClientStore(ClientStore):
    """Client states in the files of a new shard, in the safetensors format; reading runs no code.

    The states of a round are appended to a new file as they are staged. Files of which more than half is out of date,
    and small ones when there are many, are copied into the file of a later round, little by little: the newest states
    take at most about twice their size.
    """

    rewrite_bytes = 2**26  # that a round copies, or as many as it writes if these are more

    def __init__(self, folder: Path, name: str, num_clients: int) -> None:
        self.folder, self.name, self.num_clients = folder, name, num_clients
        self.index = Index(folder / name, is_used=True)
        self._number = self._flushed = 0  # of the last commit, and of the last one whose file is on the disk
        self._staged: dict[int, tuple[int, int, int]] = {}  # offset, length and checksum
        self._end = 0  # of the round's file
        INDICES[self.index.folder] = self.index
        new = self.index.folder / "index.new"
        with _named(self.index.path):
            self.index.folder.mkdir()
            with closing(sqlite3.connect(new)) as db:
                db.executescript(_SCHEMA + _NEWEST)
            os.replace(new, self.index.path)  # a shard without an index was never used

    def __reduce__(self) -> Any:
        """A copy holds the states in memory: it outlives the files, which are this store's alone."""
        store = MemoryClientStore()
        store.load_state_dict(self.state_dict())
        return copy, (store,)

    def __len__(self) -> int:
        """The number of clients with a kept state."""
        with self._open() as db:
            return int(db.execute("SELECT COALESCE(SUM(clients), 0) FROM files").fetchone()[0])

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with _named(self.index.path), self.index.opened() as db:
            yield db

    def get(self, index: int) -> State | None:
        """Read a client's committed state, None if it has none yet; it is refused by name if it is damaged."""
        return self._newest(index, index).get(index)

    def state_dict(self) -> dict[int, State]:
        """Return all committed states, in memory."""
        return self._newest(0, self.num_clients)

    def _newest(self, *between: int) -> dict[int, State]:
        query = "SELECT * FROM current WHERE client BETWEEN ? AND ? ORDER BY client"
        with self._open() as db:
            return {row[1]: self.index.read(*row) for row in db.execute(query, between)}

    def stage(self, index: int, state: State) -> None:
        """Write a client's new state, which is not to be seen until the round is complete."""
        if state:
            self._append([(index, state)])

    def stage_all(self, indices: Sequence[int], states: State) -> None:
        """Write several clients' new states [S, ...]."""
        rows = {name: value.detach().cpu() for name, value in states.items()}
        if rows:
            self._append((index, {name: rows[name][row] for name in rows}) for row, index in enumerate(indices))

    def _append(self, states: Iterable[tuple[int, State]]) -> None:
        """Write to the round's file, over what a write that failed may have left there."""
        path, end, places = self.index.file(self._number + 1), self._end, {}
        with _named(path), open(path, "r+b" if end else "wb") as file:
            self.index.connect()  # until the fit ends: whatever reads it then closes it again
            file.seek(end)
            for index, state in states:
                data = _to_bytes(state)
                file.write(data)
                places[index] = (end, len(data), zlib.crc32(data, index))
                end += len(data)
        self._staged |= places
        self._end = end

    def commit(self) -> None:
        """Make the staged states the newest ones, in one transaction."""
        if not self._staged:
            return
        number = self._number + 1
        with self._open() as db:
            limits = {"budget": max(self.rewrite_bytes, self._end), "small": self.rewrite_bytes // 64}
            rewritten = db.execute(_TO_REWRITE, {**limits, "many": _SMALL_FILES})
            self._append((row[1], self.index.read(*row)) for row in rewritten if row[1] not in self._staged)
            rows = [(number, client, *place) for client, place in sorted(self._staged.items())]
            with db:
                db.execute("BEGIN")
                db.executemany("UPDATE states SET until = ? WHERE client = ? AND until IS NULL", [r[:2] for r in rows])
                db.execute(_SUBTRACT_SUPERSEDED, (number,))
                db.executemany("INSERT INTO states VALUES (?, ?, NULL, ?, ?, ?)", rows)
                db.execute(
                    "INSERT INTO files SELECT file, ?, SUM(length), COUNT(*), SUM(client + checksum) FROM states"
                    " WHERE file = ?",
                    (self._end, number),
                )
                db.execute(
                    "DELETE FROM states WHERE until = ? AND file > (SELECT COALESCE(MAX(number), -1) FROM versions)",
                    (number,),
                )
                unused = self.index.drop_files()
        self._number, self._staged, self._end = number, {}, 0
        _unlink(unused)

    def discard(self) -> None:
        """Forget the staged states."""
        self._staged, self._end = {}, 0
        _unlink([self.index.file(self._number + 1)])

    def load_state_dict(self, states: Mapping[int, Any], is_mine: Callable[[int], bool] = lambda index: True) -> None:
        """Take the states of the clients that are this process's own. The store must be new."""
        for index, state in states.items():
            if is_mine(int(index)):
                self.stage(int(index), state)
        self.commit()

    def record(self, name: str, checkpoint: str) -> Shard:
        """Keep the newest states as a version, when they are safely on the disk; return what a checkpoint must hold."""
        with self._open() as db:
            for (number,) in db.execute("SELECT id FROM files WHERE id > ?", (self._flushed,)):
                _flush(self.index.file(number))
            self._flushed = self._number
            flush_folder(self.index.folder)
            flush_folder(self.folder)
            db.execute("INSERT INTO versions VALUES (?, ?, ?)", (name, checkpoint, self._number))
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            clients, total = db.execute("SELECT SUM(clients), SUM(total) FROM files").fetchone()
        return Shard(self.name, self._number, clients or 0, total or 0)

    def load_version(self, folder: Path, shards: Sequence[Shard], rank: int = 0, processes: int = 1) -> None:
        """Take this process's part of a version; of its files only the size is looked at. The store must be new."""
        with self._open() as db:
            db.execute("DROP INDEX newest")  # made again at the end, which takes a fraction of the time
            for shard in shards:
                last, source = self._number, Index(folder / shard.name)
                with _attached(db, source.path, shard, self.num_clients), db:
                    db.execute("BEGIN")
                    db.execute(
                        "INSERT INTO main.states SELECT file + ?, client, NULL, offset, length, checksum FROM version"
                        " WHERE client % ? = ?",
                        (last, processes, rank),
                    )
                    db.execute(
                        "INSERT INTO main.files SELECT file, CAST(bytes AS INTEGER), SUM(length), COUNT(*),"
                        " SUM(client + checksum) FROM main.states LEFT JOIN source.files ON id = file - :last"
                        " WHERE file > :last GROUP BY file",
                        {"last": last},
                    )
                for number, size in db.execute("SELECT id, bytes FROM files WHERE id > ?", (last,)):
                    _link(source.file(number - last), self.index.file(number), size)
                self._number = self._flushed = last + shard.number
            db.execute(_NEWEST)


def read_version(
    folder: Path, shards: Sequence[Shard], num_clients: int, rank: int = 0, processes: int = 1
) -> dict[int, State]:
    """Return a version's states, in memory; see :meth:`DiskClientStore.load_version`."""
    states: dict[int, State] = {}
    for shard in shards:
        index = Index(folder / shard.name)
        with closing(sqlite3.connect(":memory:")) as db, _attached(db, index.path, shard, num_clients):
            rows = db.execute("SELECT * FROM version WHERE client % ? = ?", (processes, rank))
            states |= {row[1]: index.read(*row) for row in rows}
    return dict(sorted(states.items()))


@contextmanager
def _attached(db: sqlite3.Connection, path: Path, shard: Shard, num_clients: int) -> Iterator[None]:
    """Attach a copy of an index, which a store may use, with a view of a version; it must be what was written."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        taken = Path(folder, path.name)
        try:
            shutil.copyfile(path, taken)
            with suppress(FileNotFoundError):
                shutil.copyfile(f"{path}-wal", f"{taken}-wal")
        except OSError as error:
            raise _missing(path, error) from error
        try:
            db.execute("ATTACH ? AS source", (str(taken),))
            db.execute(_VERSION.format(number=shard.number, num_clients=num_clients))
            found = db.execute("SELECT COUNT(*), COALESCE(SUM(client + checksum), 0) FROM version").fetchone()
        except sqlite3.Error as error:
            raise FederatedError(f"{path} is damaged: {error}.") from error
        if found != (shard.clients, shard.total):
            raise FederatedError(f"{path} is damaged: it is not what was written there.")
        yield
        db.execute("DROP VIEW version")
        db.execute("DETACH source")


def _link(source: Path, target: Path, size: int) -> None:
    """Give a file of another shard a second name in this one, or copy it if the file system has no such links."""
    try:
        if (found := source.stat().st_size) != size:
            raise FederatedError(f"{source} is damaged: it has {found:,} bytes, and {size:,} were written.")
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)
            _flush(target)
    except OSError as error:
        raise _missing(source, error) from error


def _to_bytes(state: State) -> bytes:
    try:
        return save({name: v.detach().cpu().clone(memory_format=torch.contiguous_format) for name, v in state.items()})
    except (SafetensorError, ValueError, KeyError) as error:
        kinds = {name: str(value.dtype) for name, value in state.items()}
        raise FederatedError(
            f"Client states of {kinds} cannot be kept on disk: {error}. Use dense tensors of common types, or set"
            " client_states='memory'."
        ) from error


def _flush(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


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
