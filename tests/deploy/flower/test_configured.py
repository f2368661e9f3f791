"""``lightning-fed deploy flower`` writes an app from a configuration."""

import importlib
import io
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason='no Flower: pip install "lightning_fed[flower]"')
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate

from lightning_fed.cli.main import main
from lightning_fed.deploy import FederatedSite
from lightning_fed.deploy.flower import configured

ROOT = Path(__file__).parents[3]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")


def test_the_app_of_a_configuration_is_what_flower_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "app"
    words = ["deploy", "flower", "--config", QUICKSTART, "--out", str(out), "--run", "false"]
    main(words)
    assert f"flwr run {out}" in capsys.readouterr().out
    config, warnings = load_and_validate(out / "pyproject.toml")
    assert config
    assert all("license" in warning for warning in warnings), "which is the user's to choose"
    assert "federated_app/config.yaml" in sent(out)
    monkeypatch.syspath_prepend(str(out))
    task = importlib.import_module("federated_app.task")
    for side in ("client", "server"):
        importlib.import_module(f"federated_app.{side}_app")
    monkeypatch.delitem(sys.modules, "federated_app")
    assert task.client_ids() == list(range(30))
    assert len(task.make_val()) == 179
    with FederatedSite(task.make_trainer(), task.make_model(), task.make_data({}), [3, 4], tmp_path / "site") as site:
        assert site.client_ids == [3, 4]
    with pytest.raises(SystemExit, match="has an app already"):
        main(words)


def sent(app: Path) -> set[str]:
    """Return the names of the files that Flower sends to the sites."""
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))) as archive:
        return set(archive.namelist())


def test_clients_are_dealt_out_to_the_sites(tmp_path: Path) -> None:
    assert configured.share_clients([0, 1, 2, 3, "x"], 2) == [[0, 2, "x"], [1, 3]]
    words = ["deploy", "flower", "--config", QUICKSTART, "--run", "false", "--out"]
    for sites, said in (("31", "is more than the 30 clients"), ("0", "sites")):
        with pytest.raises(SystemExit, match=said):
            main([*words, str(tmp_path / sites), "--sites", sites])
    with pytest.raises(SystemExit, match=r"none.yaml"):
        main(["deploy", "flower", "--config", "none.yaml"])
