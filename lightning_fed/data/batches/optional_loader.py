"""A loader that a data module has only while there is something to load."""

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any, NoReturn, TypeVar, cast

from lightning_fed.compat.package import pl

__all__ = ["defined_with_val"]

Method = TypeVar("Method", bound=Callable[..., Any])


class _DefinedWithVal:
    """Hides ``val_dataloader`` from Lightning while there is no validation set and none can come.

    Returning an empty list instead would make Lightning warn of a missing ``validation_step``, or of loaders of length
    zero, when nobody asked for validation. Lightning asks before ``setup``, so a module with a ``setup`` of its own
    always shows the method.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        if instance is None:
            return self._method
        if instance.val is not None or instance._overrides("setup", "prepare_data"):
            return MethodType(self._method, instance)

        @wraps(pl.LightningDataModule.val_dataloader)  # Lightning looks through `wraps`: the method is not overridden
        def absent() -> NoReturn:
            raise instance._missing("val")

        return absent


def defined_with_val(method: Method) -> Method:
    """Return a method that Lightning sees where its data module has a validation set, or may yet get one."""
    return cast("Method", _DefinedWithVal(method))
