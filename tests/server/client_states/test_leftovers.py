"""What goes when a store of client states is gone, where several processes have stores in one folder."""

from pathlib import Path

import pytest
import torch

from lightning_fed.server.client_states.disk_store import DiskClientStore
from lightning_fed.server.client_states.leftovers import clean_after, note_run
from lightning_fed.server.client_states.versions import StoreFolder

MINE, OTHER, KILLED = (f"00000{n}-0000000{n}" for n in (2, 3, 1))


def store(folder: Path, prefix: str, rank: int = 0) -> DiskClientStore:
    """Return a store that has written one segment; this process cleans up after it only when told to."""
    made = DiskClientStore(folder, prefix, 9, torch.device("cpu"), rank)
    made.stage(rank, {"c": torch.ones(3)})
    made.commit()
    return made


@pytest.fixture(autouse=True)
def _runs() -> None:
    note_run(MINE)
    note_run(OTHER)


def test_a_process_removes_its_own_segments_and_those_of_killed_runs(tmp_path: Path) -> None:
    first, second = store(tmp_path, MINE), store(tmp_path, MINE, rank=1)  # the second is another process's
    store(tmp_path, KILLED, rank=1)
    clean_after(first, is_shared=True)
    del first
    assert StoreFolder(tmp_path).segments() == set(second.needed)
    clean_after(second, is_shared=True)
    del second
    assert not StoreFolder(tmp_path).segments()


def test_while_a_store_lives_what_its_other_processes_need_stays(tmp_path: Path) -> None:
    first, second, gone = store(tmp_path, MINE), store(tmp_path, MINE, rank=1), store(tmp_path, OTHER)
    loaded = store(tmp_path, KILLED, rank=1)  # of a run that this one goes on from, for the second process
    clean_after(first, is_shared=True)
    clean_after(gone, is_shared=True)
    del gone
    assert StoreFolder(tmp_path).segments() == {*first.needed, *second.needed, *loaded.needed}


def test_a_single_process_knows_what_is_needed(tmp_path: Path) -> None:
    alive, gone = store(tmp_path, MINE), store(tmp_path, OTHER)
    store(tmp_path, KILLED, rank=1)
    clean_after(alive, is_shared=False)
    clean_after(gone, is_shared=False)
    del gone
    assert StoreFolder(tmp_path).segments() == set(alive.needed)


def test_processes_that_end_together_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = store(tmp_path, MINE, rank=1)
    clean_after(ended, is_shared=True)
    other, waited = StoreFolder(tmp_path), []
    monkeypatch.setattr("filelock._api.time.sleep", lambda seconds: (waited.append(seconds), other.release()))
    other.acquire()
    del ended
    assert waited
    assert not other.segments()
