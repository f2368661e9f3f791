"""The app of a configuration, with any transport."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_fed.core.errors import FederatedError
from lightning_fed.deploy import configured
from lightning_fed.deploy.configured import share_clients, write_app


def test_clients_are_distributed_over_the_sites() -> None:
    assert share_clients("deploy", [0, 1, 2, 3, "x"], 2) == [[0, 2, "x"], [1, 3]]
    with pytest.raises(FederatedError, match="deploy: --sites 3 is more than the 2 clients"):
        share_clients("deploy", [0, 1], 3)
    for wrong in ("a,b", 'a"'):
        with pytest.raises(FederatedError, match="has a comma or a quotation mark"):
            share_clients("deploy", [wrong], 1)


def test_templates_are_written_once_as_a_tree_and_never_replaced(tmp_path: Path) -> None:
    templates, out, config = tmp_path / "templates", tmp_path / "out", tmp_path / "config.yaml"
    (templates / "deep").mkdir(parents=True)
    (templates / "deep" / "a.json.in").write_text("[$number]")
    config.write_text(yaml.safe_dump({"trainer": {"max_rounds": 9}}))
    assert write_app("deploy", config, templates, out, out / "package", 4, {"number": "7"}) == "Made"
    assert (out / "deep" / "a.json").read_text() == "[7]"
    assert {path.name for path in (out / "package").iterdir()} == {"__init__.py", "config.yaml", "task.py"}
    assert yaml.safe_load((out / "package" / "config.yaml").read_text()) == {"trainer": {"max_rounds": 4}}
    assert write_app("deploy", config, templates, out, out / "package", 4, {"number": "7"}) == "Found"
    for rounds, number, file in ((4, "8", "deep/a.json"), (5, "7", "package/config.yaml")):
        with pytest.raises(FederatedError, match=f"has another app or project already: its {file} is not what"):
            write_app("deploy", config, templates, out, out / "package", rounds, {"number": number})
    (out / "package" / "task.py").write_text("a user's own")
    with pytest.raises(FederatedError, match="its package/task.py is not .* give another folder by --out"):
        write_app("deploy", config, templates, out, out / "package", 4, {"number": "7"})
    assert (out / "package" / "task.py").read_text() == "a user's own"
    (tmp_path / "mine" / "deep").mkdir(parents=True)
    (tmp_path / "mine" / "deep" / "a.json").write_text("a user's own")
    with pytest.raises(FederatedError, match="its deep/a.json is not what"):
        write_app("deploy", config, templates, tmp_path / "mine", tmp_path / "mine" / "package", 4, {"number": "7"})
    assert not (tmp_path / "mine" / "package").exists()
    (tmp_path / "file").touch()
    with pytest.raises(FederatedError, match="cannot be written"):
        write_app("deploy", config, templates, tmp_path / "file", tmp_path / "file" / "a", None, {"number": "7"})


QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")


@pytest.mark.parametrize(("transport", "called"), [("flower", "Flower"), ("nvflare", "NVFlare")])
def test_missing_transport_extra_is_named(transport: str, called: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configured, "find_spec", lambda name: None)
    said = rf'deploy {transport}: {called} is missing: pip install "lightning_fed\[{transport}\]"'
    with pytest.raises(FederatedError, match=said):
        configured.deploy([transport, "--config", QUICKSTART])


@pytest.mark.parametrize(("option", "value"), [("--rounds", "0"), ("--sites", "0"), ("--sites", "31")])
def test_invalid_numbers_are_rejected_before_anything_is_written(
    option: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configured, "find_spec", lambda name: name)
    wrong: Any = ["flower", "--config", QUICKSTART, "--out", str(tmp_path / "out"), option, value]
    with pytest.raises(FederatedError, match=option):
        configured.deploy(wrong)
    assert not (tmp_path / "out").exists()
