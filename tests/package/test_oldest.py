"""The script that derives the oldest versions from pyproject.toml, and the workflow that tests with them."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "oldest.py"
if not SCRIPT.exists():
    pytest.skip("outside a checkout there is no .ci/oldest.py", allow_module_level=True)
tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")

PROJECT = """
[project]
dependencies = ["One_Package>=1.2,<3", "two[extra]>=0.5.1"]
[project.optional-dependencies]
more = ["three>=2,!=2.1", "one-package>=1.10"]
open = ["four<5"]
"""


@pytest.fixture
def oldest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Return a function that runs the script on a small project and returns its output."""
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "constraints.txt").write_text("# pinned\nTwo==0.9\nfour==4.4\n")

    def run(*arguments: str, project: Path = tmp_path) -> list[str]:
        runpy.run_path(str(SCRIPT))["main"]([*arguments, "--project", str(project)])
        return capsys.readouterr().out.splitlines()

    return run


def test_lower_bounds_are_printed(oldest: Callable[..., list[str]]) -> None:
    assert oldest() == ["one-package==1.2", "two==0.5.1"]


def test_higher_of_two_bounds_wins(oldest: Callable[..., list[str]]) -> None:
    assert oldest("more") == ["one-package==1.10", "three==2", "two==0.5.1"]


def test_kept_package_uses_its_pinned_version(oldest: Callable[..., list[str]]) -> None:
    assert oldest("--keep", "two") == ["one-package==1.2", "two==0.9"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "has no extra 'none'; there are more, open"),
        (["open"], "four<5: write the oldest version that works"),
        (["--keep", "three"], "does not pin three"),
    ],
)
def test_bounds_that_cannot_be_derived_raise(
    oldest: Callable[..., list[str]], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        oldest(*arguments)


def test_every_package_has_a_lower_bound_within_its_range(oldest: Callable[..., list[str]]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    found = dict(line.split("==") for line in oldest(*optional, project=ROOT))
    for text in (*project["dependencies"], *(text for texts in optional.values() for text in texts)):
        requirement = Requirement(text)
        assert found[canonicalize_name(requirement.name)] in requirement.specifier, text


def test_every_range_allows_the_pinned_version() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    assert "mypy" in {Requirement(text).name for text in optional["checks"]}
    for text in (*project["dependencies"], *(text for texts in optional.values() for text in texts)):
        requirement = Requirement(text)
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is None or version.partition(" ")[0] in requirement.specifier, f"{text}, and {version} is pinned"


# ------------------------------------------------------------------ the workflow


def test_workflow_runs_pinned_oldest_and_newest_versions() -> None:
    workflow: Any = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    sets = workflow["jobs"]["tests"]["strategy"]["matrix"]["include"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {one["versions"] for one in sets} == {"oldest", "pinned", "newest"}
    (lowest,) = [one["python"] for one in sets if one["versions"] == "oldest"]
    assert project["requires-python"] == f">={lowest}"
