"""Which cases of a parametrized test are part of the default run; the others are behind the marker ``thorough``."""

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

__all__ = ["covering", "few"]


def few(cases: Iterable[Any], default: Collection[Any]) -> list[Any]:
    """Return the cases, of which the default run takes those named.

    Args:
        cases: Values, or ``pytest.param`` objects, whose first value or id may be named.
        default: The cases that the default run takes. Each must be there.
    """
    found, missing = [], list(default)
    for case in cases:
        names = [case.id, case.values[0]] if isinstance(case, _Param) else [case]
        known = [name for name in missing if any(name is value or name == value for value in names)]
        missing = [name for name in missing if name not in known]
        found.append(case if known else _thorough(case))
    assert not missing, f"no such cases: {missing}"
    return found


def covering(*axes: Sequence[Any]) -> list[Any]:
    """Return the product of several axes, of which the default run takes so many that every value is in one.

    The n-th of these cases has the n-th value of every axis, and shorter axes begin again.
    """
    longest = max(map(len, axes))
    chosen = {tuple(n % len(axis) for axis in axes) for n in range(longest)}
    places = itertools.product(*(range(len(axis)) for axis in axes))
    cases = ((place, pytest.param(*(axis[n] for axis, n in zip(axes, place, strict=True)))) for place in places)
    return [case if place in chosen else _thorough(case) for place, case in cases]


_Param = type(pytest.param())


def _thorough(case: Any) -> Any:
    values, marks, name = (case.values, case.marks, case.id) if isinstance(case, _Param) else ((case,), (), None)
    return pytest.param(*values, marks=[*marks, pytest.mark.thorough], id=name)
