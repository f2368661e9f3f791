"""The house rules on imports, kept by machine: one direction, and Lightning's private names in one file."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lightning_fed"
FILES = sorted(PACKAGE.rglob("*.py"))
FLOORS = {
    "_torchvision": 0, "_version": 0, "_compat": 0, "core": 0,
    "data": 1, "models": 1, "algorithms": 1, "metrics": 1,
    "callbacks": 2, "optim": 2, "cli_data": 2,
    "server": 3,
    "stopping": 1, "checkpoint_io": 1, "checkpoint_places": 2,
    "strategies": 2,
    "settings": 4,
    "engines": 5,
    "checks": 5, "method_checks": 5, "restoring": 5,
    "loop": 6, "connectors": 6,
    "trainer_arguments": 5, "trainer_calls": 5,
    "trainer": 7,
    "cli_parser": 4, "experiments": 8, "cli": 9,
    "__init__": 10, "__main__": 10,
}  # fmt: skip
PURE = (
    "core",
    "algorithms",
    "metrics",
    "optim",
    "server",
    "settings",
    "data/partition",
    "data/dataset",
    "data/batches",
    "data/draws",
    "data/examples",
    "data/custom_batches",
)
LIGHTNING = {"lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torchmetrics"}


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


def files(path: Path) -> set[Path]:
    """Return the files of the package that a file imports."""
    dotted = {name for module, names in imports(path) for name in (module, *(f"{module}.{n}" for n in names))}
    inside = [PACKAGE.parent.joinpath(*name.split(".")) for name in dotted if name.startswith("lightning_fed")]
    return {file for stem in inside for file in (stem.with_suffix(".py"), stem / "__init__.py") if file in FILES}


def reached(path: Path) -> set[Path]:
    """Return a file and all files of the package that it imports, directly or not."""
    found, new = {path}, {path}
    while new:
        new = {file for known in new for file in files(known)} - found
        found |= new
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_one_way(path: Path) -> None:
    for module, _ in imports(path):
        head, _, rest = module.partition(".")
        if head != "lightning_fed" or not rest:
            continue
        there = rest.split(".")[0]
        assert there == part(path) or FLOORS[there] < FLOORS[part(path)], (
            f"{part(path)} imports {module}, which stands on the same floor or above"
        )


def test_no_files_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter({path: files(path) for path in FILES}).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(str(file.relative_to(PACKAGE)) for file in reversed(error.args[1])))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_lower_floors_know_nothing_of_lightning(path: Path) -> None:
    name = str(path.relative_to(PACKAGE)).removesuffix(".py")
    if not name.startswith(PURE):
        return
    for file in reached(path):
        found = [m for m, _ in imports(file) if m.split(".")[0] in LIGHTNING]
        assert not found, f"{name} reaches {file.relative_to(PACKAGE)}, which imports {found}"


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
        for name in (module, *(f"{module}.{n}" for n in names)):
            assert not name.startswith(private), f"{path.name} imports {name}: take it from _compat"
            if name.startswith("pytorch_lightning"):
                assert "._" not in name, f"{path.name} imports the private {name}: take it from _compat"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pl":
            name = f"pytorch_lightning.{node.attr}"
            assert not name.startswith((*private, "pytorch_lightning._", "pytorch_lightning.trainer")), (
                f"{path.name} uses {name}: take it from _compat"
            )


def test_every_part_has_its_floor() -> None:
    assert {part(path) for path in FILES} == set(FLOORS)


def test_no_file_is_named_utils() -> None:
    assert not [p for p in FILES if p.stem in {"utils", "common", "helpers", "misc"}]
