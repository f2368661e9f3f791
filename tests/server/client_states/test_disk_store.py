"""Client states on disk: what was committed survives anything, costs what is touched, and old states make room."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from lightning_fed.core.errors import FederatedError
from lightning_fed.server.client_states import segments
from lightning_fed.server.client_states.disk_store import DiskClientStore
from lightning_fed.server.client_states.segments import ENTRY, Segment, SegmentWriter
from lightning_fed.server.client_states.versions import StoreFolder, Version, find_store

CPU = torch.device("cpu")
PREFIX = "000001-00000000"


def store(folder: Path, prefix: str = PREFIX, clients: int = 100, **kwargs: object) -> DiskClientStore:
    return DiskClientStore(folder, prefix, clients, CPU, **kwargs)


def put(kept: DiskClientStore, states: dict[int, float], size: int = 3) -> None:
    for index, value in states.items():
        kept.stage(index, {"c_i": torch.full((size,), value)})
    kept.commit()


def values(kept: DiskClientStore) -> dict[int, float]:
    return {index: float(state["c_i"][0]) for index, state in kept.state_dict().items()}


def files(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.iterdir()}


def reopened(folder: Path, parts: list[Segment], prefix: str = "000002-00000000") -> DiskClientStore:
    kept = store(folder, prefix)
    kept.load_segments(parts)
    return kept


# ------------------------------------------------------------------ what was committed stays


@given(
    st.lists(st.dictionaries(st.integers(0, 9), st.integers(0, 999), max_size=5), min_size=1, max_size=12),
    st.integers(1, 600),
    st.data(),
)
def test_every_version_stays_as_it_was_whatever_comes_later(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[dict[int, int]], segment: int, choice: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("store")
    kept = store(folder)
    kept.segment_bytes = segment
    now: dict[int, float] = {}
    versions = []
    for number, states in enumerate(rounds):
        if choice.draw(st.booleans()):
            kept.stage(choice.draw(st.integers(0, 9)), {"c_i": torch.zeros(2)})
            kept.discard()
        put(kept, states)
        now |= states
        assert values(kept) == now
        assert len(kept) == len(now)
        versions.append((kept.segments(), dict(now)))
        if choice.draw(st.integers(0, 3)) == 0:  # go on as another run, from any version so far
            parts, now = choice.draw(st.sampled_from(versions))
            now = dict(now)
            kept = reopened(folder, parts, f"{number + 2:06d}-00000000")
            kept.segment_bytes = segment
    for parts, then in versions:
        assert values(reopened(folder, parts)) == then


def test_what_follows_the_last_version_may_be_torn_anywhere(tmp_path: Path) -> None:
    kept = store(tmp_path)
    put(kept, {0: 1.0, 1: 2.0})
    parts, committed = kept.segments(), files(tmp_path)
    put(kept, {1: 3.0, 2: 4.0})
    kept.stage(3, {"c_i": torch.ones(3)})
    whole = {name: (tmp_path / name).read_bytes() for name in committed}
    stream = np.random.default_rng(0)
    for _ in range(50):
        for name, data in whole.items():
            end = int(stream.integers(committed[name], len(data) + 1))
            (tmp_path / name).write_bytes(data[:end] + stream.bytes(int(stream.integers(0, 9))))
        again = reopened(tmp_path, parts, f"{2 + _:06d}-00000000")
        assert values(again) == {0: 1.0, 1: 2.0}
        put(again, {2: 5.0})
        assert values(again) == {0: 1.0, 1: 2.0, 2: 5.0}


def test_what_was_committed_may_not_be_torn(tmp_path: Path) -> None:
    kept = store(tmp_path)
    put(kept, {0: 1.0, 1: 2.0})
    parts, committed = kept.segments(), files(tmp_path)
    for name, size in committed.items():
        data = (tmp_path / name).read_bytes()
        for end in (0, 1, size // 2, size - 1):
            (tmp_path / name).write_bytes(data[:end])
            with pytest.raises(FederatedError, match=f"{name}.* is damaged"):
                reopened(tmp_path, parts)
        (tmp_path / name).unlink()
        with pytest.raises(FederatedError, match=f"{name}.* cannot be read.*Copy the whole folder"):
            reopened(tmp_path, parts)
        (tmp_path / name).write_bytes(data)
    assert values(reopened(tmp_path, parts)) == {0: 1.0, 1: 2.0}


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    kept = store(tmp_path)
    put(kept, {0: 1.0, 1: 2.0})
    parts = kept.segments()
    for name, size in files(tmp_path).items():
        data = (tmp_path / name).read_bytes()
        for at in range(0, size, 5):
            (tmp_path / name).write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
            with pytest.raises(FederatedError, match=r"damaged"):
                reopened(tmp_path, parts).state_dict()
        (tmp_path / name).write_bytes(data)


def test_a_changed_index_does_not_bring_an_older_state_back(tmp_path: Path) -> None:
    kept = store(tmp_path)
    put(kept, {1: 1.0})
    put(kept, {1: 2.0})
    parts = kept.segments()
    (index,) = tmp_path.glob("*.index")
    entries = np.frombuffer(index.read_bytes(), dtype=ENTRY).copy()
    entries["client"][1] = 5
    index.write_bytes(entries.tobytes())
    with pytest.raises(FederatedError, match=r"index is damaged: it is not what was written there"):
        reopened(tmp_path, parts)


def test_a_full_disk_leaves_the_last_version_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = store(tmp_path)
    put(kept, {0: 1.0, 1: 2.0})
    parts = kept.segments()

    class Full:
        """A file that takes a few bytes more and then none."""

        def __init__(self, file: object) -> None:
            self.file, self.left = file, 20

        def write(self, data: memoryview) -> int:
            if not self.left:
                raise OSError(28, "No space left on device")
            done = self.file.write(data[: self.left])
            self.left -= done
            return done

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

    for name in ("_states", "_index"):
        with monkeypatch.context() as patched:
            patched.setattr(kept._writer, name, Full(getattr(kept._writer, name)))
            with pytest.raises(FederatedError, match="cannot be written to .*No space left on device.*make room"):
                put(kept, {1: 3.0, 2: 4.0})
        kept.discard()
        assert values(kept) == {0: 1.0, 1: 2.0}
        assert values(reopened(tmp_path, parts)) == {0: 1.0, 1: 2.0}
    put(kept, {1: 3.0, 2: 4.0})
    assert values(kept) == {0: 1.0, 1: 3.0, 2: 4.0}


def test_a_discarded_round_leaves_no_bytes(tmp_path: Path) -> None:
    kept = store(tmp_path)
    put(kept, {0: 1.0})
    before = files(tmp_path)
    kept.stage(1, {"c_i": torch.ones(99)})
    kept.discard()
    assert files(tmp_path) == before


def test_a_process_takes_its_own_clients_alone(tmp_path: Path) -> None:
    kept = store(tmp_path)
    put(kept, {i: float(i) for i in range(6)})
    put(kept, {3: 9.0, 4: 9.0})
    parts = kept.segments()
    for rank, mine in ((0, {0: 0.0, 2: 2.0, 4: 9.0}), (1, {1: 1.0, 3: 9.0, 5: 5.0})):
        own = store(tmp_path, "000002-00000000", rank=rank)
        own.load_segments(parts, lambda index, rank=rank: index % 2 == rank)
        assert values(own) == mine


# ------------------------------------------------------------------ files from elsewhere


class Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("ran",)


def test_a_hostile_store_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        writer = SegmentWriter(tmp_path, f"{PREFIX}-0000-{number:06d}")
        writer.commit(np.array([writer.append(0, payload)], dtype=ENTRY))
        with pytest.raises(FederatedError, match="holds no tensors for the client with index 0"):
            reopened(tmp_path, [writer.committed]).get(0)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("entry", [(-1, 0, 1, 0), (100, 0, 1, 0), (0, -8, 1, 0), (0, 0, 0, 0), (0, 2**62, 2**62, 0)])
def test_an_index_that_points_elsewhere_is_refused(tmp_path: Path, entry: tuple[int, ...]) -> None:
    writer = SegmentWriter(tmp_path, f"{PREFIX}-0000-000001")
    writer.commit(np.array([entry], dtype=ENTRY))
    with pytest.raises(FederatedError, match="damaged"):
        reopened(tmp_path, [writer.committed])


GOOD = Version(("../a.ckpt",), {"seed": "0"}, 3, (Segment(f"{PREFIX}-0000-000001", 1, 7),))


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "null", "{}", "[" * 10**5, '{"format": 2}', '{"format": 1}', "\0\1",
        GOOD.to_json().replace(PREFIX, "../../../etc/passwd"),
        GOOD.to_json().replace('"clients": 3', '"clients": 1e999'),
        GOOD.to_json().replace('"clients": 3', '"clients": null'),
        GOOD.to_json().replace('"run": {"seed": "0"}', '"run": [1]'),
        GOOD.to_json().replace("1, 7]", "true, 7]"),
        GOOD.to_json().replace("1, 7]", "1]"),
    ],
)  # fmt: skip
def test_a_version_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    name = f"round-000001-{'0' * 16}"
    folder = StoreFolder(tmp_path)
    (tmp_path / f"{name}.json").write_text(GOOD.to_json())
    assert folder.read(name) == GOOD
    (tmp_path / f"{name}.json").write_text(text)
    with pytest.raises(FederatedError, match=rf"{name}.json is damaged"):
        folder.read(name)
    (tmp_path / f"{PREFIX}-0000-000001.states").write_text("")
    folder.collect(folder.segments())  # which does not know what a damaged version needs
    assert (tmp_path / f"{PREFIX}-0000-000001.states").exists()


def test_a_version_is_looked_for_in_the_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(GOOD.to_json())
    with pytest.raises(FederatedError, match="is no version's name"):
        StoreFolder(tmp_path / "b").read("../a")
    with pytest.raises(FederatedError, match="there is none"):
        find_store({"path": "b", "version": "../a"}, tmp_path / "a.ckpt")


# ------------------------------------------------------------------ what it costs


def written(folder: Path, clients: int) -> Iterator[tuple[int, int]]:
    """Yield the files and bytes that rounds of ten clients write."""
    folder.mkdir()
    kept = store(folder, clients=clients)
    before: dict[str, int] = {}
    stream = np.random.default_rng(0)
    for number in range(8):
        put(kept, {int(i): float(number) for i in stream.choice(clients, 10, replace=False)}, size=1000)
        kept.segments()
        after = files(folder)
        yield len(after), sum(after.values()) - sum(before.values())
        before = after


def test_a_round_costs_what_it_touches_whatever_the_population(tmp_path: Path) -> None:
    few, many = list(written(tmp_path / "few", 10**2)), list(written(tmp_path / "many", 10**5))
    assert few == many
    assert {count for count, _ in many} == {2}
    assert max(size for _, size in many) < 10 * (4 * 1000 + 150)


def test_out_of_date_states_make_room(tmp_path: Path) -> None:
    kept = store(tmp_path, writes_versions=False)
    kept.segment_bytes = 10_000
    live = 20 * (4 * 100 + 80)
    for number in range(200):
        put(kept, {(7 * number + i) % 20: float(number) for i in range(5)}, size=100)
        assert sum(files(tmp_path).values()) < 2 * live + 4 * kept.segment_bytes
    assert len(kept) == 20


def test_few_files_are_open_at_a_time(tmp_path: Path) -> None:
    kept = store(tmp_path, clients=1000)
    kept.segment_bytes = 1
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for index in range(100):
        put(kept, {index: float(index)})
    assert values(kept) == {i: float(i) for i in range(100)}
    if before:
        assert len(os.listdir("/proc/self/fd")) - before < 45


def resident() -> float:
    """Return this process's resident memory in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux does")
def test_states_do_not_live_in_memory(tmp_path: Path) -> None:
    kept = store(tmp_path, clients=100_000)
    put(kept, {0: 0.0}, size=50_000)
    before = resident()
    for start in range(0, 100_000, 1000):
        put(kept, {index: float(index) for index in range(start, start + 1000, 200)}, size=50_000)
        assert float(kept.get(start)["c_i"][-1]) == start
    assert len(kept) == 500
    assert sum(files(tmp_path).values()) > 95 * 2**20
    assert resident() - before < 10


def test_a_reader_finds_what_a_file_system_returns_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = store(tmp_path)
    put(kept, {0: 1.0}, size=1000)

    class Slow:
        def __init__(self, file: object) -> None:
            self.file = file

        def read(self, size: int) -> bytes:
            return self.file.read(min(size, 7))

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

    monkeypatch.setattr(segments, "open", lambda *a, **k: Slow(open(*a, **k)), raising=False)  # noqa: SIM115
    assert values(kept) == {0: 1.0}
