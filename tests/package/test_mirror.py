"""Tests mirror the package: ``lightning_fed/<room>/<module>.py`` has ``tests/<room>/test_<module>.py``.

The table below lists modules that are tested in a file of another name.
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE, TESTS = ROOT / "lightning_fed", ROOT / "tests"
ELSEWHERE = {
    "cli/commands.py": "tests/cli/test_main.py",
    "cli/stages.py": "tests/cli/test_main.py",
    "compat/choice.py": "tests/compat/test_package.py",
    "lab/overlays.py": "tests/lab/test_configurations.py",
    "compat/after_torch.py": "tests/package/test_lazy_imports.py",
    "compat/private.py": "tests/package/test_imports.py",
    "compat/torchvision.py": "tests/package/test_lazy_imports.py",
    "core/types.py": "tests/package/test_imports.py",
}
"""By module, the file that holds its tests."""

SHARE = 0.9  # the minimum share of modules with a test of their name


def modules() -> list[Path]:
    """Return the modules of the package's rooms, relative to it."""
    found = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
    return sorted(path for path in found if len(path.parts) > 1 and path.name != "__init__.py")


def place_of_test(module: Path) -> Path:
    return TESTS / module.parent / f"test_{module.name}"


def without_test(module: Path) -> bool:
    return not place_of_test(module).exists() and module.as_posix() not in ELSEWHERE


def test_every_module_has_a_matching_test_or_a_table_entry() -> None:
    lacking = [m for m in modules() if without_test(m)]
    lines = (
        f"lightning_fed/{m}: write {place_of_test(m).relative_to(ROOT)}, or name its tests in ELSEWHERE"
        for m in lacking
    )
    assert not lacking, "\n".join(lines)


def test_table_lists_only_modules_without_tests_and_existing_files() -> None:
    known = {module.as_posix(): module for module in modules()}
    faults = [f"{name} does not exist" for name in ELSEWHERE if name not in known]
    faults += [
        f"{name} has {place_of_test(m)} now"
        for name, m in known.items()
        if name in ELSEWHERE and place_of_test(m).exists()
    ]
    faults += [f"{name}: there is no {file}" for name, file in ELSEWHERE.items() if not (ROOT / file).is_file()]
    assert not faults, "\n".join(faults)


def test_nearly_all_modules_have_a_matching_test() -> None:
    found = modules()
    assert sum(place_of_test(module).exists() for module in found) >= SHARE * len(found)
