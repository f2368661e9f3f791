"""Attributes that are unset because a subclass does not call ``super().__init__()``."""

from typing import TYPE_CHECKING, Any

from lightning_fed.core.errors import FederatedError


class UnsetAttributeError(FederatedError, AttributeError):
    """An object lacks an attribute that a base class sets."""


class NamesUnset:
    """A mixin whose errors name the base class ``__init__`` that a subclass did not call."""

    if not TYPE_CHECKING:  # otherwise mypy would accept any attribute

        def __getattr__(self, name: str) -> Any:
            """Raise for a missing attribute."""
            cls = type(self)
            if hasattr(cls, name):  # the AttributeError of a property has led here
                return object.__getattribute__(self, name)
            inits = ((base, vars(base)["__init__"]) for base in cls.__mro__ if "__init__" in vars(base))
            for place, (base, init) in enumerate(inits):
                if place == 0:
                    first = base
                elif name in getattr(getattr(init, "__code__", None), "co_names", ()):
                    raise UnsetAttributeError(
                        f"{cls.__name__} has no attribute {name!r}, which {base.__name__}.__init__ sets. Call"
                        f" super().__init__(...) in {first.__name__}.__init__."
                    )
            raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}", name=name, obj=self)
