"""Collect a file here only if the command names it.

Importing these packages takes up to a minute. Each builds on one of Lightning's two packages, and a process can use
only one of them. The default run does not import the files.
"""

import os
from pathlib import Path

import pytest

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")  # nothing is downloaded


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore a file that the command does not name."""
    named = {Path(config.invocation_params.dir, str(arg).split("::")[0]).resolve() for arg in config.args}
    is_here = collection_path.parent == Path(__file__).parent and collection_path.suffix == ".py"
    return True if is_here and collection_path.resolve() not in named else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test of :class:`tests.public_modules.harness.Published` on every case and method that it takes."""
    axes = {"case": getattr(metafunc.cls, "cases", ()), "method": ("fedavg", "scaffold")}
    for name, values in axes.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, values, ids=[getattr(value, "name", value) for value in values])
