"""Student's t over paired differences, and Holm's correction for claims that are checked at several places.

The two sides of a claim share clients, cohorts and starting points under one seed, so they are compared seed by seed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, stdev
from typing import Literal, TypeAlias

LEVEL = 0.05
"""The level of every test, two-sided: a verdict is undecided if its p is larger."""

Verdict: TypeAlias = Literal["holds", "does not hold", "undecided", "not judged"]


@dataclass(frozen=True)
class Comparison:
    """Two adjacent sides of a claim, compared seed by seed.

    Args:
        left: The left side's value for each seed.
        sign: The claim's sign between them: "<", "<=", ">", ">=" or "~".
        right: The right side's value for each seed.
        within: The allowed difference between sides joined by "~", as a share of the larger.
        is_random: Whether anything is drawn at random. If not, every difference counts.
        binomial: The standard error of the difference due to the finite test sets; None if unknown.
    """

    left: tuple[float, ...]
    sign: str
    right: tuple[float, ...]
    within: float
    is_random: bool
    binomial: float | None = None

    @cached_property
    def differences(self) -> tuple[float, ...]:
        """Left minus right for each seed."""
        return tuple(0.0 if a == b else a - b for a, b in zip(self.left, self.right, strict=True))

    @property
    def is_finite(self) -> bool:
        """Return whether both sides have a number under every seed."""
        return all(map(math.isfinite, self.differences))

    @property
    def mean(self) -> float:
        """The mean difference."""
        return fmean(self.differences)

    @property
    def error(self) -> float | None:
        """The standard error of the mean difference; None if undefined."""
        if not self.is_random or not self.is_finite or len(self.differences) < 2:
            return None
        return stdev(self.differences) / math.sqrt(len(self.differences))

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean difference, by Student's t; None if undefined."""
        if self.error is None:
            return None
        from scipy.special import stdtrit

        reach = self.error * float(stdtrit(len(self.differences) - 1, 1 - LEVEL / 2))
        return self.mean - reach, self.mean + reach

    @property
    def p(self) -> float | None:
        """The two-sided p of the mean difference against the claim's limit, before any correction; None if undefined.

        The limit is 0. For "~", it is the allowed difference, with the sign of the mean.
        """
        if self.error is None:
            return None
        margin = abs(self._margin)
        if self.error == 0:
            return 0.0 if margin > 0 else 1.0
        from scipy.special import stdtr

        return float(2 * stdtr(len(self.differences) - 1, -margin / self.error))

    def verdict(self, p: float | None) -> Verdict:
        """Return whether the sign is right.

        Args:
            p: The deciding p, after any correction.
        """
        pairs = zip(self.left, self.right, strict=True)
        if any(map(math.isnan, (*self.left, *self.right))) or all(a == b and math.isinf(a) for a, b in pairs):
            return "not judged"
        if self.is_random and len(self.differences) == 1:
            return "undecided"
        if not self.is_finite:
            return self._without_numbers()
        if not any(self.differences) and self.sign != "~":
            return "holds" if self.sign in ("<=", ">=") else "does not hold"
        if p is not None and p > LEVEL:
            return "undecided"
        return "holds" if self._margin > 0 or (self.sign == "~" and self._margin == 0) else "does not hold"

    @property
    def _margin(self) -> float:
        """Return the distance of the mean difference from its limit; negative on the wrong side."""
        if self.sign == "~":
            return self.within * max(abs(fmean(self.left)), abs(fmean(self.right))) - abs(self.mean)
        return -self.mean if self.sign in ("<", "<=") else self.mean

    def _without_numbers(self) -> Verdict:
        """Return the verdict after a divergence or missed target. "~" fails. Other signs need all seeds to agree."""
        if self.sign == "~":
            return "does not hold"
        for_it = [d < 0 if self.sign in ("<", "<=") else d > 0 for d in self.differences]
        against = [d > 0 if self.sign in ("<", "<=") else d < 0 for d in self.differences]
        return "holds" if all(for_it) else "does not hold" if all(against) else "undecided"


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Return p values corrected for their number, after Holm (1979). None values are not counted.

    Example:
        >>> holm([0.01, None, 0.04, 0.03])
        [0.03, None, 0.06, 0.06]
    """
    order = sorted((value, i) for i, value in enumerate(values) if value is not None)
    corrected: list[float | None] = [None] * len(values)
    largest = 0.0
    for rank, (value, i) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * value))
        corrected[i] = largest
    return corrected
