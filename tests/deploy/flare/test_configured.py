"""``lightning-fed deploy nvflare`` writes a job from a configuration, and ends every process that it starts."""

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("nvflare", reason='no NVFlare: pip install "lightning_fed[nvflare]"')
from nvflare.fuel.utils.zip_utils import zip_directory_to_bytes
from nvflare.private.fed.server.job_meta_validator import JobMetaValidator
from nvflare.tool.job.config.configer import build_config_file_indices

from lightning_fed.cli.main import main
from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy import FederatedSite
from lightning_fed.deploy.configured import deploy
from lightning_fed.deploy.flare import configured
from tests.deploy.processes import is_alive, needs_linux, wait_for

ROOT = Path(__file__).parents[3]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")


@pytest.mark.thorough
def test_job_from_a_configuration_is_valid_for_flare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "app"
    words = ["deploy", "nvflare", "--config", QUICKSTART, "--out", str(out), "--run", "false"]
    main(words)
    assert f"nvflare job submit -j {out / 'job'}" in capsys.readouterr().out
    valid, error, meta = JobMetaValidator().validate("job", zip_directory_to_bytes(str(out), "job"))
    assert valid, error
    assert meta["min_clients"] == 3
    assert build_config_file_indices(str(out / "job"), ["app"])["app"], "as `nvflare job submit` begins"
    server = json.loads((out / "job/app/config/config_fed_server.json").read_text())["workflows"][0]
    path, name = server["path"].rsplit(".", 1)
    controller = getattr(importlib.import_module(path), name)(**server["args"])
    assert controller.sites["site-2"] == list(range(1, 30, 3))
    custom = out / "job" / "app" / "custom"
    monkeypatch.syspath_prepend(str(custom))
    monkeypatch.delitem(sys.modules, "federated_app", raising=False)
    monkeypatch.delitem(sys.modules, "federated_app.task", raising=False)
    task = importlib.import_module("federated_app.task")
    assert task.client_ids() == list(range(30))
    with FederatedSite(task.make_trainer(), task.make_model(), task.make_data({}), [3, 4], tmp_path / "site") as site:
        assert site.client_ids == [3, 4]
    assert (custom / "serve.py").read_text().count("federated_app.task:make_") == 3
    assert yaml.safe_load((custom / "federated_app" / "config.yaml.txt").read_text())["trainer"]["max_rounds"] == 50
    main(words)
    assert "Found" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="has another app or project already"):
        main([*words, "--sites", "2"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_signal_ends_everything_that_was_started(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []

    class Endless:
        def wait(self) -> int:
            os.kill(os.getpid(), number)
            time.sleep(600)
            raise AssertionError

    @contextmanager
    def simulator(job: Path, workspace: Path, sites: list[str]) -> Iterator[Any]:
        assert sites == ["site-1", "site-2"]
        try:
            yield Endless()
        finally:
            os.kill(os.getpid(), number)  # an impatient user sends a second signal
            ended.append(number)

    monkeypatch.setattr(configured, "simulator", simulator)
    with pytest.raises(SystemExit) as end:
        deploy(["nvflare", "--config", QUICKSTART, "--out", str(tmp_path / "app"), "--sites", "2"])
    assert end.value.code == 128 + number
    assert ended == [number]
    config = yaml.safe_load((tmp_path / "app/job/app/custom/federated_app/config.yaml.txt").read_text())
    assert config["trainer"]["max_rounds"] == 5


def test_failing_simulator_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configured.sys, "executable", "false")
    with pytest.raises(FederatedError, match="the simulator has ended with 1"):
        configured.run("deploy nvflare", tmp_path, [[0]])


@pytest.mark.thorough
@needs_linux
def test_no_process_outlives_the_simulator_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator's clients lead their own sessions."""
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nsetsid sh -c 'trap \"\" TERM; sleep 1000 & wait' &\nsleep 1000\n")
    script.chmod(0o755)
    monkeypatch.setattr(configured.sys, "executable", str(script))
    monkeypatch.setattr(configured, "_PATIENCE", 0.5)
    with configured.simulator(tmp_path, tmp_path, ["a"]) as process:
        while len(running := process.children(recursive=True)) < 3:
            time.sleep(0.02)
    wait_for(lambda: not any(is_alive(one.pid) for one in running))
