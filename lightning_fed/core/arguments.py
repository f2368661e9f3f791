"""Checks of arguments. Each raises a :class:`FederatedError` with owner, argument and value."""

import inspect
import math
import os
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

from lightning_fed.core.errors import FederatedError
from lightning_fed.core.unset import NamesUnset

Choice = TypeVar("Choice")

_LARGEST = 2**63 - 1  # the largest size of a tensor
_ANY = "(-inf, inf)"


def finite(value: Any) -> float:
    """Return a finite real number as a float, and NaN for anything else, including truth values and text.

    Example:
        >>> finite(3), finite("3"), finite(10**400)
        (3.0, nan, nan)
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        found = float(value)
    except OverflowError:
        return math.nan
    return found if math.isfinite(found) else math.nan


def kind_of(value: object) -> str:
    """Return the name of a value's class with its article, for messages.

    Example:
        >>> kind_of([]), kind_of(3)
        ('a list', 'an int')
    """
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def _refusal(owner: object, name: str, value: Any, rule: str) -> FederatedError:
    """Return the error for an argument that breaks a rule; ``owner`` is the object that takes it, or its name."""
    of = owner if isinstance(owner, str) else type(owner).__name__
    return FederatedError(f"{of}({name}={format_value(value)}): {name} must {rule}.")


def check_count(owner: object, name: str, value: Any, least: int = 1, most: int = _LARGEST) -> int:
    """Return an argument that must be an integer of at least ``least``, and at most ``most``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise _refusal(owner, name, value, f"be an integer of at least {least}")
    if int(value) > most:
        limit = f"{most:,}" if most < _LARGEST else f"2**{most.bit_length()} - 1"
        raise _refusal(owner, name, value, f"be an integer of at most {limit}")
    return int(value)


def check_seed(owner: object, value: Any) -> int:
    """Return an argument ``seed``, which must be an integer of at least 0 and at most 128 bits."""
    return check_count(owner, "seed", value, least=0, most=2**128 - 1)


def check_number(owner: object, name: str, value: Any, interval: str = _ANY) -> float:
    """Return an argument that must be a finite number in an interval, such as ``"[0, 1)"`` or ``"(0, inf)"``.

    Example:
        >>> from lightning_fed.algorithms.base_optimizers import SGDm
        >>> check_number(SGDm(), "beta", 1, "[0, 1)")
        Traceback (most recent call last):
        lightning_fed.core.errors.FederatedError: SGDm(beta=1): beta must be a finite number in [0, 1).
    """
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    found = finite(value)  # no interval contains NaN
    above = found >= low if interval[0] == "[" else found > low
    below = found <= high if interval[-1] == "]" else found < high
    if above and below:
        return found
    raise _refusal(owner, name, value, "be a finite number" + ("" if interval == _ANY else f" in {interval}"))


def check_numbers(owner: object, name: str, value: Any) -> list[float]:
    """Return an argument that must be a list of finite numbers."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise _refusal(owner, name, value, "be a list of finite numbers")
    return [check_number(owner, name, entry) for entry in value]


def check_one_of(owner: object, name: str, value: Any, allowed: Sequence[Choice]) -> Choice:
    """Return an argument that must be one of a few values."""
    for one in allowed:
        if type(value) is type(one) and value == one:  # 1 is not True
            return one
    raise _refusal(owner, name, value, f"be {' or '.join(map(repr, allowed))}")


def check_flags(owner: object, **flags: Any) -> None:
    """Raise if an argument, given by name, is not True or False."""
    for name, value in flags.items():
        check_one_of(owner, name, value, (True, False))


def check_texts(owner: object, **texts: Any) -> None:
    """Raise if an argument, given by name, is not a non-empty string."""
    for name, value in texts.items():
        if not isinstance(value, str) or not value:
            raise _refusal(owner, name, value, "be a string, and not an empty one")


def check_paths(owner: object, **paths: Any) -> None:
    """Raise if an argument, given by name, is not a path; the file need not exist."""
    for name, value in paths.items():
        if not isinstance(value, str | os.PathLike) or not os.fspath(value) or isinstance(os.fspath(value), bytes):
            raise _refusal(owner, name, value, "be a path, as a string or a Path")


def check_patterns(owner: object, patterns: Any, least: int = 0, name: str = "personal") -> tuple[str, ...]:
    """Return the names, or patterns of names, of parameters and buffers."""
    fits = isinstance(patterns, Sequence) and not isinstance(patterns, str)
    if not fits or len(patterns) < least or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        rule = "be a list of names of parameters, or of patterns of them, such as ['head.*']"
        raise _refusal(owner, name, patterns, rule)
    return tuple(patterns)


class ArgumentsRepr(NamesUnset):
    """A mixin with a repr as Python code, from the attributes named like the arguments.

    Example:
        >>> class Draw(ArgumentsRepr):
        ...     def __init__(self, count, rate=0.5):
        ...         self.count, self.rate = count, rate
        >>> Draw(3)
        Draw(count=3, rate=0.5)
    """

    _positional = 0  # number of arguments shown without names

    def __repr__(self) -> str:
        """Return the call with the arguments that are also attributes."""
        own = [(name, vars(self)[name]) for name in inspect.signature(type(self)).parameters if name in vars(self)]
        parts = [repr(value) for _, value in own[: self._positional]]
        parts += [f"{name}={value!r}" for name, value in own[self._positional :]]
        return f"{type(self).__name__}({', '.join(parts)})"


def format_value(value: Any) -> str:
    """Return a value as short text; Python does not convert integers of more than a few thousand digits."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length():,} bits"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
