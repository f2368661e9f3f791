"""Format numbers for pages: a mean and its deviation have the same decimals."""

import math
from collections.abc import Sequence

_PERCENT = 2  # decimals of percentages


def format_number(value: float, is_percent: bool = False) -> str:
    """Format a number with four significant digits, an integer of up to seven digits whole, percent with two decimals.

    Example:
        >>> format_number(38.0), format_number(0.123456), format_number(1234.56), format_number(82.8, is_percent=True)
        ('38', '0.1235', '1235', '82.80')
    """
    if not math.isfinite(value):
        return {math.inf: "infinite", -math.inf: "-infinite"}.get(value, "-")
    if is_percent:
        return f"{value:.{_PERCENT}f}"
    if value == int(value) and abs(value) < 1e7:
        return str(int(value))
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e7 else f"{value:.4g}"


def with_spread(mean: float, spread: float, is_percent: bool = False) -> str:
    """Return a mean and a deviation with the same decimals, chosen so that the deviation has two significant digits.

    Example:
        >>> with_spread(49.0625, 0.6005), with_spread(50.0, 12.25), with_spread(1.234e-8, 2.1e-9)
        ('49.06 ± 0.60', '50 ± 12', '1.23e-08 ± 0.21e-08')
    """
    return " ± ".join(aligned([mean, spread], spread, is_percent))


def aligned(values: Sequence[float], spread: float, is_percent: bool = False, digits: int = 2) -> list[str]:
    """Return numbers with the same decimals.

    Args:
        values: The numbers.
        spread: Their deviation. With the same decimals, it has ``digits`` significant digits.
        is_percent: Whether they are in percent. If so, they have two decimals.
        digits: The significant digits of the deviation.

    Example:
        >>> aligned([-1.0432, -4.27, 2.18], 0.116, digits=3)
        ['-1.043', '-4.270', '2.180']
    """
    if is_percent or spread == 0 or not math.isfinite(spread):
        return [format_number(value, is_percent) for value in values]
    largest = max(*map(abs, values), spread)
    scale, end = 1.0, ""
    if not 1e-3 <= largest < 1e7:
        exponent = math.floor(math.log10(largest))
        scale, end = 10.0**exponent, f"e{exponent:+03d}"
    decimals = min(max(0, digits - 1 - math.floor(math.log10(spread / scale))), 12)
    return [f"{value / scale:.{decimals}f}{end}" for value in values]


def format_p(p: float | None) -> str:
    """Return a p value with two significant digits.

    Example:
        >>> format_p(0.01234), format_p(3e-7), format_p(None)
        ('0.012', '<0.0001', '-')
    """
    if p is None:
        return "-"
    return "<0.0001" if p < 1e-4 else f"{p:.2g}"
