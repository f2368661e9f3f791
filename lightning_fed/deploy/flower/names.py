"""The user's functions by name, so that one process can tell another which ones to call; no PyTorch here."""

import importlib
from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["Maker", "called", "named"]

Maker: TypeAlias = Callable[..., Any] | str
"""A function of the user's, or its name, ``"module:function"``."""


def named(what: str, maker: Maker) -> str:
    """Return the name of a function, ``"module:function"``.

    Args:
        what: What it makes, for the error.
        maker: The function, or its name already.

    Raises:
        FederatedError: If another process could not find it by a name.
    """
    if isinstance(maker, str):
        module, _, attribute = maker.partition(":")
        is_good = all(part.isidentifier() for part in (*module.split("."), attribute))
    else:
        module, attribute = getattr(maker, "__module__", ""), getattr(maker, "__qualname__", "")
        is_good = attribute.isidentifier() and module != "__main__"
    if not is_good:
        from lightning_fed.core.errors import FederatedError

        raise FederatedError(
            f"{what}={maker!r} is made in another process, which finds it by its name: give a function at the top of a"
            f' module of the app, or its name, such as {what}="hospital.task:{what}".'
        )
    return f"{module}:{attribute}"


def called(maker: Maker) -> Callable[..., Any]:
    """Return the function itself, imported if it is given by name.

    Args:
        maker: The function, or its name.

    Raises:
        FederatedError: If there is no function of that name.
    """
    if not isinstance(maker, str):
        return maker
    module, _, attribute = maker.partition(":")
    function = getattr(importlib.import_module(module), attribute, None)
    if not callable(function):
        from lightning_fed.core.errors import FederatedError

        raise FederatedError(f"The module {module} has no function {attribute}.")
    found: Callable[..., Any] = function
    return found
