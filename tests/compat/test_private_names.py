"""Every private name of another package is listed, and exists in the installed versions."""

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import lightning_fed
from lightning_fed.compat.package import NAMES, USED

PACKAGE = Path(lightning_fed.__file__).parent
TABLE = yaml.safe_load((PACKAGE / "compat" / "private_names.yaml").read_text())
LISTED = [(entry["owner"], name) for entry in TABLE for name in entry["names"].split()]
NOT_PRIVATE = {
    *("_exit", "_fields", "_make", "_replace"),  # the documentation of Python has these
    "_abc_impl",  # Python sets it on classes of `abc`
    *("_flat_weight", "_fork", "_spawn"),  # strings: prefixes of listed names, and suffixes of strategy names
}
SHARED = {"_overrides"}  # files of the package use these names of each other
PACKAGES = ("torch", "torchmetrics", "argparse", "jsonargparse", *(n for names in NAMES.values() for n in names))


def found(path: str) -> Any:
    """Return the module or class at a path."""
    head, *rest = path.split(".")
    value = importlib.import_module(NAMES[USED][0] if head == "pl" else head)
    for name in rest:
        value = getattr(value, name) if hasattr(value, name) else importlib.import_module(f"{value.__name__}.{name}")
    return value


def has(path: str, name: str) -> bool:
    """Return whether a module or class has an attribute, or sets it on its instances or on a function's arguments."""
    try:
        owner = found(path)
    except (AttributeError, ImportError):
        return False
    if hasattr(owner, name):
        return True
    assigned = re.compile(rf"\.{name}\b(?:: [^=\n]+)?(?:, [\w.]+)* = ")
    sources = [owner] if isinstance(owner, ModuleType) else [base for base in owner.__mro__ if base is not object]
    return any(assigned.search(inspect.getsource(source)) for source in sources)


@pytest.mark.thorough
def test_private_names_exist_in_the_installed_versions() -> None:
    gone = [f"{owner}.{name}" for owner, name in LISTED if not has(owner, name)]
    assert not gone, "lightning_fed/compat/private_names.yaml says what these are for, and what to put in their place"


@pytest.mark.parametrize("owner", ["pl.Trainer", "pl.trainer.setup", "pl.loops._Gone", "torch.nn.Module", "torch"])
def test_missing_private_name_is_detected(owner: str) -> None:
    assert not has(owner, "_not_there")


def test_each_name_is_listed_once_with_its_reason_and_replacement() -> None:
    assert len(set(LISTED)) == len(LISTED)
    assert all(entry.keys() == {"owner", "names", "why", "instead"} and all(entry.values()) for entry in TABLE)


def is_private(name: str) -> bool:
    return name.isidentifier() and name[0] == "_" and name[1:2] not in ("", "_") and name not in NOT_PRIVATE


def is_own(value: ast.expr) -> bool:
    """Return whether an object is of the class that contains the code."""
    return ast.unparse(value) in ("self", "cls", "super()")


def defined(tree: ast.Module) -> set[str]:
    """Return the names that a file defines, in its classes too."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            names.add(node.attr)
        if isinstance(node, ast.Module | ast.ClassDef):
            statements = [one for one in node.body if not isinstance(one, ast.FunctionDef | ast.ClassDef)]
            inside = (part for one in statements for part in ast.walk(one))
            names |= {part.id for part in inside if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    return names


def used(tree: ast.Module, by_package: set[str]) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each use of another package's private name in a file.

    These are names of other objects that the file itself does not define, names of ``self`` that nothing in the package
    defines, and imported ones. A string that looks like such a name counts too.
    """
    by_file = defined(tree)
    by_package = by_package | by_file
    within = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr] if node.attr not in (by_package if is_own(node.value) else by_file) else []
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("lightning_fed"):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in within:
            names = [node.value] if node.value not in by_file else []
        for name in names:
            if is_private(name):
                yield node.lineno, name


def overridden() -> Iterator[tuple[str, str]]:
    """Yield each class of the package with each private name of another package that it overrides."""
    for module in pkgutil.walk_packages([str(PACKAGE)], "lightning_fed."):
        if module.name.startswith(
            ("lightning_fed.deploy.flower", "lightning_fed.deploy.flare", "lightning_fed.__main__")
        ):
            continue  # Flower and NVFlare may be missing, and these files use only their public classes
        for cls in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(cls) and cls.__module__ == module.name:
                bases = [base for base in cls.__mro__ if base.__module__.startswith(tuple(f"{p}." for p in PACKAGES))]
                for name in filter(is_private, vars(cls)):
                    if any(name in vars(base) for base in bases):
                        yield f"{module.name}.{cls.__name__}", name


@pytest.mark.thorough
def test_private_names_used_by_the_package_are_listed() -> None:
    known = {name for _, name in LISTED} | {part for owner, _ in LISTED for part in owner.split(".")} | SHARED
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    by_package = set().union(*map(defined, trees.values()))
    unlisted = [
        f"{path.relative_to(PACKAGE.parent)}:{line} uses {name}"
        for path, tree in trees.items()
        for line, name in used(tree, by_package)
        if name not in known
    ]
    unlisted += [f"{path} overrides {name}" for path, name in overridden() if name not in known]
    assert not unlisted, "list these in lightning_fed/compat/private_names.yaml, or do without them"


@pytest.mark.parametrize(
    "code",
    [
        "import torch._hidden",
        "from torch._hidden import tracing",
        "from torch.nn import _hidden",
        "trainer._hidden.update()",
        "class Loop(Base):\n    def run(self):\n        return self._hidden",
        "class Loop(Base):\n    def run(self):\n        return super()._hidden()",
        "vars(callback).pop('_hidden')",
    ],
)
def test_every_use_of_a_private_name_is_found(code: str) -> None:
    assert [name for _, name in used(ast.parse(code), set())] == ["_hidden"]


@pytest.mark.parametrize(
    "code",
    [
        "class Loop(Base):\n    def _hidden(self): ...\nLoop()._hidden()",
        "class Loop(Base):\n    _hidden = 1\n    def run(self):\n        return self._hidden",
        "self._hidden = 1\nother._hidden",
        "from lightning_fed._hidden import one",
        "f'{stage}_hidden'",
    ],
)
def test_private_names_of_the_package_itself_are_ignored(code: str) -> None:
    assert not list(used(ast.parse(code), set()))
