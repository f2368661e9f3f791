"""The script for completion, in a real bash."""

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest

from lightning_fed.cli.completion import _copy
from lightning_fed.cli.main import main

ASK = """
source ./script
complete_words() {
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
    _shtab_lightning_fed lightning-fed "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
    echo "${COMPREPLY[*]}"
}
"""
EXPECTED = {
    "lightning-fed co": {"compare", "completion"},
    "lightning-fed fit --trainer.max_r": {"--trainer.max_rounds"},
    "lightning-fed fit --trainer.engine ''": {"sequential", "vectorized", "auto"},
    "lightning-fed fit --trainer.accelerator ''": {"auto", "cpu", "gpu"},
    "lightning-fed fit --trainer.enable_progress_bar ''": {"true", "false"},
    "lightning-fed fit --trainer.algorithm FedP": {"FedPer", "FedProx", "FedProxVR"},
    "lightning-fed fit --config run.yaml --model Mn": {"MnistCNN"},
    "lightning-fed fit --config run.yaml --model Nothing": set(),
    "lightning-fed fit --config ru": {"run.yaml"},
    "lightning-fed deploy flower --si": {"--sites"},
    "lightning-fed compare --mode ''": {"max", "min"},
    "lightning-fed data --mo": set(),  # this command has no model
    "lightning-fed new -": {"-h", "--help"},
}


@pytest.mark.thorough
def test_bash_completes_commands_options_classes_and_files(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    main(["completion", "bash"])
    Path("script").write_text(capsys.readouterr().out)
    Path("run.yaml").touch()
    asked = ASK + "".join(f"complete_words {words}\n" for words in EXPECTED)
    done = subprocess.run([bash, "-c", asked], capture_output=True, text=True, check=True, timeout=60)
    assert not done.stderr
    found = [set(line.split()) for line in done.stdout.splitlines()]
    assert dict(zip(EXPECTED, found, strict=True)) == EXPECTED


def test_percent_sign_in_a_help_text_is_literal() -> None:
    source, copied = argparse.ArgumentParser(), argparse.ArgumentParser()
    action = source.add_argument("--share")
    action.help = "Take 50% of the clients."
    _copy(action, copied, None)
    assert "Take 50% of the clients." in copied.format_help()


def test_missing_shtab_raises_with_an_install_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fed.cli.completion.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install shtab"):
        main(["completion", "bash"])
