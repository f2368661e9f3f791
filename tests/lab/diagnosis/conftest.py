"""The tests' faulty modules and methods under the name of a user's module, in an empty folder."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.diagnosis import Broken, Rare, Unknown, Untrained, Uphill


@pytest.fixture(autouse=True)
def _own_classes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])
    monkeypatch.setitem(
        sys.modules,
        "mine",
        SimpleNamespace(Uphill=Uphill, Unknown=Unknown, Rare=Rare, Broken=Broken, Untrained=Untrained),
    )
