"""The ClientApp of a site."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason='no Flower: pip install "lightning_fed[flower]"')

from tests.deploy.task import DATA, NAMES

ROOT = Path(__file__).parents[3]


def test_importing_the_apps_of_a_site_imports_no_pytorch() -> None:
    heavy = ("torch", "pytorch_lightning", "lightning", "safetensors", "sklearn")
    probe = f"""
import sys
from lightning_fed.deploy.flower import client_app
app = client_app({NAMES[0]!r}, {NAMES[1]!r}, {DATA!r})
print([name for name in sys.modules if name.split(".")[0] in {heavy}])
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
