"""Marks that skip tests if an optional package is not installed."""

from importlib.util import find_spec

import pytest

__all__ = ["needs_matplotlib", "needs_opacus", "needs_pyarrow"]


def _needs(package: str, extra: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f'no {package}: pip install "lightning_fed[{extra}]"')


needs_matplotlib = _needs("matplotlib", "plots")
needs_opacus = _needs("opacus", "privacy")
needs_pyarrow = _needs("pyarrow", "tables")
