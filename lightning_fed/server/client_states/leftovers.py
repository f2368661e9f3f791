"""What is removed when a store of client states is gone: each process clears away what it has written itself."""

import os
import weakref
from pathlib import Path

from lightning_fed.core.errors import FederatedError
from lightning_fed.server.client_states.disk_store import DiskClientStore
from lightning_fed.server.client_states.segments import owner
from lightning_fed.server.client_states.versions import StoreFolder

__all__ = ["clean_after", "needed_here", "note_run"]

_PATIENCE = 1.0  # seconds that processes which end at one time wait for each other

_STORES: dict[object, "weakref.ref[DiskClientStore]"] = {}  # of this process
_RUNS: set[str] = set()  # prefixes of the segments of all fits that this process had a part in


def note_run(prefix: str) -> None:
    """Take note of the start of the names of a fit's segments, which its other processes clear away themselves."""
    _RUNS.add(prefix)


def clean_after(store: DiskClientStore, is_shared: bool) -> None:
    """Remove, when a store is gone, what neither checkpoints nor this process's other stores need.

    Segments of other processes of the run are left to these, whose stores may live longer. Those of other runs, which
    may have been killed, are removed by the first process. Nothing is removed while a run is at work in the folder.

    Args:
        store: A store of this process.
        is_shared: Whether other processes of the run have stores in the folder too.
    """
    key = object()
    _STORES[key] = weakref.ref(store)
    weakref.finalize(store, _clean, store.folder, store.rank, is_shared, key, os.getpid())


def needed_here(path: Path) -> set[str]:
    """Return the names of the segments in a folder that stores of this process use."""
    return {name for store in _stores_in(path) for name in store.needed}


def _stores_in(path: Path) -> list[DiskClientStore]:
    return [store for ref in _STORES.values() if (store := ref()) is not None and store.folder == path]


def _clean(path: Path, rank: int, is_shared: bool, key: object, process: int) -> None:
    if process != os.getpid():  # a forked child drops its copy of the store: the parent's may live on
        return
    _STORES.pop(key, None)
    folder = StoreFolder(path)
    folder.patience = _PATIENCE if is_shared else 0.0
    if not path.is_dir():
        return
    try:
        folder.acquire()
    except FederatedError:
        return
    needed = needed_here(path)
    # other processes may have loaded what this one's stores need not
    clears_others = rank == 0 and not (is_shared and _stores_in(path))
    folder.collect(name for name in folder.segments() - needed if _may_go(name, rank, clears_others))
    folder.release()


def _may_go(segment: str, rank: int, clears_others: bool) -> bool:
    """Whether a segment is for this process to remove: its own, or of another run where it clears these too."""
    prefix, writer = owner(segment)
    return writer == rank if prefix in _RUNS else clears_others
