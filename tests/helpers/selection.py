"""Selections of a parametrized test's cases for the default run. The other cases get the marker ``thorough``."""

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

__all__ = ["covering", "few"]


def few(cases: Iterable[Any], default: Collection[Any]) -> list[Any]:
    """Return all cases. Only the named ones are in the default run.

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
    """Return the product of several axes. The default run takes enough cases to cover every value.

    The n-th of these cases has the n-th value of every axis. Shorter axes repeat.
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
