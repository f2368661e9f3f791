"""Parse and check configurations the way ``lightning-fed fit`` does."""

import hashlib
import json
from argparse import SUPPRESS
from collections.abc import Sequence
from contextlib import redirect_stderr
from copy import deepcopy
from inspect import signature
from io import StringIO
from pydoc import locate
from typing import Any

import yaml
from jsonargparse import Namespace

from lightning_fed.cli.configuration import CellParts
from lightning_fed.cli.parser import ArgsType, LightningArgumentParser
from lightning_fed.core.errors import FederatedError, refusal_in
from lightning_fed.lab.overlays import Config, overlay
from lightning_fed.lab.own_code import own_code

UNUSED = ("ckpt_path", "weights_only")
"""Keys of a saved configuration besides its parts."""


class _Parser(CellParts):
    """A CLI that only builds its parser."""

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Skip parsing."""
        self.config = Namespace(seed_everything=False)

    def instantiate_classes(self) -> None:
        """Skip instantiation."""


class _SavedParser(_Parser):
    """The parser that also accepts the keys in ``UNUSED``."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the keys."""
        for name in UNUSED:
            parser.add_argument(f"--{name}", type=Any, help=SUPPRESS)


class Configurations:
    """Check configurations, and complete them with all defaults.

    Args:
        of_saved: Whether to accept the keys in ``UNUSED``, and drop them.
    """

    def __init__(self, of_saved: bool = False) -> None:
        self._parser = (_SavedParser if of_saved else _Parser)({}).parser
        self._made: set[str] = set()

    def complete(self, name: str, config: Config, args: Sequence[str] = ()) -> Config:
        """Return a configuration with defaults for all missing keys.

        Args:
            name: The name for messages.
            config: The configuration; empty if ``args`` have it.
            args: Options of ``lightning-fed fit`` that override it, such as ``["--model.lr", "0.1"]``, files included.

        Raises:
            FederatedError: If a key is unknown, or a value has the wrong type.
        """
        try:
            with redirect_stderr(StringIO()):
                # parse_object modifies its argument
                parsed = self._parser.parse_object(deepcopy(config)) if config else None
                if args:
                    parsed = self._parser.parse_args(list(args), namespace=parsed)
            completed: Config = yaml.safe_load(self._parser.dump(parsed, skip_validation=True))
        except Exception as error:
            raise FederatedError(f"{name}: {refusal_in(error) or error}") from error
        for key in ("config", *UNUSED):
            completed.pop(key, None)
        return completed

    def check(self, name: str, config: Config) -> None:
        """Instantiate each distinct trainer, model and data once, so that invalid arguments fail here.

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
    """Return a cell's name in a store: a hash of its complete configuration, without the folder of named data sets.

    The hash includes the code of the user's own classes, so an edited method gets a new name.

    Args:
        completed: The configuration with all defaults.

    Example:
        >>> mnist = {"class_path": "lightning_fed.data.MNIST", "init_args": {"root": "here"}}
        >>> key_of({"data": mnist}) == key_of({"data": {**mnist, "init_args": {"root": "there"}}})
        True
    """
    settings, code = with_root(completed, "" if _is_named(completed) else None), own_code(completed)
    text = json.dumps([settings, code] if code else settings, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=10).hexdigest()


def _is_named(config: Config) -> bool:
    """Return whether the data are a built-in data set, identical in any folder, rather than the folder's own files."""
    path = str(config.get("data", {}).get("class_path"))
    found = locate(path) if path.startswith("lightning_fed.") else None
    root = signature(found).parameters.get("root") if isinstance(found, type) else None
    return root is not None and root.default is not root.empty


def with_root(config: Config, root: str | None) -> Config:
    """Return a configuration with the ``root`` of its data module replaced, if it has one; None keeps the old one."""
    arguments = config.get("data", {}).get("init_args") or {}
    return config if root is None or "root" not in arguments else overlay(config, {"data.init_args.root": root})
