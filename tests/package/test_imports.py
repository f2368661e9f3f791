"""Rules on imports and files that `lint-imports` cannot express. The others are contracts in pyproject.toml."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "lightning_fed"
FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def private_names(path: Path) -> Iterator[str]:
    """Yield the private names of Lightning that a file reads as attributes of ``pl``."""
    private, text = r"\bpl((\.[a-z]\w*)*\._(?!_)|\.(loops|trainer|utilities|overrides))", path.read_text()
    for node in ast.walk(ast.parse(text)) if re.search(private, text) else ():
        if isinstance(node, ast.Attribute) and re.match(private, name := ast.unparse(node)):
            yield name


def test_private_lightning_names_are_imported_through_one_file() -> None:
    faults = [
        f"{name_of(path)} uses {name}: import it from compat/private.py"
        for path in FILES
        if name_of(path) != "compat/private.py"
        for name in private_names(path)
    ]
    assert not faults, "\n".join(faults)


def test_imports_are_absolute() -> None:
    relative = [name_of(path) for path in FILES if re.search(r"^\s*from\s+\.", path.read_text(), re.MULTILINE)]
    assert not relative, relative


def test_package_root_contains_only_its_entry_modules() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py", "_version.py"}


def test_no_file_is_named_utils() -> None:
    assert not [name_of(p) for p in FILES if p.stem in {"utils", "common", "helpers", "misc"}]
