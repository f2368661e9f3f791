"""Options and fixtures that all tests share."""

import os
import signal
from pathlib import Path

import pytest
import torch

import lightning_fed  # noqa: F401  # before anything that imports Lightning

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as under nohup, or as a shell's background job
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the folder of oracle cases."""
    parser.addoption(
        "--oracle-cases",
        metavar="DIR",
        default=os.environ.get("LIGHTNING_FED_ORACLE_CASES"),
        help="a folder of oracle cases to run through the real trainer (default: $LIGHTNING_FED_ORACLE_CASES)",
    )


@pytest.fixture(autouse=True)
def _workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every test write its logs to a folder of its own."""
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
