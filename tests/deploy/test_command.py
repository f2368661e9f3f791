"""``lightning-fed deploy``: its words, whatever carries the messages."""

from pathlib import Path
from typing import Any

import pytest

from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy import command

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")


@pytest.mark.parametrize(("transport", "called"), [("flower", "Flower"), ("nvflare", "NVFlare")])
def test_the_extra_of_a_transport_is_named(transport: str, called: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    said = rf'deploy {transport}: {called} is missing: pip install "lightning_fed\[{transport}\]"'
    with pytest.raises(FederatedError, match=said):
        command.deploy([transport, "--config", QUICKSTART])


@pytest.mark.parametrize(("option", "value"), [("--rounds", "0"), ("--sites", "0"), ("--sites", "31")])
def test_bad_numbers_are_refused_before_anything_is_written(
    option: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: name)
    wrong: Any = ["flower", "--config", QUICKSTART, "--out", str(tmp_path / "out"), option, value]
    with pytest.raises(FederatedError, match=option):
        command.deploy(wrong)
    assert not (tmp_path / "out").exists()
