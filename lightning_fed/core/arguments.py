"""Arguments that are refused by name."""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

from lightning_fed.core.errors import FederatedError

__all__ = ["check_count", "check_fraction", "check_number", "check_one_of"]

Choice = TypeVar("Choice")


def check_count(owner: str, name: str, value: Any, least: int = 1) -> int:
    """Return an argument that must be an integer of at least ``least``.

    Raises:
        FederatedError: If it is not; the message names ``owner``, argument and value.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise FederatedError(f"{owner}({name}={value!r}): {name} must be an integer of at least {least}.")
    return int(value)


def check_number(owner: str, name: str, value: Any, least: float = -math.inf, positive: bool = False) -> float:
    """Return an argument that must be a finite number, of at least ``least`` or positive.

    Raises:
        FederatedError: If it is not; the message names ``owner``, argument and value.
    """
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not math.isfinite(number) or number < least or (positive and number <= 0):
        bound = "" if math.isinf(least) else f" of at least {least:g}"
        kind = "positive finite" if positive else "finite"
        raise FederatedError(f"{owner}({name}={value!r}): {name} must be a {kind} number{bound}.")
    return number


def check_fraction(owner: str, name: str, value: Any) -> float:
    """Return an argument that must be a share in [0, 1).

    Raises:
        FederatedError: If it is not; the message names ``owner``, argument and value.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < 1:
        raise FederatedError(f"{owner}({name}={value!r}): {name} must lie in [0, 1), such as 0.2.")
    return float(value)


def check_one_of(owner: str, name: str, value: Any, allowed: Sequence[Choice]) -> Choice:
    """Return an argument that must be one of a few values.

    Raises:
        FederatedError: If it is not; the message names ``owner``, argument, value and what is allowed.
    """
    if value not in allowed:
        raise FederatedError(f"{owner}({name}={value!r}): {name} must be {' or '.join(map(repr, allowed))}.")
    return allowed[allowed.index(value)]
