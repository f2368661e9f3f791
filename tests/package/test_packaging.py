"""The installed package matches the repository."""

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lightning_fed

ROOT = Path(__file__).parents[2]


def test_installed_package_has_version_script_and_type_marker() -> None:
    distribution = importlib.metadata.distribution("lightning_fed")
    assert distribution.version == lightning_fed.__version__
    (script,) = [e for e in distribution.entry_points if e.name == "lightning-fed"]
    assert script.load().__module__ == "lightning_fed.__main__"
    assert (Path(lightning_fed.__file__).parent / "py.typed").exists()


def test_version_is_in_the_changelog() -> None:
    assert f"[{lightning_fed.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_readme_installs_the_pinned_pytorch() -> None:
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    (command,) = re.findall(r"^    pip install (.*) --index-url \S+/whl/cpu$", (ROOT / "README.md").read_text(), re.M)
    assert set(command.split()) == {line for line in constraints if line.startswith(("torch==", "torchvision=="))}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_constraints_pin_every_dependency_once_within_its_range() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pinned = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    assert len(pinned) == len(lines)
    for text in (
        *project["dependencies"],
        *(text for extra in project["optional-dependencies"].values() for text in extra),
    ):
        requirement = Requirement(text)
        if requirement.name == project["name"]:  # an extra that includes another one
            assert requirement.extras <= set(project["optional-dependencies"])
            continue
        assert pinned[canonicalize_name(requirement.name)] in requirement.specifier, text
