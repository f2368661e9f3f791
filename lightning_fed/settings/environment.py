"""Trainer arguments from the environment: ``PL_TRAINER_MAX_ROUNDS=3``, as for Lightning's Trainer."""

import os
from ast import literal_eval
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from inspect import Parameter, signature
from typing import Any, TypeVar, cast

from lightning_fed.compat.package import pl
from lightning_fed.compat.private import rank_zero_info
from lightning_fed.core.errors import FederatedError

Init = TypeVar("Init", bound=Callable[..., None])

_PREFIX = "PL_TRAINER_"
_SAME = ("max_rounds", "max_epochs")  # two names for one number


def arguments_of_environment(own: Mapping[str, Parameter]) -> dict[str, Any]:
    """Return the arguments set by environment variables, of Lightning's trainer and our ``own``.

    As in Lightning, values are Python literals if valid, else text. ``max_rounds`` overrides ``max_epochs``; either is
    returned as ``max_rounds``.
    """
    names = {**own, **signature(pl.Trainer.__init__).parameters}
    found = {name: _value(text) for name in names if (text := os.environ.get(_PREFIX + name.upper()))}
    if "max_epochs" in found:
        found = {"max_rounds": found.pop("max_epochs"), **found}
    return found


def defaults_of_environment(make: Init) -> Init:
    """Wrap a trainer's ``__init__``, with keyword arguments only, to read missing arguments from the environment."""

    @wraps(make)
    def call(self: Any, **given: Any) -> None:
        known = given.keys() | (set(_SAME) if any(given.get(name) is not None for name in _SAME) else set())
        found = arguments_of_environment(signature(make).parameters)
        used = {name: value for name, value in found.items() if name not in known}
        if not used:
            make(self, **given)
            return
        listed = ", ".join(f"{name}={value!r}" for name, value in used.items())
        try:
            make(self, **used, **given)
        except FederatedError as error:
            raise FederatedError(f"{error} The environment ({_PREFIX}...) sets {listed}.") from error
        rank_zero_info(f"Arguments of the trainer from the environment ({_PREFIX}...): {listed}.")

    return cast(Init, call)


def _value(text: str) -> Any:
    with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return literal_eval(text)
    return text
