"""``lightning-fed new``: the project trains unchanged, its test passes, and no file is overwritten."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_fed.cli import new as cli_new
from lightning_fed.cli.main import main
from lightning_fed.core.errors import FederatedError
from tests.helpers.command_line import one_stage

NAME = "project_of_a_user"


@pytest.mark.thorough
def test_new_project_trains_and_its_test_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["new", NAME])
    assert f"cd {NAME} && lightning-fed fit --config config.yaml" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path / NAME)
    monkeypatch.syspath_prepend(str(tmp_path / NAME))
    # fewer rounds than its configuration; the thorough test below runs it unchanged
    with one_stage("fit"):
        main(["fit", "--config", "config.yaml", "--trainer.max_rounds", "2", "--trainer.accelerator", "cpu"])
    with one_stage("test"):
        main(["test", "--config", "config.yaml", "--ckpt_path", "best"])
    assert "test_acc" in capsys.readouterr().out
    tested = runpy.run_path(f"test_{NAME}.py")
    tested["test_a_few_rounds_learn_something"](tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("lightning", ["lightning.pytorch", "pytorch_lightning"])
def test_new_project_imports_lightning_from_the_package_in_use(
    lightning: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli_new, "NAMES", {cli_new.USED: (lightning, "")})
    folder = cli_new.create("unlike_any_module")
    for file in ("unlike_any_module.py", "test_unlike_any_module.py"):
        assert f"import {lightning} as pl" in (folder / file).read_text()
    assert f"class_path: {lightning}.callbacks.ModelCheckpoint" in (folder / "config.yaml").read_text()


@pytest.mark.thorough
def test_new_project_works_as_its_readme_says(tmp_path: Path) -> None:
    commands = [[sys.executable, "-m", "lightning_fed", "new", NAME]]
    readme = (cli_new._TEMPLATES / "README.md.in").read_text()
    shown = [line.split() for line in readme.splitlines() if line.startswith("    ")]
    assert [words[0] for words in shown] == ["lightning-fed", "lightning-fed", "python"]
    begins = {"lightning-fed": ["-m", "lightning_fed"], "python": []}
    commands += [[sys.executable, *begins[words[0]], *words[1:]] for words in shown]
    for folder, command in zip((tmp_path, *[tmp_path / NAME] * 3), commands, strict=True):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
        assert not done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("my-project", "new 'my-project': .*letters, digits and _, a letter first, such as my_project"),
        ("3d", "new '3d': "),
        ("class", "new 'class': "),
        ("_hidden", "new '_hidden': .*such as hidden"),
        ("", "new '': "),
        ("a/b", "new 'a/b': "),
        ("../up", "new '../up': "),
        ("torch", "new torch: an installed module has this name"),
        ("there", "new there: .*there is there already"),
    ],
)
def test_invalid_or_taken_name_is_rejected(name: str, told: str, tmp_path: Path) -> None:
    Path("there").mkdir()
    Path("there", "mine.txt").write_text("mine")
    with pytest.raises(SystemExit, match=f"lightning-fed: {told}"):
        main(["new", name])
    assert [path.name for path in tmp_path.rglob("*")] == ["there", "mine.txt"]


def test_disk_error_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(root: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cli_new, "_write_digits", full)
    with pytest.raises(FederatedError, match="new another: .* cannot be written: No space left on device"):
        cli_new.create("another")
    assert not list(tmp_path.iterdir())
