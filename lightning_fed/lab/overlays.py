"""Apply overrides to configurations."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, TypeAlias

from lightning_fed.core.errors import FederatedError

Config: TypeAlias = dict[str, Any]
"""The content of a YAML file for ``lightning-fed fit``."""


def overlay(config: Mapping[str, Any], *overrides: Mapping[str, Any]) -> Config:
    """Return a configuration with overrides applied in order. The arguments are not modified.

    Mappings are merged, except that another ``class_path`` replaces an object with its ``init_args``. Everything else
    is replaced. A key that ends in ``+`` appends to a list.

    Args:
        config: The configuration.
        overrides: The overrides; keys may be dotted.

    Raises:
        FederatedError: If a key is invalid, leads into a value without keys, or appends to a value that is not a list.

    Example:
        >>> overlay({"model": {"class_path": "Net", "init_args": {"lr": 0.1, "dim": 2}}}, {"model.init_args.lr": 1.0})
        {'model': {'class_path': 'Net', 'init_args': {'lr': 1.0, 'dim': 2}}}
        >>> overlay({"model": {"class_path": "Net", "init_args": {"lr": 0.1}}}, {"model": {"class_path": "Other"}})
        {'model': {'class_path': 'Other'}}
    """
    result = deepcopy(dict(config))
    for one in overrides:
        _put_all(result, one)
    return result


def _put_all(config: Config, overrides: Mapping[str, Any]) -> None:
    for key, value in overrides.items():
        if not isinstance(key, str) or not all(key.split(".")):
            raise FederatedError(f"{key!r} is not a key of a configuration; expected names joined by dots.")
        _put(config, key, value)


def _put(config: Config, key: str, value: Any) -> None:
    *path, last = key.split(".")
    node = config
    for i, part in enumerate(path):
        node = _inner(node, part, key=".".join(path[: i + 1]), whole=key)
    if last.endswith("+"):
        last = last[:-1]
        old, new = node.get(last) or [], value if isinstance(value, list) else [value]
        if not isinstance(old, list):
            raise FederatedError(f"{key!r} appends to a list, and there is {old!r}.")
        node[last] = [*old, *deepcopy(new)]
    elif isinstance(value, Mapping):
        old = node.get(last)
        if isinstance(old, str) and "class_path" not in value:
            old = {"class_path": old}
        node[last] = old if isinstance(old, dict) and not _is_another(old, value) else {}
        _put_all(node[last], value)
    else:
        node[last] = deepcopy(value)


def _inner(node: Config, part: str, key: str, whole: str) -> Config:
    """Return the mapping at a part of a key, created if missing. A class given only by its name becomes a mapping."""
    if isinstance(node.get(part), str):
        node[part] = {"class_path": node[part]}
    if node.get(part) is None:
        node[part] = {}
    if not isinstance(node[part], dict):
        raise FederatedError(f"{whole!r} leads into {key!r}, which is {node[part]!r} and has no keys.")
    inner: Config = node[part]
    return inner


def _is_another(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return whether two descriptions of objects have different classes. Module names are not compared."""
    if "class_path" not in new or "class_path" not in old:
        return "class_path" in new
    return str(old["class_path"]).rpartition(".")[2] != str(new["class_path"]).rpartition(".")[2]
