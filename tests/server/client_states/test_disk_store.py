"""Client states on disk: committed states survive, costs depend on the touched states, and old states make room."""

import errno
import gc
import io
import multiprocessing
import os
import shutil
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from lightning_fed.core.errors import FederatedError
from lightning_fed.server.client_states import disk_store
from lightning_fed.server.client_states.disk_store import DiskClientStore, Index, Shard, read_version
from tests.helpers.processes import HANGS


def name(run: int, rank: int = 0) -> str:
    return f"{run:016x}-{rank:04d}"


def store(folder: Path, run: int = 1, rank: int = 0) -> DiskClientStore:
    return DiskClientStore(folder, name(run, rank))


def put(kept: DiskClientStore, states: dict[int, float], size: int = 3) -> None:
    for index, value in states.items():
        kept.stage(index, {"c_i": torch.full((size,), value)})
    kept.commit()


def values(kept: DiskClientStore) -> dict[int, float]:
    return {index: float(state["c_i"][0]) for index, state in kept.state_dict().items()}


def files(folder: Path) -> dict[Path, int]:
    return {file: file.stat().st_size for file in folder.rglob("*") if file.is_file()}


def recorded(kept: DiskClientStore, version: str = "a") -> list[Shard]:
    return [kept.record(version, f"../{version}.ckpt")]


def reopened(folder: Path, shards: Sequence[Shard], run: int = 2) -> DiskClientStore:
    """Return a new store with a version's states, and remove the store of an earlier call."""
    shutil.rmtree(folder / name(run), ignore_errors=True)
    kept = store(folder, run)
    kept.load_version(folder, shards)
    return kept


# ------------------------------------------------------------------ committed states


def test_version_is_kept_until_trimmed(tmp_path: Path) -> None:
    kept = store(tmp_path)
    put(kept, {0: 1.0, 1: 2.0})
    first = recorded(kept, "a")
    put(kept, {1: 3.0})
    second = recorded(kept, "b")
    for value in (4.0, 5.0):  # the second one replaces a state that no version has
        put(kept, {0: value})
    for wanted in ({"a", "b"}, {"b"}, set()):
        kept.index.trim(wanted)
        assert {name for name, _ in kept.index.versions()} == wanted
        assert values(kept) == {0: 5.0, 1: 3.0}
        if "a" in wanted:
            assert values(reopened(tmp_path, first)) == {0: 1.0, 1: 2.0}
        if "b" in wanted:
            assert values(reopened(tmp_path, second)) == {0: 1.0, 1: 3.0}
        left = {file.name for file in kept.index.folder.glob("*.states")}
        assert left == ({"1.states", "2.states", "4.states"} if wanted else {"2.states", "4.states"})


def test_trimming_an_unused_shard_keeps_only_wanted_versions(tmp_path: Path) -> None:
    kept = store(tmp_path)
    for number in range(3):
        put(kept, {0: float(number)})
        shards = recorded(kept, f"{number}")
    put(kept, {0: 9.0})
    kept.stage(1, {"c_i": torch.ones(3)})
    assert (kept.index.folder / "5.states").exists()
    kept.index.close()
    Index(kept.index.folder).trim({"0", "2"})
    assert {file.name for file in kept.index.folder.glob("*.states")} == {"1.states", "3.states"}
    assert values(reopened(tmp_path, shards)) == {0: 2.0}


@pytest.mark.thorough
def test_torn_writes_after_the_last_version_are_recoverable(tmp_path: Path) -> None:
    kept = store(tmp_path)
    put(kept, {0: 1.0, 1: 2.0})
    shards, committed = recorded(kept), set(files(tmp_path))
    put(kept, {1: 3.0, 2: 4.0})
    kept.stage(3, {"c_i": torch.ones(3)})
    later = {file: file.read_bytes() for file in files(tmp_path) if file not in committed or file.name.endswith("-wal")}
    assert {file.name for file in later} == {"2.states", "3.states", "index.sqlite-wal"}
    copy, stream = tmp_path / "copy", np.random.default_rng(0)
    for _ in range(30):
        shutil.copytree(kept.index.folder, copy / kept.name)
        for file, data in later.items():
            end = int(stream.integers(0, len(data) + 1))
            (copy / kept.name / file.name).write_bytes(data[:end] + stream.bytes(int(stream.integers(0, 9))))
        again = store(copy, 2)
        again.load_version(copy, shards)
        assert values(again) == {0: 1.0, 1: 2.0}
        put(again, {2: 5.0})
        assert values(again) == {0: 1.0, 1: 2.0, 2: 5.0}
        again.index.close()
        shutil.rmtree(copy)


def test_torn_or_missing_committed_files_are_rejected(tmp_path: Path) -> None:
    kept = store(tmp_path)
    put(kept, {0: 1.0, 1: 2.0})
    shards = recorded(kept)
    kept.index.close()
    for file, size in files(tmp_path).items():
        data = file.read_bytes()
        for end in (0, 1, size // 2, *([size - 1] if file.suffix == ".states" else [])):
            file.write_bytes(data[:end])
            with pytest.raises(FederatedError, match=f"{file.name}.* is damaged"):
                reopened(tmp_path, shards)
            with pytest.raises(FederatedError, match=f"{file.name}.* is damaged"):
                read_version(tmp_path, shards)
        file.unlink()
        with pytest.raises(FederatedError, match=f"{file.name}.* cannot be read.*Copy the whole folder"):
            reopened(tmp_path, shards)
        file.write_bytes(data)
    assert values(reopened(tmp_path, shards)) == {0: 1.0, 1: 2.0}


def test_flipped_bits_are_detected_or_harmless(tmp_path: Path) -> None:
    kept = store(tmp_path)
    put(kept, {0: 1.0, 1: 2.0})
    put(kept, {1: 3.0})
    shards, found = recorded(kept), 0
    kept.index.close()
    for file, size in files(tmp_path).items():
        data = file.read_bytes()
        used = [at for at in range(size) if data[at]]  # the pages of an index are mostly empty
        for at in used[:: 3 if file.suffix == ".states" else 16]:
            file.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
            try:
                states = read_version(tmp_path, shards)
            except FederatedError as error:
                assert "damaged" in str(error) or "cannot be" in str(error)  # noqa: PT017
                found += 1
            else:
                assert {i: state["c_i"].tolist() for i, state in states.items()} == {0: [1.0] * 3, 1: [3.0] * 3}
        file.write_bytes(data)
    assert found > 80


def test_modified_index_does_not_restore_an_older_state(tmp_path: Path) -> None:
    kept = store(tmp_path)
    put(kept, {1: 1.0})
    recorded(kept, "a")
    put(kept, {1: 2.0})
    shards = recorded(kept, "b")
    kept.index.close()
    db = sqlite3.connect(tmp_path / kept.name / kept.index.path.name)
    for change in ("DELETE FROM states WHERE until IS NULL", "UPDATE states SET until = NULL"):
        db.execute(change)
        db.commit()
        with pytest.raises(FederatedError, match="index.sqlite is damaged: it is not what was written there"):
            reopened(tmp_path, shards)
    db.close()


class Full(io.FileIO):
    """A file on a disk that is full after a few more bytes."""

    left = 20

    def write(self, data: memoryview) -> int:
        if not self.left:
            raise OSError(28, "No space left on device")
        done = super().write(data[: self.left])
        self.left -= done
        return done


def test_full_disk_keeps_the_last_version_intact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = store(tmp_path)
    put(kept, {0: 1.0, 1: 2.0})
    shards = recorded(kept)
    with monkeypatch.context() as patched:
        patched.setattr(disk_store, "open", lambda path, _: io.BufferedWriter(Full(path, "a")), raising=False)
        with pytest.raises(FederatedError, match="cannot be written to .*2.states.*No space left on device.*make room"):
            put(kept, {1: 3.0, 2: 4.0})
    put(kept, {1: 3.0})  # appends after the partial write
    assert values(kept) == {0: 1.0, 1: 3.0}
    put(kept, {1: 2.0})
    pages = kept.index.connect().execute("PRAGMA page_count").fetchone()[0]
    kept.index.connect().execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(FederatedError, match=r"cannot be written to .*index.sqlite.*disk is full.*make room"):
        put(kept, dict.fromkeys(range(2000), 3.0))
    kept.discard()
    assert values(kept) == {0: 1.0, 1: 2.0}
    assert values(reopened(tmp_path, shards)) == {0: 1.0, 1: 2.0}
    kept.index.connect().execute("PRAGMA max_page_count = 1000000")
    put(kept, {1: 3.0, 2: 4.0})
    assert values(kept) == {0: 1.0, 1: 3.0, 2: 4.0}


def test_full_disk_is_not_reported_as_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    kept = store(tmp_path)
    put(kept, {0: 1.0})
    shards = recorded(kept)
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(FederatedError, match=r"index\.sqlite cannot be copied: No space left .*Make room in /.*"):
        read_version(tmp_path, shards)


def test_single_round_version_is_flushed_without_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    kept = store(tmp_path)
    put(kept, {0: 1.0})
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert recorded(kept)[0].clients == 1


def test_discarded_round_leaves_no_bytes_on_disk(tmp_path: Path) -> None:
    kept = store(tmp_path)
    put(kept, {0: 1.0})
    before = files(tmp_path)
    kept.stage(1, {"c_i": torch.ones(99)})
    kept.discard()
    assert files(tmp_path) == before
    kept.commit()
    assert values(kept) == {0: 1.0}


def test_each_file_is_flushed_once_before_its_version_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, flushed = store(tmp_path), []
    monkeypatch.setattr(disk_store, "_flush", lambda path: flushed.append((path.name, len(kept.index.versions()))))
    for number in range(2):
        put(kept, {number: 1.0})
        put(kept, {2: 1.0})
        recorded(kept, f"{number}")
    recorded(kept, "again")
    assert sorted(flushed) == [("1.states", 0), ("2.states", 0), ("3.states", 1), ("4.states", 1)]  # in any order


def test_processes_load_their_own_clients_from_all_shards(tmp_path: Path) -> None:
    shards = []
    for rank in (0, 1):
        kept = store(tmp_path, rank=rank)
        put(kept, {i: float(i) for i in range(rank, 6, 2)})
        put(kept, {2 + rank: 9.0})
        shards += recorded(kept)
    for rank, mine in ((0, {0: 0.0, 3: 9.0}), (1, {1: 1.0, 4: 4.0}), (2, {2: 9.0, 5: 5.0})):
        own = store(tmp_path, 2, rank=rank)
        own.load_version(tmp_path, shards, rank, 3)
        assert values(own) == mine


def test_states_are_copied_if_hard_links_are_unsupported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    kept = store(tmp_path)
    put(kept, {0: 1.0})
    shards = recorded(kept)
    monkeypatch.setattr(os, "link", none)
    again = reopened(tmp_path, shards)
    recorded(again)
    shutil.rmtree(tmp_path / kept.name)
    assert values(again) == {0: 1.0}


@pytest.mark.thorough
@settings(phases=[Phase.generate])  # skip shrinking: each example writes to disk, so it would take minutes
@given(
    st.lists(st.dictionaries(st.integers(0, 9), st.integers(0, 999), max_size=5), min_size=1, max_size=12),
    st.integers(64, 6000),
    st.integers(1, 4),
    st.data(),
)
def test_versions_are_not_modified_by_later_rounds(
    tmp_path_factory: pytest.TempPathFactory,
    rounds: list[dict[int, int]],
    rewrite: int,
    many: int,
    choice: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskClientStore, "rewrite_bytes", rewrite)
        patch.setattr(disk_store, "_SMALL_FILES", many)
        kept = store(folder)
        now: dict[int, float] = {}
        versions = {}
        for number, states in enumerate(rounds):
            if choice.draw(st.booleans()):
                kept.stage(choice.draw(st.integers(0, 9)), {"c_i": torch.zeros(2)})
                kept.discard()
            put(kept, states)
            now |= states
            assert values(kept) == now
            assert len(kept) == len(now)
            if choice.draw(st.booleans()):
                versions[f"{number}"] = (recorded(kept, f"{number}"), dict(now))
            if versions and choice.draw(st.integers(0, 3)) == 0:  # continue as another run, from any version so far
                shards, now = choice.draw(st.sampled_from(list(versions.values())))
                now = dict(now)
                kept.index.close()
                kept = store(folder, number + 2)
                kept.load_version(folder, shards)
        if versions:  # delete some checkpoints
            left = set(choice.draw(st.lists(st.sampled_from(list(versions)), unique=True)))
            for path in folder.iterdir():
                index = kept.index if path.name == kept.name else Index(path)
                index.trim(left)
                index.close()
            assert values(kept) == now
            for version in left:
                shards, then = versions[version]
                assert values(reopened(folder, shards, 99)) == then
                assert {i: float(s["c_i"][0]) for i, s in read_version(folder, shards).items()} == then


# ------------------------------------------------------------------ other processes and stores


@pytest.mark.thorough
def test_forked_process_does_not_touch_the_parents_index(tmp_path: Path) -> None:
    kept = store(tmp_path)
    put(kept, {0: 1.0})
    held = [kept]

    def drop() -> None:
        with pytest.raises(FederatedError, match="locked"):
            held[0].get(0)
        held.clear()
        gc.collect()

    kept.index.patience = 0.0
    log = kept.index.path.with_name(f"{kept.index.path.name}-wal")
    before = log.stat()
    process = multiprocessing.get_context("fork").Process(target=drop)
    process.start()
    process.join(HANGS)
    assert process.exitcode == 0
    assert (log.stat().st_ino, log.stat().st_size) == (before.st_ino, before.st_size)
    put(kept, {0: 2.0, 1: 1.0})
    shards = recorded(kept)
    assert values(reopened(tmp_path, shards)) == {0: 2.0, 1: 1.0}


def test_states_removed_by_another_run_raise_an_error(tmp_path: Path) -> None:
    ways: list[Callable[[DiskClientStore], object]] = [
        lambda kept: kept.get(0),
        lambda kept: kept.state_dict(),
        lambda kept: kept.record("b", "../b.ckpt"),
        lambda kept: put(kept, {1: 3.0}),
    ]
    for way in ways:
        for removes in (True, False):
            kept = store(tmp_path)
            put(kept, {0: 1.0})
            recorded(kept)
            put(kept, {0: 2.0})
            kept.index.close()
            other = Index(kept.index.folder)
            other.trim({"a"})
            other.close()
            if removes:
                shutil.rmtree(kept.index.folder)
            with pytest.raises(FederatedError, match="Client states of this run are gone"):
                way(kept)
            shutil.rmtree(kept.index.folder, ignore_errors=True)


# ------------------------------------------------------------------ files from elsewhere


class Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("ran",)


def test_malicious_store_executes_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"c_i": Hostile()}, tmp_path / "payload")
    header = b'{"c_i":{"dtype":"F32","shape":[1000000],"data_offsets":[0,4]}}'
    payloads = [
        (tmp_path / "payload").read_bytes(),
        b"\xff" * 64,
        save({"c_i": torch.ones(3)})[:-4],
        len(header).to_bytes(8, "little") + header + b"\0" * 4,
        (2**40).to_bytes(8, "little") + b"{}",
    ]
    for number, payload in enumerate(payloads):
        kept = store(tmp_path, number)
        monkeypatch.setattr(disk_store, "_to_bytes", lambda state, payload=payload: payload)
        put(kept, {0: 1.0})
        with pytest.raises(FederatedError, match="holds no tensors for the client with index 0"):
            kept.get(0)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "change",
    [
        "client = -1", "client = 100", "offset = -8", "length = 0", "length = -1", "offset = 1 << 62",
        "length = 1 << 62", "file = '../../1'", "offset = 'x'", "length = x'00'", "client = 'x'", "checksum = NULL",
    ],
)  # fmt: skip
def test_index_with_invalid_entries_is_rejected(change: str, tmp_path: Path) -> None:
    kept = store(tmp_path)
    put(kept, {0: 1.0})
    (shard,) = recorded(kept)
    kept.index.close()
    db = sqlite3.connect(tmp_path / kept.name / kept.index.path.name)
    db.execute(f"UPDATE states SET {change}")
    db.commit()
    found = db.execute("SELECT COUNT(*), SUM(client + checksum) FROM states").fetchone()
    db.close()
    forged = Shard(shard.name, shard.number, found[0], found[1] or 0)
    with pytest.raises(FederatedError):
        read_version(tmp_path, [forged])
    with pytest.raises(FederatedError):
        reopened(tmp_path, [forged]).state_dict()


@pytest.mark.parametrize("content", [b"", b"SQLite format 3\0" + b"\xff" * 5000, b"x" * 5000])
def test_corrupt_index_file_is_rejected(content: bytes, tmp_path: Path) -> None:
    kept = store(tmp_path)
    put(kept, {0: 1.0})
    shards = recorded(kept)
    kept.index.close()
    kept.index.path.write_bytes(content)
    with pytest.raises(FederatedError, match=r"index.sqlite.* is damaged"):
        reopened(tmp_path, shards)


# ------------------------------------------------------------------ costs


def written(folder: Path, clients: int) -> Iterator[tuple[int, int]]:
    """Yield the number of files and bytes of states that each round of ten clients writes."""
    folder.mkdir()
    kept = store(folder)
    before: dict[Path, int] = {}
    stream = np.random.default_rng(0)
    for number in range(8):
        put(kept, {int(i): float(number) for i in stream.choice(clients, 10, replace=False)}, size=1000)
        recorded(kept, f"{number}")
        after = files(folder)
        new = {path: size for path, size in after.items() if path not in before and path.suffix == ".states"}
        yield len(new), sum(new.values())
        before = after


def test_round_cost_is_independent_of_population_size(tmp_path: Path) -> None:
    few, many = list(written(tmp_path / "few", 10**3)), list(written(tmp_path / "many", 10**6))
    assert few == many
    assert {count for count, _ in many} == {1}
    assert max(size for _, size in many) < 10 * (4 * 1000 + 150)


@pytest.mark.thorough
def test_disk_space_of_stale_states_is_reclaimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskClientStore, "rewrite_bytes", 10_000)
    kept, size = store(tmp_path), 4 * 100 + 80
    for number in range(100):  # one state of each round stays current
        put(kept, {10 + number: float(number), **{i: float(number) for i in range(9)}}, size=100)
        live = (10 + number) * size
        assert sum(size for path, size in files(tmp_path).items() if path.suffix == ".states") < 2 * live + 10_000
    assert values(kept) == {**dict.fromkeys(range(9), 99.0), **{10 + number: float(number) for number in range(100)}}


def test_small_files_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_store, "_SMALL_FILES", 8)
    kept = store(tmp_path)
    for index in range(100):
        put(kept, {index: float(index)})
        assert len(files(tmp_path)) <= 8 + 2
    assert values(kept) == {i: float(i) for i in range(100)}


@pytest.mark.thorough
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors as Linux does")
def test_few_files_are_open_and_none_after_closing(tmp_path: Path) -> None:
    gc.collect()  # closes the stores of other tests
    before = len(os.listdir("/proc/self/fd"))
    kept = store(tmp_path)
    for index in range(100):
        put(kept, {index: float(index)})
    assert values(kept) == {i: float(i) for i in range(100)}
    assert len(os.listdir("/proc/self/fd")) - before <= 3
    kept.index.close()
    assert values(kept) == {i: float(i) for i in range(100)}
    assert len(os.listdir("/proc/self/fd")) == before


def resident() -> float:
    """Return this process's resident memory in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux does")
def test_states_are_not_held_in_memory(tmp_path: Path) -> None:
    kept = store(tmp_path)
    put(kept, {0: 0.0}, size=50_000)
    before = resident()
    for start in range(0, 100_000, 1000):
        put(kept, {index: float(index) for index in range(start, start + 1000, 200)}, size=50_000)
        assert float(kept.get(start)["c_i"][-1]) == start
    assert len(kept) == 500
    assert sum(files(tmp_path).values()) > 95 * 2**20
    assert resident() - before < 10


def test_reader_handles_partial_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = store(tmp_path)
    put(kept, {0: 1.0}, size=1000)

    class Slow(io.FileIO):
        def readinto(self, buffer: memoryview) -> int:
            return super().readinto(memoryview(buffer)[:7])

    monkeypatch.setattr(disk_store, "open", lambda path, _: io.BufferedReader(Slow(path)), raising=False)
    assert values(kept) == {0: 1.0}


def test_empty_store_opens_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect, connected = Index.connect, list[Index]()

    def noted(index: Index) -> sqlite3.Connection:
        connected.append(index)
        return connect(index)

    kept = store(tmp_path)
    monkeypatch.setattr(Index, "connect", noted)
    assert kept.get(3) is None
    assert kept.get(4) is None
    assert not connected, "a method that keeps nothing asks for each of its clients"
    put(kept, {3: 1.5})
    again = reopened(tmp_path, recorded(kept))
    for one in (kept, again):
        state = one.get(3)
        assert state is not None
        assert state["c_i"].tolist() == [1.5] * 3
