"""Reduce a failing configuration to one with as few axes as possible off their defaults."""

from collections.abc import Callable
from dataclasses import replace

from tests.fuzz.configuration import Configuration

__all__ = ["shrink"]


def shrink(c: Configuration, fails: Callable[[Configuration], bool]) -> Configuration:
    """Reset one axis after the other to its default, as long as the configuration still fails.

    Args:
        c: A configuration that fails.
        fails: Returns whether a configuration fails in the same way.
    """
    defaults = Configuration()
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for name in c.changed:
            smaller = replace(c, **{name: getattr(defaults, name)})
            if fails(smaller):
                c, is_smaller = smaller, True
    return c
