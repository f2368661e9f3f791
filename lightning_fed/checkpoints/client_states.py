"""The storage of a run's client states, checkpoints' references to them, and their deletion."""

import os
import pickle
import re
import secrets
import shutil
import sqlite3
import weakref
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from stat import S_ISREG
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from lightning_fed.compat.package import pl
from lightning_fed.compat.private import rank_zero_info
from lightning_fed.core.errors import FederatedError
from lightning_fed.server.client_states.disk_store import INDICES, DiskClientStore, Index, Shard, read_version
from lightning_fed.server.client_states.store import ClientStore
from lightning_fed.server.server import Server
from lightning_fed.settings.settings import Settings
from lightning_fed.strategies.processes import Ranks

MEMORY_LIMIT = 2**30  # client_states="auto" uses the disk if all clients' states are larger
FOLDER = "client_states"
_FORMAT = 2  # the disk store's format
_GARBAGE = 8  # at most one in this many versions is garbage after a checkpoint is saved
_SHARD = re.compile(r"[0-9a-f]{16}-\d{4,}")  # run and rank
_RUNS: set[str] = set()  # runs whose shards this process or its peers clean up
Result = TypeVar("Result")
Reference = Mapping[str, Any]


class StoreFolder:
    """A folder of shards; one run at a time uses it."""

    patience = 10.0  # seconds to wait for another run; a killed run's data loaders may hold the lock that long

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = FileLock(path / "lock", thread_local=False)
        self.newest = ""  # the last version, whose checkpoint may not exist yet
        self.written = self._remaining = 0  # versions since the last garbage collection, and versions left then
        # the checkpoints seen in the folder: each file's identity, and the version that it refers to
        self._referred: dict[str, tuple[tuple[int, ...], str | None]] = {}

    def acquire(self) -> None:
        """Create the folder if it is missing, and lock it; raise for the old format."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock.acquire(timeout=self.patience)
        except Timeout:
            raise FederatedError(
                f"Another run keeps its client states in {self.path}. Wait for its end, or give this run its own"
                " folder: client_states_dir=..."
            ) from None
        except OSError as error:
            raise FederatedError(
                f"client_states_dir={str(self.path)!r} cannot be used: {error.strerror}. Give a folder on a local disk."
            ) from error
        if next(self.path.glob("round-*.json"), None) or next(self.path.glob("*.states"), None):
            self.lock.release()
            raise _old_format(self.path)

    def register(self, reference: Reference, checkpoint: Path) -> None:
        """Record the path of a version's checkpoint, which may have been copied or moved."""
        found = relative(checkpoint, self.path)
        for shard in shards_of(reference):
            row = (reference["version"], found, shard.number)
            with suppress(sqlite3.Error, FederatedError), _index(self.path / shard.name).opened() as db:
                db.execute("INSERT OR IGNORE INTO versions VALUES (?, ?, ?)", row)

    def collect_if_due(self, rank: int) -> None:
        """Call :meth:`collect` if many versions may have become garbage since its last call.

        It checks all versions and checkpoints. In a run with thousands of checkpoints, a call at every save would take
        longer and longer.
        """
        if self.written and _GARBAGE * self.written >= self._remaining:
            self.collect(rank)

    def collect(self, rank: int) -> None:
        """Delete data in shards that neither checkpoints nor this process's stores need.

        Each process cleans its shards. The first one also cleans the shards of other runs, which may have been killed.
        It deletes nothing while a folder or a checkpoint cannot be opened, since that may need any version.
        """
        found: dict[Index, set[tuple[str, str]]] = {}
        with suppress(OSError), ExitStack() as opened:
            for path in self.path.iterdir():
                if not _SHARD.fullmatch(path.name) or not _is_cleaned_here(path.name, rank):
                    continue
                index = _index(path)
                # skip a shard that is damaged, in use after its fit, or gone
                with suppress(sqlite3.Error, FederatedError):
                    if index.path.exists():
                        opened.enter_context(index.opened())
                    found[index] = index.versions() if index.path.exists() else set()
            wanted = self._wanted(set().union(*found.values()))
            self.written, self._remaining = 0, len(wanted)
            for index, versions in found.items():
                if index.is_used or not wanted.isdisjoint(name for name, _ in versions):
                    with suppress(sqlite3.Error):
                        index.trim(wanted)
                else:
                    index.close()
                    shutil.rmtree(index.folder, ignore_errors=True)

    def _wanted(self, versions: set[tuple[str, str]]) -> set[str]:
        """Return the versions that a checkpoint may refer to, given each version's known checkpoint.

        It reads the checkpoints, since they may have been renamed, or replaced by others of the same name. It skips
        files that have not changed since the last call: reading them would take most of a save's time.
        """
        known = {(name, os.path.normpath(self.path / checkpoint)) for name, checkpoint in versions}
        files = {path for _, path in known}
        kinds = {Path(file).suffix for file in files}
        for folder in {Path(file).parent for file in files}:
            if folder.is_dir():
                files.update(str(f) for f in folder.iterdir() if f.suffix in kinds and f.is_file())
        before, self._referred = self._referred, {}
        for file in files:
            with suppress(FileNotFoundError, NotADirectoryError):
                found = os.stat(file)
                if S_ISREG(found.st_mode):
                    same = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
                    noted = before.get(file)
                    version = noted[1] if noted is not None and noted[0] == same else _referred_version(file)
                    self._referred[file] = same, version
        referred = {file: version for file, (_, version) in self._referred.items()}
        wanted = {*referred.values(), self.newest}
        return {name for name, path in known if name in wanted or referred.get(path, "") is None}


def _index(shard: Path) -> Index:
    """Return the index of a shard, reusing the index of this process's store if there is one."""
    return INDICES.get(shard) or Index(shard)


def _is_cleaned_here(shard: str, rank: int) -> bool:
    run, writer = shard.rsplit("-", 1)
    return int(writer) == rank if run in _RUNS else rank == 0


def _clean_after(store: DiskClientStore, rank: int, is_shared: bool) -> None:
    """Collect garbage once a store is gone, unless a run uses the folder; wait for the lock if it is shared."""
    weakref.finalize(store, _clean, store.folder, store.index, rank, 1.0 if is_shared else 0.0, os.getpid())


def _clean(path: Path, index: Index, rank: int, patience: float, process: int) -> None:
    if process != os.getpid():  # a forked child drops its copy of the store, but the parent's may be in use
        return
    index.close()
    index.is_used = False
    folder = StoreFolder(path)
    folder.patience = patience
    if path.is_dir():
        with suppress(FederatedError):
            folder.acquire()
            folder.collect(rank)
            folder.lock.release()


def is_reference(client_states: Any) -> bool:
    """Return whether a checkpoint refers to client states in a store, instead of containing them."""
    return isinstance(client_states, Mapping) and "version" in client_states


def shards_of(reference: Reference) -> list[Shard]:
    """Return the shards that a checkpoint refers to; raise if they are invalid."""
    saved: Any = reference.get("shards")
    for shard in saved if isinstance(saved, list) else [saved]:
        kinds = [type(part) for part in shard] if isinstance(shard, list) else []
        if kinds != [str, int, int, int] or not _SHARD.fullmatch(shard[0]):
            raise FederatedError(f"The checkpoint's reference to client states is damaged: {shard!r} is not a shard.")
    return [Shard(*shard) for shard in saved]


def _find_store(reference: Reference, checkpoint: Path) -> Path:
    """Return the folder that a checkpoint refers to; if missing, the error names the folder to copy."""
    path = Path(str(reference.get("path")))
    beside = [checkpoint.parent / path, checkpoint.parent / path.name]
    linked = [folder.resolve() for folder in (*beside, checkpoint.resolve().parent / path)]
    folders = [folder for f in (*beside, *linked) if (folder := Path(os.path.abspath(f))).is_dir()]
    if reference.get("format") != _FORMAT:
        raise _old_format(next(iter(folders), path))
    names = [shard.name for shard in shards_of(reference)]
    if folders:  # the first folder with all shards, else the first one
        return max(folders, key=lambda folder: all((folder / name).is_dir() for name in names))
    raise FederatedError(
        f"{checkpoint} keeps its client states in the folder {str(path)!r} next to it, and there is no such folder."
        f" Copy that folder along with the checkpoint: it is expected at {os.path.abspath(beside[0])}."
    )


def _old_format(folder: Path) -> FederatedError:
    return FederatedError(
        f"The client states in {folder} were written by another version of lightning_fed, in a format that this version"
        " does not read. Start a new run with another folder (client_states_dir=...), or finish this one with the"
        " version that wrote it."
    )


class _Opaque(dict[Any, Any]):
    """Takes the place of tensors and other objects of a checkpoint."""

    def __new__(cls, *_: Any, **__: Any) -> "_Opaque":
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


class _PlainUnpickler(pickle.Unpickler):
    """Reads a checkpoint's plain values without running its code, or PyTorch's.

    Python may collect a store while a step is traced, and the trace would record what ``torch.load`` does.
    """

    def find_class(self, *_: str) -> type[_Opaque]:
        return _Opaque

    def persistent_load(self, _: Any) -> _Opaque:
        return _Opaque()


def _referred_version(checkpoint: str) -> str | None:
    """Return the version that a checkpoint refers to, "" if none, None if it cannot be read as a checkpoint.

    Raises:
        OSError: If it cannot be opened now, for example without permission or with too many open files.
    """
    try:
        with zipfile.ZipFile(checkpoint) as parts:
            (values,) = (name for name in parts.namelist() if name.endswith("/data.pkl"))
            with parts.open(values) as content:
                saved = _PlainUnpickler(content).load()
    except OSError:
        raise
    except Exception:  # any error that a damaged file causes
        return None
    try:
        states = saved["loops"]["fit_loop"]["state_dict"]["client_states"]
    except (KeyError, TypeError, IndexError):
        return ""
    return str(states["version"]) if is_reference(states) else ""


def relative(path: Path, folder: Path) -> str:
    """Return a path relative to a folder."""
    return Path(os.path.relpath(path.absolute(), folder.absolute())).as_posix()


class ClientStatesStorage:
    """The storage of a run's client states: memory, or files next to its checkpoints.

    With files, a checkpoint contains the name of a version and the folder's path relative to the checkpoint.
    """

    def __init__(self, trainer: pl.Trainer, where: str, folder: str | None) -> None:
        self.trainer, self.where, self.wanted_folder = trainer, where, folder
        self.checkpoint: Path | None = None  # the checkpoint being written
        self._folder: StoreFolder | None = None
        self._locks = ExitStack()  # folder locks, while a checkpoint is written
        self._run, self._versions = "", 0  # this run's name, and its number of written versions
        self._is_copy = False  # whether this is a copy of a fitted trainer's storage, with states in memory until a fit

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a trainer's copy, which must not use this one's files."""
        return {**self.__dict__, "_folder": None, "_locks": ExitStack(), "_is_copy": True}

    def open(self, server: Server, kept: ClientStore | None, settings: Settings) -> None:
        """Give the server the previous fit's store, or an empty one."""
        if kept is None or self._is_copy:
            on_disk = self._choose(server, settings) == "disk"
            self._folder = StoreFolder(self._choose_folder()) if on_disk else None
        if self._folder is not None:
            self._from_rank_zero(self._folder.acquire)
        if kept is not None and not (self._is_copy and self._folder):
            server.clients = kept
        elif self._folder is not None:
            server.clients = self._make_store(server, self._folder)
            if kept is not None:
                server.clients.load_state_dict(kept.state_dict())
        self._is_copy = False

    def _choose(self, server: Server, settings: Settings) -> str:
        """Return "memory" or "disk", depending on the total size of the states of all eligible clients."""
        if self.where != "auto":
            return self.where
        kept = [*server.new_client().values(), *(server.buffers[name] for name in server.kept_buffers)]
        size = sum(value.nbytes for value in kept)
        size += 2 * (server.x.nbytes + server.personal.nbytes) if settings.keeps_solver else 0  # two, as for Adam
        if settings.compression is not None and settings.compression.error_feedback:
            size += server.x.nbytes * len(server.algorithm.reduces)
        most, rounds, count = len(server.ids), self.trainer.max_epochs, getattr(settings.sampler, "count", None)
        if count is not None and rounds is not None and rounds >= 0:
            most = min(most, rounds * count(most))
        chosen = "disk" if size * most > MEMORY_LIMIT else "memory"
        if chosen == "disk":
            rank_zero_info(
                f"Client states go to disk: {most:,} of {size:,} bytes are {size * most / 2**20:,.1f} MiB, above the"
                f" limit of {MEMORY_LIMIT / 2**20:,.0f} MiB."
            )
        return chosen

    def _choose_folder(self) -> Path:
        """Return the folder, identical in all processes."""
        trainer = self.trainer
        beside = next((path for c in trainer.checkpoint_callbacks if (path := getattr(c, "dirpath", None))), None)
        parent = beside or trainer.log_dir or trainer.default_root_dir  # log_dir is broadcast: all processes read it
        chosen = str(self.wanted_folder or os.path.join(parent, FOLDER))
        if "://" in chosen:
            raise FederatedError(
                f"Client states cannot be kept in {chosen!r}: checkpoints are not on a file system of this machine."
                " Give a local folder with client_states_dir, or set client_states='memory'."
            )
        return Path(os.path.abspath(trainer.strategy.broadcast(chosen)))

    def _make_store(self, server: Server, folder: StoreFolder) -> DiskClientStore:
        self._run = self._from_rank_zero(lambda: secrets.token_hex(8))
        _RUNS.add(self._run)
        if not folder.path.is_dir():
            raise FederatedError(
                f"client_states_dir={str(folder.path)!r} is not seen by all processes. Give a folder on a file system"
                " that they share."
            )
        rank = self.trainer.global_rank
        store = DiskClientStore(folder.path, f"{self._run}-{rank:04d}")
        _clean_after(store, rank, is_shared=self.trainer.world_size > 1)
        return store

    def _from_rank_zero(self, work: Callable[[], Result]) -> Result:
        """Run a function on rank zero; return its result, or raise its error, in all processes."""
        strategy, result, failure = self.trainer.strategy, None, None
        if self.trainer.is_global_zero:
            try:
                result = work()
            except FederatedError as error:
                failure = str(error)
        result, failure = strategy.broadcast((result, failure))
        if failure is not None:
            raise FederatedError(failure)
        return result  # type: ignore[return-value]

    def load(self, server: Server, saved: Mapping[Any, Any], ranks: Ranks) -> None:
        """Load a checkpoint's client states from the checkpoint or its store into the server's store."""
        clients = server.clients
        if not is_reference(saved):
            clients.load_state_dict(saved, ranks.owns)
            return
        source, shards = Path(saved["path"]), shards_of(saved)
        if not isinstance(clients, DiskClientStore):
            clients.load_state_dict(read_version(source, shards, ranks.rank, ranks.size))
            return
        folder = self._folder
        assert folder is not None
        if source.samefile(folder.path):
            self._from_rank_zero(lambda: folder.register(saved, Path(saved["checkpoint"])))
        clients.load_version(source, shards, ranks.rank, ranks.size)

    def resolved(self, saved: Any) -> Any:
        """Return a checkpoint's client states, or its reference to them with absolute paths."""
        if not is_reference(saved):
            return saved
        path = Path(os.path.abspath(str(self.trainer.ckpt_path)))
        return {**saved, "path": str(_find_store(saved, path)), "checkpoint": str(path)}

    def record(self, server: Server, ranks: Ranks) -> Any:
        """Return a checkpoint's entry for client states, on rank zero: a reference, or all states."""
        clients, folder = server.clients, self._folder
        if not isinstance(clients, DiskClientStore) or self.checkpoint is None:
            parts = ranks.gather_at_zero(clients.state_dict())
            return dict(sorted((i, state) for part in parts for i, state in part.items()))
        if not self.trainer.is_global_zero and ranks.size == 1:
            return {}  # all processes have the same states, and the first one writes
        assert folder is not None
        self._versions += 1
        name = folder.newest = f"{self._run}-{self._versions:06d}"  # identical in all processes
        folder.written += 1
        shards = ranks.gather_at_zero(clients.record(name, relative(self.checkpoint, folder.path)))
        if not self.trainer.is_global_zero:
            return {}
        return self._refer_to(folder, {"version": name, "shards": [list(shard) for shard in shards]})

    def copied(self, saved: Mapping[str, Any]) -> Any:
        """Return a loaded checkpoint's entry for client states, for another checkpoint of the same round."""
        states = saved["client_states"]
        if not is_reference(states) or not self.trainer.is_global_zero:
            return states
        folder = StoreFolder(Path(states["path"]))
        if self.checkpoint is None:
            return read_version(folder.path, shards_of(states))
        self._hold(folder)
        folder.register(states, self.checkpoint)
        return self._refer_to(folder, states)

    def _refer_to(self, folder: StoreFolder, version: Reference) -> Reference:
        """Return the reference to a version, for the checkpoint being written."""
        assert self.checkpoint is not None
        path = relative(folder.path, self.checkpoint.parent)
        return {"format": _FORMAT, "path": path, "version": version["version"], "shards": version["shards"]}

    @contextmanager
    def writing(self, checkpoint: str | os.PathLike[str]) -> Iterator[None]:
        """Let a checkpoint written inside refer to its states, and collect garbage afterwards."""
        folder, path = self._folder, os.fspath(checkpoint)
        self.checkpoint = None if "://" in path else Path(os.path.abspath(path))
        try:
            with self._locks:
                if folder is not None and self.trainer.is_global_zero:
                    self._hold(folder)
                yield
                if folder is not None:
                    if isinstance(saving := self.trainer.strategy.checkpoint_io, pl.plugins.AsyncCheckpointIO):
                        saving.teardown()  # wait for the file: otherwise its states would count as garbage
                    folder.collect_if_due(self.trainer.global_rank)
        finally:
            self.checkpoint = None

    def _hold(self, folder: StoreFolder) -> None:
        """Lock a folder until the checkpoint exists, since a version without one would be deleted."""
        folder.acquire()
        self._locks.callback(folder.lock.release)

    def close(self, clients: ClientStore | None) -> None:
        """End a fit: discard an incomplete round, delete unneeded data, and unlock the folder."""
        folder = self._folder
        if clients is not None:
            clients.discard()
        if isinstance(clients, DiskClientStore):
            clients.index.close()
        if folder is None or not folder.lock.is_locked:
            return
        if self.trainer.world_size == 1 and isinstance(clients, DiskClientStore):
            folder.collect(rank=0)
        folder.lock.release()
