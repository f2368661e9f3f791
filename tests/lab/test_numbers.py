"""Numbers as pages show them."""

import math

from hypothesis import given
from hypothesis import strategies as st

from lightning_fed.lab.numbers import format_number, p_text, with_spread


@given(st.floats(-1e6, 1e6), st.floats(1e-9, 1e5), st.booleans())
def test_mean_and_deviation_have_the_same_decimals(mean: float, spread: float, is_percent: bool) -> None:
    ours, theirs = with_spread(mean, spread, is_percent).split(" ± ")
    assert _tail(ours) == _tail(theirs)


def _tail(text: str) -> tuple[int, str]:
    number, _, exponent = text.partition("e")
    return len(number.partition(".")[2]), exponent


def test_percentages_have_two_decimals_and_p_values_two_digits() -> None:
    assert with_spread(82.8, 0.6005, is_percent=True) == "82.80 ± 0.60"
    assert format_number(50.0, is_percent=True) == "50.00"
    assert [p_text(p) for p in (0.0512, 0.00001, 1.0, None)] == ["0.051", "<0.0001", "1", "-"]
    assert format_number(math.inf) == "infinite"
