"""The house rules on imports, kept by machine: one direction, and Lightning's private names in one file."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lightning_fed"
FILES = sorted(PACKAGE.rglob("*.py"))
FLOORS = {
    "_torchvision": 0, "_version": 0, "_compat": 0, "core": 0,
    "data": 1, "models": 1, "algorithms": 1,
    "optim": 2,
    "server": 3,
    "settings": 4, "callbacks": 4, "engines": 4,
    "checks": 5, "connectors": 5,
    "loop": 6,
    "trainer": 7,
    "cli": 8,
    "__init__": 9, "__main__": 9,
}  # fmt: skip
PURE = ("core", "algorithms", "optim", "server", "settings", "data/partition", "data/dataset", "data/batches")


def imports(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the modules that a file imports, with the names taken from them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: import by full name"
            yield node.module or "", [alias.name for alias in node.names]


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_one_way(path: Path) -> None:
    for module, _ in imports(path):
        head, _, rest = module.partition(".")
        if head != "lightning_fed" or not rest:
            continue
        there = rest.split(".")[0]
        assert (
            there == part(path)
            or FLOORS[there] < FLOORS[part(path)]
            or (part(path), there)
            in {
                ("engines", "callbacks"),
            }
        ), f"{part(path)} imports {module}, which stands on the same floor or above"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_lower_floors_know_nothing_of_lightning(path: Path) -> None:
    name = str(path.relative_to(PACKAGE)).removesuffix(".py")
    if not name.startswith(PURE):
        return
    found = [m for m, _ in imports(path) if m.split(".")[0] in {"pytorch_lightning", "lightning_fabric", "lightning"}]
    assert not found, f"{name} imports {found}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_private_names_of_lightning_come_in_through_one_file(path: Path) -> None:
    if path.name == "_compat.py":
        return
    private = (
        "pytorch_lightning.loops",
        "pytorch_lightning.trainer.",
        "pytorch_lightning.utilities",
        "lightning_fabric",
    )
    for module, names in imports(path):
        assert not module.startswith(private), f"{path.name} imports {module}: take it from _compat"
        if module.startswith("pytorch_lightning"):
            assert not [n for n in names if n.startswith("_")], f"{path.name} imports private names of {module}"


def test_every_part_has_its_floor() -> None:
    assert {part(path) for path in FILES} == set(FLOORS)


def test_no_file_is_named_utils() -> None:
    assert not [p for p in FILES if p.stem in {"utils", "common", "helpers", "misc"}]
