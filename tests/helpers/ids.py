"""Test names that are the same in every process: workers that share the tests must agree on them."""

import re
from typing import Any

__all__ = ["spelled"]


def spelled(value: Any) -> str:
    """Return a value as text, without the addresses of objects."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
