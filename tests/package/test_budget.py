"""The script that limits the CPU time of the test run."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "budget.py"
if not SCRIPT.exists():
    pytest.skip("outside a checkout there is no .ci/budget.py", allow_module_level=True)


def run(cpu: float, code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code under a budget, with a short calibration loop."""
    command = [sys.executable, str(SCRIPT), "--wall", "1", "--cpu", str(cpu), "--processes", "1", "--loops", "20000"]
    return subprocess.run([*command, "--", sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_command_within_its_budget_passes_and_prints_its_times() -> None:
    done = run(1000, "pass")
    assert done.returncode == 0
    assert "s of CPU (goal 1000 s)" in done.stdout
    assert "over budget" not in done.stdout


def test_command_over_its_budget_fails_with_the_remedy() -> None:
    done = run(1e-6, "sum(range(10**6))")
    assert done.returncode == 1
    assert "over budget" in done.stdout
    assert "thorough" in done.stdout


def test_failing_command_keeps_its_exit_status() -> None:
    assert run(1e-6, "raise SystemExit(3)").returncode == 3
