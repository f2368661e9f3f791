"""Invalid arguments are refused by name."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_fed.core.arguments import (
    check_count,
    check_flags,
    check_number,
    check_numbers,
    check_one_of,
    check_paths,
    check_patterns,
    check_seed,
    check_texts,
    finite,
    format_value,
    kind_of,
)
from lightning_fed.core.errors import FederatedError

HUGE = 10**400
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: check_count("O", "n", 0), r"O\(n=0\): n must be an integer of at least 1\."),
    (lambda: check_count("O", "n", True), r"O\(n=True\): n must be an integer of at least 1\."),
    (lambda: check_count("O", "n", 2.0), r"O\(n=2\.0\): n must be an integer"),
    (lambda: check_count("O", "n", 7, most=6), r"O\(n=7\): n must be an integer of at most 6\."),
    (lambda: check_count("O", "n", 1001, most=1000), "at most 1,000"),
    (lambda: check_count("O", "n", HUGE), r"O\(n=an integer of 1,329 bits\): .* at most 2\*\*63 - 1"),
    (lambda: check_seed("O", -1), r"O\(seed=-1\): seed must be an integer of at least 0"),
    (lambda: check_seed("O", 2**128), r"at most 2\*\*128 - 1"),
    (lambda: check_number("O", "x", math.nan), r"O\(x=nan\): x must be a finite number\."),
    (lambda: check_number("O", "x", "1"), r"O\(x='1'\): x must be a finite number\."),
    (lambda: check_number("O", "x", HUGE), "an integer of 1,329 bits.*finite number"),
    (lambda: check_numbers("O", "x", "12"), "x must be a list of finite numbers"),
    (lambda: check_numbers("O", "x", [1, math.inf]), r"O\(x=inf\): x must be a finite number"),
    (lambda: check_one_of("O", "x", 1, (True, "a")), r"O\(x=1\): x must be True or 'a'\."),
    (lambda: check_flags("O", a=True, b=0), r"O\(b=0\): b must be True or False"),
    (lambda: check_texts("O", a="x", b=""), r"O\(b=''\): b must be a string, and not an empty one"),
    (lambda: check_paths("O", a=b"x"), r"O\(a=b'x'\): a must be a path"),
    (lambda: check_paths("O", a=""), "a must be a path"),
    (lambda: check_patterns("O", "head.*"), r"O\(personal='head\.\*'\): personal must be a list"),
    (lambda: check_patterns("O", [], least=1), "personal must be a list"),
    (lambda: check_patterns("O", ["a", ""]), "personal must be a list"),
    (lambda: check_number([], "mu", 1, "[0, 1)"), r"list\(mu=1\): mu must be a finite number in \[0, 1\)\."),
    (lambda: check_number([], "mu", 0, "(0, inf)"), r"mu must be a finite number in \(0, inf\)"),
    (lambda: check_number([], "mu", math.inf, "[0, inf]"), "mu must be a finite number"),
    (lambda: check_one_of([], "kind", "c", ("a", "b")), r"list\(kind='c'\): kind must be 'a' or 'b'\."),
]


def test_invalid_argument_error_names_owner_argument_and_value() -> None:
    for number_of_case, (call, message) in enumerate(REFUSED):
        try:
            found = call()
        except FederatedError as error:
            assert re.search(message, str(error)), f"case {number_of_case}: {error}"  # noqa: PT017
        else:
            pytest.fail(f"case {number_of_case} is taken as {found!r}: {message}")


def test_valid_arguments_are_returned_as_plain_values() -> None:
    assert [type(check_count("O", "n", np.int64(3))), check_count("O", "n", 3, least=3, most=3)] == [int, 3]
    assert check_seed("O", 2**128 - 1) == 2**128 - 1
    assert check_number("O", "x", np.float32(0.5), "[0.5, 1]") == 0.5
    assert check_numbers("O", "x", (1, 2.5)) == [1.0, 2.5]
    assert check_one_of("O", "x", "a", (True, "a")) == "a"
    assert check_patterns("O", ["head.*", "b"]) == ("head.*", "b")
    assert (check_number([], "x", 1, "[0, 1]"), check_number([], "x", 0, "[0, 1)")) == (1.0, 0.0)
    check_flags("O", a=True, b=False)
    check_texts("O", a="x")
    check_paths("O", a="x", b=Path("y"))


def test_finite_accepts_only_finite_real_numbers() -> None:
    assert [finite(value) for value in (3, -0.5, np.float64(2))] == [3.0, -0.5, 2.0]
    assert all(math.isnan(finite(value)) for value in (True, "3", None, math.inf, math.nan, HUGE, 1j))


def test_values_are_shown_on_one_line() -> None:
    assert format_value("a") == "'a'"
    assert len(format_value("a" * 1000)) == 200
    assert [kind_of(value) for value in ([], 3, None)] == ["a list", "an int", "a NoneType"]
