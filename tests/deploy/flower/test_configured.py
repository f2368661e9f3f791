"""``lightning-fed deploy flower`` writes an app from a configuration."""

import importlib
import io
import os
import signal
import sys
import time
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

pytest.importorskip("flwr", reason='no Flower: pip install "lightning_fed[flower]"')
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate

from lightning_fed.cli.main import main
from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy import FederatedSite
from lightning_fed.deploy.configured import deploy, share_clients
from lightning_fed.deploy.flower import configured

ROOT = Path(__file__).parents[3]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")


def test_app_from_a_configuration_is_valid_for_flower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "federated_app"]:  # left by another test's app
        monkeypatch.delitem(sys.modules, name)
    out = tmp_path / "app"
    words = ["deploy", "flower", "--config", QUICKSTART, "--out", str(out), "--run", "false"]
    main(words)
    assert f"flwr run {out}" in capsys.readouterr().out
    config, warnings = load_and_validate(out / "pyproject.toml")
    assert config
    assert all("license" in warning for warning in warnings), "which is the user's to choose"
    for own in ("flower/apps/other", "sites/0", "logs"):
        (out / own).mkdir(parents=True)
        (out / own / "left.py").touch()
    assert "federated_app/config.yaml" in sent(out)
    assert not [name for name in sent(out) if "left" in name], "what a run writes is no part of the app"
    monkeypatch.syspath_prepend(str(out))
    task = importlib.import_module("federated_app.task")
    for side in ("client", "server"):
        importlib.import_module(f"federated_app.{side}_app")
    monkeypatch.delitem(sys.modules, "federated_app")
    assert task.client_ids() == list(range(30))
    assert len(task.make_val()) == 179
    with FederatedSite(task.make_trainer(), task.make_model(), task.make_data({}), [3, 4], tmp_path / "site") as site:
        assert site.client_ids == [3, 4]
    main(words)
    assert "Found" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="has another app or project already"):
        main([*words, "--sites", "2"])


class Started:
    """A stand-in for Flower's processes with an endless run, which a signal interrupts."""

    number: int = 0
    ended: list[str] = []

    def __init__(self, folder: Path, nodes: list[str]) -> None:
        self.logs = folder / "logs"

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(os.getpid(), self.number)  # an impatient user sends a second signal
        self.ended.append("all")

    def submit(self, app: Path) -> str:
        os.kill(os.getpid(), self.number)
        time.sleep(600)
        raise AssertionError


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_signal_ends_everything_that_was_started(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configured, "LocalFlower", Started)
    monkeypatch.setattr(Started, "number", number)
    monkeypatch.setattr(Started, "ended", [])
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as end:
        deploy(["flower", "--config", QUICKSTART, "--out", str(tmp_path / "app")])
    assert end.value.code == 128 + number
    assert Started.ended == ["all"]
    assert signal.getsignal(number) is before


@pytest.mark.thorough
def test_folder_of_a_run_at_work_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, runs = ["flower", "--config", QUICKSTART, "--out", str(tmp_path / "app")], list[Path]()

    def run(who: str, out: Path, shares: object) -> None:
        runs.append(out)
        if len(runs) == 1:
            with pytest.raises(FederatedError, match="another run is at work in .*app. End it, or give another --out"):
                deploy(words)

    monkeypatch.setattr(configured, "run", run)
    deploy(words)
    deploy(words)  # it continues once the first has ended
    assert len(runs) == 2
    assert not [name for name in sent(tmp_path / "app") if "lock" in name]


@pytest.mark.thorough
def test_local_run_is_limited_to_five_rounds_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configured, "LocalFlower", Started)
    given = yaml.safe_load(Path(QUICKSTART).read_text())
    epochs = {**given, "trainer": {**given["trainer"], "max_epochs": 50}}
    del epochs["trainer"]["max_rounds"]
    few = {**given, "trainer": {**given["trainer"], "max_rounds": 2}}
    endless = {**given, "trainer": {**given["trainer"], "max_rounds": -1}}
    wanted = [(given, [], 5), (few, [], 2), (endless, [], 5), (epochs, [], 5), (given, ["--rounds", "7"], 7)]
    monkeypatch.setattr(Started, "submit", lambda self, app: sys.exit("enough"))
    monkeypatch.setattr(Started, "__exit__", lambda self, *_: None)
    for number, (config, words, rounds) in enumerate([*wanted, (given, ["--run", "false"], 50)]):
        file, out = tmp_path / f"{number}.yaml", tmp_path / str(number)
        file.write_text(yaml.safe_dump(config))
        with suppress(SystemExit):
            deploy(["flower", "--config", str(file), "--out", str(out), *words])
        trainer = yaml.safe_load((out / "federated_app" / "config.yaml").read_text())["trainer"]
        assert [trainer[name] for name in ("max_rounds", "max_epochs") if name in trainer] == [rounds], number
    with pytest.raises(FederatedError, match="--rounds"):
        deploy(["flower", "--config", QUICKSTART, "--out", str(tmp_path / "no"), "--rounds", "0"])


def sent(app: Path) -> set[str]:
    """Return the names of the files that Flower sends to the sites."""
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))) as archive:
        return set(archive.namelist())


def test_clients_are_distributed_over_the_sites(tmp_path: Path) -> None:
    assert share_clients("deploy", [0, 1, 2, 3, "x"], 2) == [[0, 2, "x"], [1, 3]]
    words = ["deploy", "flower", "--config", QUICKSTART, "--run", "false", "--out"]
    for sites, said in (("31", "is more than the 30 clients"), ("0", "sites")):
        with pytest.raises(SystemExit, match=said):
            main([*words, str(tmp_path / sites), "--sites", sites])
    with pytest.raises(SystemExit, match=r"none.yaml"):
        main(["deploy", "flower", "--config", "none.yaml"])
