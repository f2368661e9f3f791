"""Names of files are on the disk before something refers to them."""

import os
from pathlib import Path

import pytest

from lightning_fed.core.disk import flush_folder


@pytest.mark.skipif(os.name != "posix", reason="only POSIX lets a folder be opened")
def test_a_folder_is_flushed_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: flushed.append(os.fstat(handle).st_ino))
    flush_folder(tmp_path)
    assert flushed == [tmp_path.stat().st_ino]


def test_a_folder_that_cannot_be_flushed_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flush_folder(tmp_path / "none")
    closed: list[int] = []

    def refuse(handle: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(os, "close", closed.append)
    flush_folder(tmp_path)
    monkeypatch.undo()
    for handle in closed:
        os.close(handle)
    assert len(closed) == (os.name == "posix")
