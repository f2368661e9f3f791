"""A folder is flushed if the system allows it."""

import os
from pathlib import Path

import pytest

from lightning_fed.core.disk import flush_folder


def test_folder_is_flushed_and_its_handle_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed, closed, close = [], [], os.close
    monkeypatch.setattr(os, "fsync", lambda handle: flushed.append(os.fstat(handle).st_ino))
    monkeypatch.setattr(os, "close", lambda handle: (closed.append(handle), close(handle)))
    flush_folder(tmp_path)
    assert flushed == [tmp_path.stat().st_ino]
    assert len(closed) == 1


def test_unsupported_folder_flush_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    flush_folder(tmp_path)
    flush_folder(tmp_path / "missing")
