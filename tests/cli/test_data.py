"""``lightning-fed data`` shows a split without training anything."""

from pathlib import Path

import pytest

from lightning_fed.cli.main import main
from tests.helpers.optional import needs_matplotlib

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART = str(CONFIGS / "quickstart.yaml")


@pytest.mark.thorough
@needs_matplotlib
def test_split_is_drawn_and_its_statistics_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "--config", QUICKSTART, "--out", "split.png"])
    assert Path("split.png").stat().st_size > 1000
    assert "Gini" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="lightning-fed: .*alpha"):
        main(["data", "--config", QUICKSTART, "--data.alpha", "-1"])
    Path("file").touch()
    with pytest.raises(SystemExit, match="--out file/split.png cannot be written: "):
        main(["data", "--config", QUICKSTART, "--out", "file/split.png"])
