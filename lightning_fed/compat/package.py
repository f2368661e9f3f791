"""The Lightning package in use, ``lightning`` or ``pytorch_lightning``; only this file imports it.

The two packages contain the same code under two names, so their classes differ. All of lightning_fed imports Lightning
from here, as ``pl``. The package in use is the one imported before the first use of a class of lightning_fed, else the
one that the environment variable names, else the installed one. If both are installed, it is ``lightning``, which
depends on the other one. The variable is then set for child processes. Objects of the other package raise, since no
trainer could recognize them.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from lightning_fed.compat.choice import NAMES, OTHER, REASON, SERIES, USED, VARIABLE, choose

__all__ = [
    "NAMES",
    "OTHER",
    "SERIES",
    "USED",
    "VARIABLE",
    "advice_on_path",
    "choose",
    "install_command",
    "pl",
    "refuse_foreign",
]


def install_command() -> str:
    """Return the command that installs a tested version of the package in use."""
    return f"pip install '{USED.replace('_', '-')}=={SERIES}.*'"


if TYPE_CHECKING:  # the types are equal in both; a checker only sees modules imported by name
    import pytorch_lightning as pl
    import pytorch_lightning.cli
    import pytorch_lightning.overrides.distributed
    import pytorch_lightning.plugins.io
    import pytorch_lightning.trainer.connectors.checkpoint_connector
    import pytorch_lightning.trainer.connectors.logger_connector.logger_connector
    import pytorch_lightning.trainer.connectors.logger_connector.result
    import pytorch_lightning.trainer.connectors.signal_connector  # noqa: F401
else:
    try:
        pl = importlib.import_module(NAMES[USED][0])
    except ModuleNotFoundError as error:
        if error.name not in (USED, NAMES[USED][0]):
            raise
        raise ImportError(
            f"lightning_fed is to use the package {USED}, since {REASON}, but it is not installed."
            f" Install it: {install_command()}."
        ) from error
os.environ[VARIABLE] = USED

_OF_OTHER = tuple(f"{module}." for module in NAMES[OTHER])


def refuse_foreign(*values: Any) -> None:
    """Raise if a user's modules, callbacks or other objects, also in lists, are from the other package."""
    from lightning_fed.core.errors import FederatedError  # lazily: only needed with a user's objects

    for value in values:
        if isinstance(value, list | tuple):
            refuse_foreign(*value)
        elif (advice := _advice_on(value)) is not None:
            raise FederatedError(advice)


def advice_on_path(path: str) -> str | None:
    """Return the advice for a class path in a configuration, or None if it is not from the other package."""
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
