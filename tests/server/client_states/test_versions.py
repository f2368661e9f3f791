"""Versions of client states: what is garbage goes soon, and looking for it does not cost more with every checkpoint."""

from pathlib import Path

import pytest
import torch

from lightning_fed.server.client_states.segments import Segment
from lightning_fed.server.client_states.versions import StoreFolder, Version


def checkpoint(folder: StoreFolder, number: int) -> Path:
    """Write a version and a checkpoint that refers to it, as a run does, and return the checkpoint."""
    path = folder.path.parent / f"{number}.ckpt"
    name = folder.write(number, Version((f"../{path.name}",), {}, 9, ()))
    states = {"path": folder.path.name, "version": name}
    torch.save({"loops": {"fit_loop": {"state_dict": {"client_states": states}}}}, path)
    folder.collect_if_due()
    return path


@pytest.fixture
def folder(tmp_path: Path) -> StoreFolder:
    (tmp_path / "client_states").mkdir()
    return StoreFolder(tmp_path / "client_states")


def versions(folder: StoreFolder) -> int:
    return len(list(folder.path.glob("*.json")))


@pytest.mark.thorough
def test_what_is_read_for_a_checkpoint_does_not_grow_with_those_kept(
    folder: StoreFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, reads = StoreFolder.read, []
    monkeypatch.setattr(StoreFolder, "read", lambda self, name: reads.append(name) or read(self, name))
    counts = []
    for number in range(400):
        checkpoint(folder, number)
        counts.append(len(reads))
    assert versions(folder) == 400
    early, late = counts[199] - counts[99], counts[399] - counts[299]
    assert late < 1.5 * early < 1.5 * 100 * 12


def test_of_many_checkpoints_few_that_are_gone_are_remembered(folder: StoreFolder) -> None:
    paths = [checkpoint(folder, number) for number in range(80)]
    for path in paths[:40]:
        path.unlink()
    for number in range(80, 90):
        checkpoint(folder, number)
    assert 50 <= versions(folder) < 60


def test_of_a_single_checkpoint_nothing_but_its_own_version_is_left(folder: StoreFolder) -> None:
    for number in range(5):
        path = checkpoint(folder, number)
        assert versions(folder) == 1
        path.unlink()


def test_only_unused_segments_that_no_version_needs_go(folder: StoreFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"000001-00000000-{rank:04d}-000001" for rank in range(4)]

    def put(name: str) -> None:
        (folder.path / f"{name}.states").touch()
        (folder.path / f"{name}.index").touch()

    for name in names[:3]:
        put(name)
    folder.write(1, Version(("../a.ckpt",), {}, 9, (Segment(names[0], 1, 0),)))
    wanted = StoreFolder._wanted
    # another process opens a segment meanwhile
    monkeypatch.setattr(StoreFolder, "_wanted", lambda self, found: (put(names[3]), wanted(self, found))[1])
    folder.collect(folder.segments() - {names[1]})
    assert folder.segments() == {names[0], names[1], names[3]}
    assert len(list(folder.path.glob("*.index"))) == 3
