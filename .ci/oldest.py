"""Print the oldest versions that ``pyproject.toml`` allows, as constraints for pip.

    python .ci/oldest.py dev >oldest.txt                    # of the package, and of what its extra `dev` adds
    python .ci/oldest.py dev --keep torch torchvision >oldest.txt
    pip install -e ".[dev]" -c oldest.txt

Packages that these bring along are not named, so pip takes their newest versions. ``--keep`` takes a package's version
from ``constraints.txt`` instead, such as the version of an available PyTorch build.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]


def requirements(project: Path, extras: Iterable[str]) -> list[Requirement]:
    """Return the requirements of a project and of some of its extras."""
    table = tomllib.loads(project.read_text())["project"]
    optional = table.get("optional-dependencies", {})
    texts = [*table["dependencies"]]
    for extra in extras:
        if extra not in optional:
            raise SystemExit(f"{project} has no extra {extra!r}; there are {', '.join(optional)}")
        texts += optional[extra]
    return [Requirement(text) for text in texts]


def oldest(required: Iterable[Requirement]) -> dict[str, str]:
    """Return the oldest version of each package that every requirement allows."""
    found: dict[str, Version] = {}
    for requirement in required:
        bounds = [Version(part.version) for part in requirement.specifier if part.operator == ">="]
        if not bounds:
            raise SystemExit(f"{requirement}: write the oldest version that works, as >=")
        name = canonicalize_name(requirement.name)
        found[name] = max(*bounds, found.get(name, bounds[0]))
    return {name: str(version) for name, version in sorted(found.items())}


def pinned(constraints: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the version of each package in a file of constraints."""
    lines = [line.split("==") for line in constraints.read_text().splitlines() if line and not line.startswith("#")]
    versions = {canonicalize_name(name): version for name, version in lines}
    wanted = [canonicalize_name(name) for name in names]
    if missing := [name for name in wanted if name not in versions]:
        raise SystemExit(f"{constraints} does not pin {', '.join(missing)}")
    return {name: versions[name] for name in wanted}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the constraints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="*", help="of the project, whose packages to add")
    parser.add_argument("--keep", nargs="*", default=[], metavar="PACKAGE", help="take its pinned version")
    parser.add_argument("--project", type=Path, default=ROOT, help="the folder of pyproject.toml and constraints.txt")
    given = parser.parse_args(arguments)
    versions = oldest(requirements(given.project / "pyproject.toml", given.extras))
    versions |= pinned(given.project / "constraints.txt", given.keep) if given.keep else {}
    for name, version in versions.items():
        print(f"{name}=={version}")


if __name__ == "__main__":
    main()
