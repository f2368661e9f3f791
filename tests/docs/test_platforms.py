"""docs/platforms.md has the errors that people search for, word for word."""

import subprocess
import sys
from pathlib import Path

import pytest

REFUSED = """
from pathlib import Path
try:
    import torchvision
except RuntimeError as error:
    text = Path("docs/platforms.md").read_text()
    assert f"## `RuntimeError: {error}`" in text  # whoever searches for it finds the page
else:
    print("works here")
"""


def test_the_page_on_platforms_has_the_error_of_a_torchvision_built_for_another_pytorch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REFUSED], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    if "works here" in done.stdout:
        pytest.skip("the torchvision installed here loads its native library")
