"""Read YAML files strictly: refuse duplicate and unknown keys, and read 1e-3 as a number."""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.yaml_keys import UniqueKeyLoader


class _Loader(UniqueKeyLoader):
    """A loader that reads 1e-3 as a number. PyYAML reads it as a string."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping that a YAML file holds.

    Raises:
        FederatedError: If the file cannot be read, or holds something else.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506  # a SafeLoader
    except OSError as error:
        raise FederatedError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FederatedError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise FederatedError(f"{path} must hold a mapping of keys to values, found {type(content).__name__}.")
    return content


def check_keys(where: str, found: Any, allowed: Iterable[str], required: Iterable[str] = ()) -> dict[str, Any]:
    """Check that a mapping has the required keys and only allowed ones, and return it.

    Raises:
        FederatedError: If it is not a mapping, or a key is missing or not allowed. The message names the key.
    """
    allowed, required = list(allowed), list(required)
    if not isinstance(found, Mapping):
        raise FederatedError(f"{where} must be a mapping with the keys {', '.join(allowed)}; found {found!r}.")
    for key in found:
        if key not in allowed:
            raise unknown(where, "key", key, allowed)
    if missing := [key for key in required if key not in found]:
        raise FederatedError(f"{where} lacks {', '.join(missing)}.")
    return dict(found)


def read_text(where: str, found: Any) -> str:
    """Return a text with single spaces.

    Raises:
        FederatedError: If it is something else.
    """
    if not isinstance(found, str):
        raise FederatedError(f"{where} must be a text, found {found!r}. Put numbers in quotes.")
    return " ".join(found.split())


def as_list(value: Any) -> list[Any]:
    """Return a list unchanged, and anything else as a list of one element."""
    return value if isinstance(value, list) else [value]


def unknown(where: str, kind: str, name: Any, allowed: Iterable[str]) -> FederatedError:
    """Return the error for a name that is not allowed, with the closest allowed name as a hint."""
    allowed = list(allowed)
    close = get_close_matches(str(name), allowed, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    known = f"Known: {', '.join(map(repr, allowed))}." if allowed else "There are none."
    return FederatedError(f"{where}: there is no {kind} {name!r}.{hint} {known}")
