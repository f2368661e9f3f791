"""Configurations parsed and checked as ``lightning-fed fit`` does."""

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
"""The keys that the configuration of a run has besides its parts."""


class _Parser(CellParts):
    """The parser alone."""

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse nothing yet."""
        self.config = Namespace(seed_everything=False)

    def instantiate_classes(self) -> None:
        """Make nothing yet."""


class _SavedParser(_Parser):
    """The parser that allows what the configuration of a run has besides its parts."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the keys."""
        for name in UNUSED:
            parser.add_argument(f"--{name}", type=Any, help=SUPPRESS)


class Configurations:
    """Check configurations, and complete them with all defaults.

    Args:
        of_saved: Whether the keys that the configuration of a run has besides its parts are allowed, and left out.
    """

    def __init__(self, of_saved: bool = False) -> None:
        self._parser = (_SavedParser if of_saved else _Parser)({}).parser
        self._made: set[str] = set()

    def complete(self, name: str, config: Config, args: Sequence[str] = ()) -> Config:
        """Return a configuration with the default of everything that it leaves out.

        Args:
            name: Whose it is, for messages.
            config: The configuration; none if ``args`` have it.
            args: Options of ``lightning-fed fit`` to put on top, such as ``["--model.lr", "0.1"]``, files included.

        Raises:
            FederatedError: If a key is unknown, or a value has the wrong type.
        """
        try:
            with redirect_stderr(StringIO()):
                parsed = self._parser.parse_object(deepcopy(config)) if config else None  # which it would change
                if args:
                    parsed = self._parser.parse_args(list(args), namespace=parsed)
            completed: Config = yaml.safe_load(self._parser.dump(parsed, skip_validation=True))
        except Exception as error:
            raise FederatedError(f"{name}: {refusal_in(error) or error}") from error
        for key in ("config", *UNUSED):
            completed.pop(key, None)
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

    The code of classes that are the user's own is part of it: an edited method is another one.

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
    """Return whether the data are a data set of ours that is the same in any folder, not files of the folder."""
    path = str(config.get("data", {}).get("class_path"))
    found = locate(path) if path.startswith("lightning_fed.") else None
    root = signature(found).parameters.get("root") if isinstance(found, type) else None
    return root is not None and root.default is not root.empty


def with_root(config: Config, root: str | None) -> Config:
    """Return a configuration whose data module, if it has a ``root``, finds its files there; None leaves it."""
    arguments = config.get("data", {}).get("init_args") or {}
    return config if root is None or "root" not in arguments else overlay(config, {"data.init_args.root": root})
