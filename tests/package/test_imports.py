"""Rules on imports and files that `lint-imports` cannot express; pyproject.toml has the contracts that it can."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "lightning_fed"
FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@cache
def nodes(path: Path) -> list[ast.AST]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute | ast.ImportFrom)]


def private_names(path: Path) -> Iterator[str]:
    """Yield the private names of Lightning that a file reads as attributes of ``pl``."""
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and (name := ast.unparse(node)).startswith("pl."):
            private_part = re.match(r"pl(\.[a-z]\w*)*\._(?!_)", name)
            if private_part or name.startswith(("pl.loops", "pl.trainer", "pl.utilities", "pl.overrides")):
                yield name


def test_private_names_of_lightning_come_in_through_one_file() -> None:
    faults = [
        f"{name_of(path)} uses {name}: import it from compat/private.py"
        for path in FILES
        if name_of(path) != "compat/private.py"
        for name in private_names(path)
    ]
    assert not faults, "\n".join(faults)


def test_imports_give_the_full_name() -> None:
    relative = [
        f"{name_of(path)}:{node.lineno}"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative, relative


def test_only_the_package_itself_is_loose_in_its_root() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py", "_version.py"}


def test_no_file_is_named_utils() -> None:
    assert not [name_of(p) for p in FILES if p.stem in {"utils", "common", "helpers", "misc"}]
