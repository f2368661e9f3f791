"""The house rules on imports, kept by machine: one direction, and Lightning's private names in one file."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "lightning_fed"
FILES = sorted(PACKAGE.rglob("*.py"))
FLOORS = {
    "_lightning": -1, "_after_torch": -1,
    "_torchvision": 0, "_version": 0, "_compat": 0, "_lightning_cli": 0, "core": 0, "one_package": 1,
    "data": 1, "models": 1, "algorithms": 1, "metrics": 1,
    "callbacks": 2, "optim": 2, "cli_data": 2, "cli_new": 2,
    "server": 3,
    "monitors": 1, "stopping": 1,
    "checkpoint_contents": 1, "checkpoint_io": 1, "checkpoint_places": 2, "checkpoint_search": 3,
    "tracing": 1,
    "strategies": 2,
    "settings": 4, "settings_checks": 5,
    "engines": 5,
    "evaluation": 6, "shown_model": 6, "method_checks": 6, "module_checks": 6, "trainer_checks": 6,
    "rounds": 7, "client_states": 7,
    "inspection": 8, "restoring": 8, "trainer_arguments": 8, "trainer_calls": 8, "environment": 8, "threads": 1,
    "run_state": 9,
    "loop": 10, "connectors": 10,
    "trainer": 11,
    "cli_help": 3, "cli_parser": 4, "experiments": 12, "deploy": 13, "diagnosis": 13, "cli": 14,
    "__init__": 15, "__main__": 15,
}  # fmt: skip
PURE = (
    "core",
    "algorithms",
    "metrics",
    "optim",
    "server",
    "settings",
    "settings_checks",
    "tracing/in_place",
    "tracing/mean_proof",
    "tracing/passes",
    "data/partition",
    "data/dataset",
    "data/batches",
    "data/draws",
    "data/examples",
    "data/custom_batches",
    "data/counting",
    "data/random_states",
    "data/lazy_labels",
)
LIGHTNING = {"lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torchmetrics"}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> list[tuple[str, list[str]]]:
    """Return the modules that a file imports, with the names taken from them."""
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found += [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: import by full name"
            found.append((node.module or "", [alias.name for alias in node.names]))
    return found


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
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


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_imports_run_one_way() -> None:
    faults = []
    for path in FILES:
        for module, _ in imports(path):
            head, _, rest = module.partition(".")
            there = rest.split(".")[0]
            if head == "lightning_fed" and there not in ("", part(path)) and FLOORS[there] >= FLOORS[part(path)]:
                faults.append(f"{name_of(path)} imports {module}, which stands on the same floor or above")
    assert not faults, "\n".join(faults)


def test_no_files_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter({path: files(path) for path in FILES}).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(name_of(file) for file in reversed(error.args[1])))


def test_the_lower_floors_know_nothing_of_lightning() -> None:
    faults = [
        f"{name_of(path)} reaches {name_of(file)}, which imports {module}"
        for path in FILES
        if name_of(path).removesuffix(".py").startswith(PURE)
        for file in reached(path)
        for module, _ in imports(file)
        if module.split(".")[0] in LIGHTNING
    ]
    assert not faults, "\n".join(faults)


def private_names(path: Path) -> Iterator[str]:
    """Yield the private names of Lightning that a file reaches as attributes of ``pl``."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("pl."):
            name = ast.unparse(node)
            private_part = re.match(r"pl(\.[a-z]\w*)*\._(?!_)", name)
            if private_part or name.startswith(("pl.loops", "pl.trainer", "pl.utilities", "pl.overrides")):
                yield name


def test_one_file_decides_which_lightning_is_in_use() -> None:
    faults = [
        f"{name_of(path)} imports {module}: take pl from _lightning"
        for path in FILES
        if path.name != "_lightning.py"
        for module, _ in imports(path)
        if module.split(".")[0] in {"lightning", "lightning_fabric", "pytorch_lightning"}
    ]
    assert not faults, "\n".join(faults)


def test_private_names_of_lightning_come_in_through_one_file() -> None:
    faults = [
        f"{name_of(path)} uses {name}: take it from _compat"
        for path in FILES
        if path.name != "_compat.py"
        for name in private_names(path)
    ]
    assert not faults, "\n".join(faults)


def test_every_part_has_its_floor() -> None:
    assert {part(path) for path in FILES} == set(FLOORS)


def test_no_file_is_named_utils() -> None:
    assert not [p for p in FILES if p.stem in {"utils", "common", "helpers", "misc"}]
