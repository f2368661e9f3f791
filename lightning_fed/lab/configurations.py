"""Configurations: overridden, and parsed and checked as ``lightning-fed fit`` does."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from copy import deepcopy
from inspect import signature
from io import StringIO
from pydoc import locate
from typing import Any, TypeAlias

import yaml
from jsonargparse import Namespace

from lightning_fed.cli.configuration import CellParts
from lightning_fed.cli.parser import ArgsType, LightningArgumentParser, refusal_in
from lightning_fed.core.errors import FederatedError

__all__ = ["Config", "Configurations", "key_of", "overlay", "with_root"]

Config: TypeAlias = dict[str, Any]
"""What a YAML file of ``lightning-fed fit`` holds."""


class _Parser(CellParts):
    """The parser alone."""

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse nothing yet."""
        self.config = Namespace(seed_everything=False)

    def instantiate_classes(self) -> None:
        """Make nothing yet."""


class Configurations:
    """Check configurations, and complete them with all defaults."""

    def __init__(self) -> None:
        self._parser = _Parser({}).parser
        self._made: set[str] = set()

    def complete(self, name: str, config: Config, args: Sequence[str] = ()) -> Config:
        """Return a configuration with the default of everything that it leaves out.

        Args:
            name: Whose it is, for messages.
            config: The configuration.
            args: Options of ``lightning-fed fit`` to put on top, such as ``["--model.lr", "0.1"]``.

        Raises:
            FederatedError: If a key is unknown, or a value has the wrong type.
        """
        try:
            with redirect_stderr(StringIO()):
                parsed = self._parser.parse_object(deepcopy(config))  # which it would change
                if args:
                    parsed = self._parser.parse_args(list(args), namespace=parsed)
            completed: Config = yaml.safe_load(self._parser.dump(parsed, skip_validation=True))
        except Exception as error:
            raise FederatedError(f"{name}: {refusal_in(error) or error}") from error
        completed.pop("config", None)
        return completed

    def check(self, name: str, config: Config) -> None:
        """Make trainer, model and data once of every kind, so that what their classes refuse is refused here.

        Raises:
            FederatedError: If one cannot be made.
        """
        parts = {
            json.dumps([part, config.get(part)], sort_keys=True, default=str) for part in ("model", "data", "trainer")
        }
        if parts <= self._made:
            return
        try:
            with redirect_stderr(StringIO()):
                CellParts(config)
        except Exception as error:
            raise FederatedError(f"{name}: {refusal_in(error) or error}") from error
        self._made |= parts


def key_of(completed: Config) -> str:
    """Return the name of a cell in a store: a hash of its complete configuration, without where named data sets lie.

    Args:
        completed: The configuration with all defaults.

    Example:
        >>> mnist = {"class_path": "lightning_fed.data.MNIST", "init_args": {"root": "here"}}
        >>> key_of({"data": mnist}) == key_of({"data": {**mnist, "init_args": {"root": "there"}}})
        True
    """
    text = json.dumps(with_root(completed, "" if _is_named(completed) else None), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=10).hexdigest()


def _is_named(config: Config) -> bool:
    """Whether the data are a data set of ours that is the same in whatever folder, and not what lies in the folder."""
    path = str(config.get("data", {}).get("class_path"))
    found = locate(path) if path.startswith("lightning_fed.") else None
    root = signature(found).parameters.get("root") if isinstance(found, type) else None
    return root is not None and root.default is not root.empty


def with_root(config: Config, root: str | None) -> Config:
    """Return a configuration whose data module, if it has a ``root``, finds its files there; None leaves it."""
    arguments = config.get("data", {}).get("init_args") or {}
    return config if root is None or "root" not in arguments else overlay(config, {"data.init_args.root": root})


def overlay(config: Mapping[str, Any], *overrides: Mapping[str, Any]) -> Config:
    """Return a configuration with overrides on top, one after the other; none of them is changed.

    Mappings are merged, except that another ``class_path`` replaces an object with its ``init_args``. Everything else
    is replaced. A key that ends in ``+`` appends to a list.

    Args:
        config: The configuration.
        overrides: The overrides; keys may be dotted.

    Raises:
        FederatedError: If a key leads into something that has no keys.

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
            raise FederatedError(f"{key!r} is no key of a configuration; expected names joined by dots.")
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
    """Return the mapping at a part of a key, made if there is none; a class given by its name alone becomes one."""
    if isinstance(node.get(part), str):
        node[part] = {"class_path": node[part]}
    if node.get(part) is None:
        node[part] = {}
    if not isinstance(node[part], dict):
        raise FederatedError(f"{whole!r} leads into {key!r}, which is {node[part]!r} and has no keys.")
    inner: Config = node[part]
    return inner


def _is_another(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether two descriptions of objects are of different classes; a class may be named without its module."""
    if "class_path" not in new or "class_path" not in old:
        return "class_path" in new
    return str(old["class_path"]).rpartition(".")[2] != str(new["class_path"]).rpartition(".")[2]
