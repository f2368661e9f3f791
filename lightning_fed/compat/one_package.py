"""Objects of the Lightning package that is not in use: no trainer could tell what they are, so they are refused."""

import sys
from typing import Any

from lightning_fed.compat.package import NAMES, OTHER, REASON, USED, VARIABLE
from lightning_fed.core.errors import FederatedError

__all__ = ["advice_on_path", "refuse_foreign"]

_OF_OTHER = tuple(f"{module}." for module in NAMES[OTHER])


def refuse_foreign(*values: Any) -> None:
    """Refuse modules, callbacks and whatever else derives from a class of the package that is not in use.

    Args:
        values: What a user handed in; lists are looked into.

    Raises:
        FederatedError: Naming the class, both packages, why one of them is in use, and how to get out.
    """
    for value in values:
        if isinstance(value, list | tuple):
            refuse_foreign(*value)
        elif (advice := _advice_on(value)) is not None:
            raise FederatedError(advice)


def advice_on_path(path: str) -> str | None:
    """Return what to say of a class that a configuration names by its path; None if it is not of the other package."""
    if path.startswith(_OF_OTHER):
        return _advice(f"{path} is")
    module, _, name = path.rpartition(".")
    return _advice_on(getattr(sys.modules.get(module), name, None))


def _advice_on(value: Any) -> str | None:
    cls = value if isinstance(value, type) else type(value)
    base = next((base for base in cls.__mro__ if base.__module__.startswith(_OF_OTHER)), None)
    if base is None:
        return None
    path = f"{base.__module__}.{base.__qualname__}"
    return _advice(f"{path} is" if base is cls else f"{cls.__name__} derives from {path},")


def _advice(what: str) -> str:
    return (
        f"{what} a class of the package {OTHER}, while lightning_fed uses {USED}: {REASON}. Both hold the same classes"
        f" under two names, and a run takes those of one. Either write {NAMES[USED][0]} in place of {NAMES[OTHER][0]},"
        f" or let lightning_fed use {OTHER}: import it before lightning_fed is used, or set the environment variable"
        f" {VARIABLE}={OTHER}."
    )
