"""The script that sets the repository's address, and the workflow that needs it for a release."""

import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "set_address.py"
if not SCRIPT.exists():
    pytest.skip("outside a checkout there is no .ci/set_address.py", allow_module_level=True)
FILES = runpy.run_path(str(SCRIPT))["PLACES"]
ADDRESS = "https://github.com/Someone/lightning_fed"


def set_address(*arguments: str) -> None:
    runpy.run_path(str(SCRIPT))["main"](arguments)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a folder with the files that need the address, from a repository without one."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def texts(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in FILES}


def site(folder: Path) -> Any:
    """Return mkdocs.yml without its plugins and extensions, which need tags."""
    return yaml.safe_load((folder / "mkdocs.yml").read_text().partition("\nnav:")[0])


def test_address_is_written_to_every_file(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
    before = tomllib.loads((copy / "pyproject.toml").read_text())
    set_address(ADDRESS, "--root", str(copy))
    assert capsys.readouterr().out.split() == list(FILES)
    after = tomllib.loads((copy / "pyproject.toml").read_text())
    pages = "https://someone.github.io/lightning_fed/"
    assert after["project"].pop("urls") == {
        "Repository": ADDRESS,
        "Documentation": pages,
        "Changelog": f"{ADDRESS}/blob/main/CHANGELOG.md",
        "Issues": f"{ADDRESS}/issues",
    }
    before["project"].pop("urls", None)
    assert after == before
    assert (site(copy)["repo_url"], site(copy)["site_url"]) == (ADDRESS, pages)
    citation = yaml.safe_load((copy / "CITATION.cff").read_text())
    assert (citation["repository-code"], citation["url"]) == (ADDRESS, pages)
    (contact,) = yaml.safe_load((copy / ".github/ISSUE_TEMPLATE/config.yml").read_text())["contact_links"]
    assert contact.keys() == {"name", "url", "about"}
    report = f"{ADDRESS}/security/advisories/new"
    assert contact["url"] == report
    assert f"[Report a vulnerability]({report})" in (copy / "SECURITY.md").read_text()
    assert f"[Security tab]({ADDRESS}/security)" in (copy / "CODE_OF_CONDUCT.md").read_text()
    assert f"    git clone {ADDRESS} lightning_fed && cd lightning_fed\n" in (copy / "README.md").read_text()


def test_second_run_is_idempotent_and_new_address_replaces_the_old(copy: Path) -> None:
    set_address(ADDRESS, "--root", str(copy))
    once = texts(copy)
    set_address(ADDRESS, "--root", str(copy))
    assert texts(copy) == once
    set_address("https://github.com/others/fed.x", "--root", str(copy))
    moved = {name: text.replace("/Someone/lightning_fed", "/others/fed.x") for name, text in once.items()}
    moved = {
        name: text.replace("someone.github.io/lightning_fed", "others.github.io/fed.x") for name, text in moved.items()
    }
    assert texts(copy) == moved
    set_address(ADDRESS, "--root", str(copy))
    assert texts(copy) == once


@pytest.mark.parametrize(
    "address",
    [
        "github.com/me/it",
        "http://github.com/me/it",
        "https://github.com/me",
        f"{ADDRESS}/",
        f"{ADDRESS}.git",
        "https://github.com/OWNER/a b",
    ],
)
def test_malformed_address_is_rejected(address: str, copy: Path) -> None:
    before = texts(copy)
    with pytest.raises(
        SystemExit, match=re.escape(f"The address is {address!r}. Expected https://github.com/OWNER/NAME")
    ):
        set_address(address, "--root", str(copy))
    assert texts(copy) == before


def test_file_without_an_address_slot_raises_before_any_change(copy: Path) -> None:
    (copy / "SECURITY.md").write_text("# Security\n")
    before = texts(copy)
    with pytest.raises(SystemExit, match=r"SECURITY\.md has no place for the address"):
        set_address(ADDRESS, "--root", str(copy))
    assert texts(copy) == before


def steps() -> dict[str, str]:
    """Return the commands of the workflow's named steps."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    return {step["name"]: step["run"] for step in workflow["jobs"]["build"]["steps"] if "name" in step}


def run(step: str, folder: Path, repository: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "GITHUB_REPOSITORY": repository, "GITHUB_REF_NAME": "v0.1.0"}
    command = steps()[step]
    return subprocess.run(
        ["bash", "-ec", command], cwd=folder, env=variables, capture_output=True, text=True, timeout=60
    )


def test_check_of_another_address_names_the_files_and_changes_nothing(copy: Path) -> None:
    set_address(ADDRESS, "--root", str(copy))
    before = texts(copy)
    set_address(ADDRESS, "--root", str(copy), "--check")
    with pytest.raises(SystemExit, match=rf"^{re.escape(', '.join(FILES))}: the repository's address is missing"):
        set_address("https://github.com/new/home", "--root", str(copy), "--check")
    assert texts(copy) == before


def test_release_fails_without_project_urls(copy: Path) -> None:
    set_address(ADDRESS, "--root", str(copy))
    text = (copy / "pyproject.toml").read_text()
    (copy / "pyproject.toml").write_text(re.sub(r"\[project\.urls\]\n(?:.+\n)*", "# [project.urls] is missing\n", text))
    (copy / ".ci").mkdir()
    shutil.copy(SCRIPT, copy / ".ci")
    failed = run("Check that the files have this repository's address", copy, "Someone/lightning_fed")
    assert failed.returncode == 1
    assert failed.stderr == (
        "pyproject.toml: the repository's address is missing or another one."
        f" Run `python .ci/set_address.py {ADDRESS}`,"
        " and commit the changes before you tag the release.\n"
    )


def test_readme_links_are_absolute_on_pypi(copy: Path) -> None:
    done = run("Make the README's links absolute, since PyPI shows it without the repository", copy, "me/it")
    assert done.returncode == 0, done.stderr
    old = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", (ROOT / "README.md").read_text())
    new = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", (copy / "README.md").read_text())
    assert len(old) > 20
    expected = [
        (mark, link if ":" in link else f"https://github.com/me/it/{'raw' if mark else 'blob'}/v0.1.0/{link}")
        for mark, link in old
    ]
    assert new == expected
    assert all((ROOT / link.partition("#")[0]).exists() for _, link in old if ":" not in link)


def test_repository_has_at_most_one_address() -> None:
    address = site(ROOT)["repo_url"]
    if address:
        set_address(address, "--check")
    else:
        assert not [name for name, text in texts(ROOT).items() if "://github.com/" in text], "run .ci/set_address.py"
