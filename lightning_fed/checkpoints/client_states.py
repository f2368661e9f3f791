"""Where a run keeps its clients' states, and how checkpoints refer to them."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from lightning_fed.compat.package import pl
from lightning_fed.compat.private import rank_zero_info
from lightning_fed.core.errors import FederatedError
from lightning_fed.core.flat import FlatParameters
from lightning_fed.core.types import State
from lightning_fed.server.client_states.disk_store import DiskClientStore
from lightning_fed.server.client_states.leftovers import clean_after, needed_here, note_run
from lightning_fed.server.client_states.segments import Segment, owner
from lightning_fed.server.client_states.store import ClientStore
from lightning_fed.server.client_states.versions import (
    Reference,
    StoreFolder,
    Version,
    find_store,
    is_reference,
    relative,
)
from lightning_fed.server.server import Server
from lightning_fed.settings.settings import Settings
from lightning_fed.strategies.processes import Ranks

__all__ = ["MEMORY_LIMIT", "ClientStatesPlace"]

MEMORY_LIMIT = 2**30  # bytes of all clients' states from which on client_states="auto" keeps them on disk
FOLDER = "client_states"
Result = TypeVar("Result")


class ClientStatesPlace:
    """The place of a run's client states: memory, or files beside its checkpoints.

    With files, a checkpoint holds the name of a version and where the folder is, relative to the checkpoint.

    Args:
        trainer: The trainer.
        where: "memory", "disk" or "auto".
        folder: The folder of the files; by default ``client_states`` beside the checkpoints.
    """

    def __init__(self, trainer: pl.Trainer, where: str, folder: str | None) -> None:
        self.trainer, self.where, self.wanted_folder = trainer, where, folder
        self.checkpoint: Path | None = None  # that is being written
        self._folder: StoreFolder | None = None
        self._held = ExitStack()  # folders, while a checkpoint is written
        self._prefix = ""
        self._run: dict[str, str] = {}
        self._size = 1  # processes that share the clients
        self._fits = False
        self._unused: set[str] | None = None  # segments that no process uses, at the checkpoint that is written
        self._is_copy = False  # of a fitted trainer's place, whose states are in memory until a fit

    def __getstate__(self) -> dict[str, Any]:
        """Return a place of its own for a copy of the trainer, which may use no file of this one."""
        return {**self.__dict__, "_folder": None, "_prefix": "", "_held": ExitStack(), "_is_copy": True}

    def open(
        self, server: Server, ranks: Ranks, kept: ClientStore | None, flat: FlatParameters, settings: Settings
    ) -> None:
        """Give the server a store: the previous fit's if there was one, else an empty one.

        Args:
            server: The server's side.
            ranks: The processes that share the clients.
            kept: The store of this trainer's previous fit.
            flat: The trained parameters.
            settings: How rounds are run.

        Raises:
            FederatedError: If the folder cannot be used.
        """
        self._size, self._fits = ranks.size, True
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
                server.clients.load_state_dict(kept.state_dict(), server.x.device)
        self._is_copy = False
        named = zip(flat.names, flat.params, strict=True)
        model = {f"parameter {name}": f"{list(p.shape)} of {p.dtype}" for name, p in named}
        method = f"{type(server.algorithm).__name__} {server.algorithm.options()}"
        self._run = {"method": method, **model, "seed": str(server.seed)}

    def _choose(self, server: Server, settings: Settings) -> str:
        """Return "memory" or "disk", by what the states of all clients that may take part come to."""
        if self.where != "auto":
            return self.where
        size = _nbytes(server.new_client())
        size += 2 * (server.x.nbytes + server.personal.nbytes) if settings.keeps_solver else 0  # as Adam keeps
        size += _nbytes({name: server.buffers[name] for name in server.kept_buffers})
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
        """Return the folder, the same in all processes."""
        trainer = self.trainer
        beside = next((path for c in trainer.checkpoint_callbacks if (path := getattr(c, "dirpath", None))), None)
        parent = beside or trainer.log_dir or trainer.default_root_dir  # log_dir is exchanged: all processes ask for it
        chosen = str(self.wanted_folder or os.path.join(parent, FOLDER))
        if "://" in chosen:
            raise FederatedError(
                f"Client states cannot be kept in {chosen!r}: checkpoints are not on a file system of this machine."
                " Give a local folder with client_states_dir, or set client_states='memory'."
            )
        return Path(os.path.abspath(trainer.strategy.broadcast(chosen)))

    def _make_store(self, server: Server, folder: StoreFolder) -> DiskClientStore:
        self._prefix = prefix = self._from_rank_zero(folder.new_prefix)
        note_run(prefix)
        if not folder.path.is_dir():
            raise FederatedError(
                f"client_states_dir={str(folder.path)!r} is not seen by all processes. Give a folder on a file system"
                " that they share."
            )
        rank = self.trainer.global_rank
        store = DiskClientStore(folder.path, prefix, len(server.ids), server.x.device, rank, rank < self._size)
        clean_after(store, is_shared=self.trainer.world_size > 1)
        return store

    def _from_rank_zero(self, work: Callable[[], Result]) -> Result:
        """Do something in one process, and return what it came to, or raise what went wrong, in all."""
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

    def load(self, server: Server, saved: Mapping[Any, Any], is_mine: Callable[[int], bool]) -> None:
        """Take a checkpoint's client states, wherever they are and wherever they go.

        Raises:
            FederatedError: If they are missing, damaged, or of another run.
        """
        clients, device = server.clients, server.x.device
        if not is_reference(saved):
            clients.load_state_dict(saved, device, is_mine)
            return
        source = Path(saved["path"])
        version = StoreFolder(source).read(saved["version"])
        self._check(version, source, len(server.ids))
        segments = list(version.segments)
        if not isinstance(clients, DiskClientStore):
            clients.load_state_dict(_read_all(source, version, is_mine), device)
            return
        folder = self._folder
        assert folder is not None

        def take_over() -> str:
            if source.samefile(folder.path):
                folder.register(saved["version"], Path(saved["checkpoint"]))
            else:
                folder.adopt(source, segments)
            return folder.new_prefix(segments)

        self._prefix = clients.prefix = self._from_rank_zero(take_over)
        note_run(self._prefix)
        clients.load_segments(segments, is_mine)

    def _check(self, version: Version, folder: Path, clients: int) -> None:
        """Refuse states of another run, or of another number of clients."""
        for name in sorted({*version.run, *self._run}):
            if version.run.get(name) != self._run.get(name):
                raise FederatedError(
                    f"The client states in {folder} belong to another run: their {name} is {version.run.get(name)},"
                    f" this run's is {self._run.get(name)}. Resume with what they were made with."
                )
        if version.clients != clients:
            raise FederatedError(
                f"The client states in {folder} are of {version.clients:,} clients, this run has {clients:,}."
            )

    def resolved(self, saved: Any) -> Any:
        """Return a checkpoint's client states, or where they are whatever is the working directory.

        Raises:
            FederatedError: If the checkpoint's store is missing.
        """
        if not is_reference(saved):
            return saved
        path = Path(os.path.abspath(str(self.trainer.ckpt_path)))
        folder = find_store(saved, path)
        return {"path": str(folder), "version": str(saved["version"]), "checkpoint": str(path)}

    def record(self, server: Server, ranks: Ranks) -> Any:
        """Return what a checkpoint holds of the client states, on rank zero: a reference, or all of them."""
        clients = server.clients
        if not isinstance(clients, DiskClientStore) or self.checkpoint is None:
            parts = ranks.gather_at_zero(clients.state_dict())
            return dict(sorted((i, state) for part in parts for i, state in part.items()))
        if not self.trainer.is_global_zero and ranks.size == 1:
            return {}  # all processes have the same states, and the first one writes
        parts = ranks.gather_at_zero((clients.segments(), clients.needed))
        if not self.trainer.is_global_zero:
            return {}
        segments = {segment for of_rank, _ in parts for segment in of_rank}
        # also those that hold nothing yet but what is staged: no version refers to them, and they are being written
        needed = {name for _, of_rank in parts for name in of_rank}
        folder = self._folder
        assert folder is not None
        if missing := [s.name for s in segments if not (folder.path / f"{s.name}.states").exists()]:
            raise FederatedError(
                f"Client states of this run are gone: {missing[0]}.states is missing in {folder.path}. Another run that"
                " was started there since has removed what no checkpoint needed."
            )
        ordered = tuple(sorted(segments, key=lambda segment: segment.name))
        reference = self._write(folder, server.round, self._run, len(server.ids), ordered)
        # asked here, where all processes wait for the checkpoint: later, others may be at the next round's segments
        # segments of a process that keeps states for itself are of no version, and are its own
        owners = {name: owner(name) for name in folder.segments() - needed - needed_here(folder.path)}
        self._unused = {n for n, (run, rank) in owners.items() if run != self._prefix or rank < self._size}
        return reference

    def copied(self, saved: Mapping[str, Any]) -> Any:
        """Return for another checkpoint of the same round what a loaded one holds of the client states."""
        states = saved["client_states"]
        if not is_reference(states) or not self.trainer.is_global_zero:
            return states
        folder = StoreFolder(Path(states["path"]))
        version = folder.read(states["version"])
        if self.checkpoint is None:
            return _read_all(folder.path, version)
        self._hold(folder)
        return self._write(folder, saved["round"], version.run, version.clients, version.segments)

    def _write(
        self, folder: StoreFolder, round: int, run: Mapping[str, str], clients: int, segments: tuple[Segment, ...]
    ) -> Reference:
        """Write a version for the checkpoint that is being written, and return the reference to it."""
        assert self.checkpoint is not None
        version = Version((relative(self.checkpoint, folder.path),), run, clients, segments)
        return {"path": relative(folder.path, self.checkpoint.parent), "version": folder.write(round, version)}

    @contextmanager
    def writing(self, checkpoint: str | os.PathLike[str]) -> Iterator[None]:
        """Let a checkpoint that is written inside refer to its states, and afterwards let go what none needs."""
        folder, path = self._folder, os.fspath(checkpoint)
        self.checkpoint, self._unused = None if "://" in path else Path(os.path.abspath(path)), None
        try:
            with self._held:
                if folder is not None and not self._fits and self.trainer.is_global_zero:
                    self._hold(folder)
                yield
                if folder is not None and self._unused is not None:
                    folder.collect_if_due(self._unused)
        finally:
            self.checkpoint = None

    def _hold(self, folder: StoreFolder) -> None:
        """Keep others out of a folder until the checkpoint is there: a version without one would be removed."""
        folder.acquire()
        self._held.callback(folder.release)

    def close(self, clients: ClientStore | None) -> None:
        """End a fit: forget a round that is not complete, remove what is needed no longer, and let other runs in."""
        folder, self._fits = self._folder, False
        if clients is not None:
            clients.discard()
        if isinstance(clients, DiskClientStore):
            clients.rest()
        if folder is None or not folder.is_mine:
            return
        if self.trainer.world_size == 1 and isinstance(clients, DiskClientStore):
            folder.collect(folder.segments() - needed_here(folder.path))
        folder.release()


def _nbytes(state: State) -> int:
    return sum(value.nbytes for value in state.values())


def _read_all(folder: Path, version: Version, is_mine: Callable[[int], bool] = lambda index: True) -> dict[int, State]:
    """Return a version's states, in memory."""
    store = DiskClientStore(folder, "", version.clients, torch.device("cpu"))
    store.load_segments(list(version.segments), is_mine)
    return store.state_dict()
