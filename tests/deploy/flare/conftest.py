"""A stand-in for FLARE in this process, with short waits."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_fed.deploy.flare import transport
from tests.deploy.flare.fake import Flare


@pytest.fixture
def flare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Flare]:
    """Return three sites with four clients, for SCAFFOLD."""
    monkeypatch.setattr(transport, "_LOOK", 0.01)
    monkeypatch.setattr(transport, "_BACK_OFF", 0.0)
    made = Flare(tmp_path / "sites")
    yield made
    made.end()
