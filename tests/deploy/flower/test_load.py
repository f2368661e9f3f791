"""Many clients, many rounds and a large model with real SuperLinks and SuperNodes: nothing leaks or gets lost."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason='no Flower: pip install "lightning_fed[flower]"')

from tests.deploy.processes import needs_linux

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
pytestmark = [
    needs_linux,
    pytest.mark.thorough,
    pytest.mark.timeout(1800),  # takes minutes on an idle machine
    pytest.mark.skipif(shutil.which("flower-superlink") is None, reason="no flower-superlink on the path"),
]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """Return a function that runs ``benchmarks/deploy.py`` and returns its measurements."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name in ("PYTHONPATH", "DEPLOY_BENCHMARK"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # so monkeypatch restores it
    before = set(sys.modules)
    spec = importlib.util.spec_from_file_location("benchmark", BENCHMARKS / "deploy.py")
    assert spec is not None
    assert spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    yield lambda *words: script.measure(script._parser().parse_args(words), tmp_path)
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(BENCHMARKS):
            del sys.modules[name]


def test_sixty_clients_on_three_sites_leak_no_resources(measured: Callable[..., dict[str, Any]]) -> None:
    found = measured("--clients", "60", "--sites", "3", "--rounds", "10", "--algorithm", "Scaffold")
    assert found["cohort"] == 60
    for name, (before, after) in found["grown"].items():
        # connections come and go, and each site may be replacing a file
        slack = {"MB": 15, "sites": 3, "server": 0}.get(name.split()[-1], 6)
        assert after <= before + slack, name


def test_eleven_million_parameters_reach_server_and_sites(measured: Callable[..., dict[str, Any]]) -> None:
    found = measured("--parameters", "11000000", "--rounds", "3")
    once = 2 * 4 * 11e6 / 1e6  # two clients, float32, in MB
    assert once <= found["mb_to_sites_per_round"] < 1.02 * once
    assert once <= found["mb_from_sites_per_round"] < 1.02 * once
    for kind, most in {"flwr-clientapp": 10, "flower-supernode": 10, "flower-superlink": 20}.items():
        assert found["peak_mb"][kind] < 150 + most * once / 2, kind
