"""Hash the user's code behind a configuration, so that a cell with an edited method or model is a new cell."""

import hashlib
import site
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_fed.lab.overlays import Config


def own_code(config: Config) -> dict[str, str]:
    """Return the source hash of each of the user's modules that a configuration names, by module name.

    Modules that these import are included. This package and installed ones are skipped: records have their versions.

    Args:
        config: A complete configuration, whose classes have been imported.
    """
    waiting = [found for text in _texts(config) if (found := _module_in(text)) is not None]
    hashes: dict[str, str] = {}
    for name in waiting:  # grows during the loop
        if name not in hashes and (read := _read(name)) is not None:
            hashes[name], imported = read
            waiting += imported
    return hashes


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def _module_in(text: str) -> str | None:
    """Return the imported module of an import path such as "mine.Method", or None for any other text."""
    parts = text.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1))
    return next((name for name in names if name in sys.modules), None)


@cache  # a process imports a module only once
def _read(name: str) -> tuple[str, list[str]] | None:
    """Return a module's source hash and the modules that it uses, or None if it is not the user's."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if file is None or name.partition(".")[0] == "lightning_fed" or any(map(Path(file).is_relative_to, _installed())):
        return None
    imported = [
        value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        for value in list(vars(module).values())
    ]
    digest = hashlib.blake2b(Path(file).read_bytes(), digest_size=8).hexdigest()
    return digest, [used for used in dict.fromkeys(imported) if isinstance(used, str)]


@cache
def _installed() -> list[str]:
    """Return the folders of the standard library and of installed packages."""
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    return [*map(sysconfig.get_path, kinds), *site.getsitepackages(), site.getusersitepackages()]
