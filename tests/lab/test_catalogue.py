"""The list of experiments on the command line."""

import re
import subprocess
import sys

import pytest

from lightning_fed.cli.main import main
from lightning_fed.lab.reading import PAPERS


def test_list_shows_every_experiment_with_scales_time_and_data(capsys: pytest.CaptureFixture[str]) -> None:
    main(["reproduce", "--list"])
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[1:]} == {path.stem for path in PAPERS.glob("*.yaml")}
    (line,) = (line for line in lines if line.startswith("mime_fig3 "))
    assert re.search(r"full, part, cohort.*\d\.\d+ h at cohort .*EMNIST", line)
    assert not any(" 0.0 h" in line for line in lines)


def test_list_avoids_pytorch_and_run_prints_before_loading_it() -> None:
    code = (
        "import sys; from lightning_fed.__main__ import main; sys.argv[1:] = {args}; main();"
        "print([name for name in ('torch', 'yaml', 'pytorch_lightning') if name in sys.modules], file=sys.stderr)"
    )
    listed = subprocess.run(
        [sys.executable, "-c", code.format(args=["reproduce", "--list"])], capture_output=True, text=True, timeout=100
    )
    assert "scaffold_quadratics" in listed.stdout
    assert listed.stderr.strip() == "[]"
    before = (
        "import sys; from lightning_fed.__main__ import main; sys.argv[1:] = ['reproduce', 'nothing'];"
        "sys.modules['torch'] = None; main()"  # makes the import fail, after the line
    )
    stopped = subprocess.run([sys.executable, "-c", before], capture_output=True, text=True, timeout=100)
    assert stopped.stderr.startswith("lightning-fed reproduce: loading PyTorch")
