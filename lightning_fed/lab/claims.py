"""Whether the inequalities that a paper states hold, with the numbers.

Sides are compared seed by seed, as all methods have the same clients, cohorts and starting points under one seed. A
difference whose mean over seeds is within two of its standard errors decides nothing.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Literal

from lightning_fed.lab.experiment import Claim, Label
from lightning_fed.lab.grid import Point, name_of
from lightning_fed.lab.places import is_within
from lightning_fed.lab.quantities import add_up
from lightning_fed.lab.results import Estimate, Results, shown

__all__ = ["Judgement", "Verdict", "judge"]

Verdict = Literal["holds", "does not hold", "undecided", "not judged"]

_ERRORS = 2.0  # standard errors within which a difference is undecided


@dataclass(frozen=True)
class Judgement:
    """What became of a claim at one combination of the axes that it leaves open.

    Args:
        where: The combination, in words.
        verdict: Whether it holds.
        numbers: The inequality with its numbers, or why it was not judged.
    """

    where: str
    verdict: Verdict
    numbers: str


@dataclass(frozen=True)
class _Side:
    """A side of an inequality.

    Args:
        values: Its value for each seed.
        text: Its mean as it is shown.
    """

    values: tuple[float, ...]
    text: str


def judge(claim: Claim, results: Results) -> list[Judgement]:
    """Return a judgement of a claim at every combination of the axes that it leaves open.

    Args:
        claim: The claim.
        results: The finished cells.
    """
    scale, known = results.grid.scale.name, results.grid.labels
    if claim.scales and scale not in claim.scales:
        return [
            Judgement("", "not judged", f"it is stated for the scale {' and '.join(claim.scales)}, this is {scale}")
        ]
    named = [(claim.compare, label) for _, label in claim.terms if label is not None]
    if claim.difference is not None:
        named += [(claim.difference.axis, label) for label in (claim.difference.of, claim.difference.minus)]
    if missing := [f"{axis} {label}" for axis, label in named if label not in known[axis]]:
        return [Judgement("", "not judged", f"the scale {scale} has no {' and '.join(missing)}")]
    judgements = [_judge_at(claim, results, points) for points in _combinations(claim, results)]
    return judgements or [Judgement("", "not judged", f"the scale {scale} has nothing of that part of the grid")]


def _combinations(claim: Claim, results: Results) -> Iterator[dict[Label, list[Point]]]:
    """Yield the points that a claim compares, by label, for each combination of the other axes.

    A label has several points where the claim is about a mean or a difference.
    """
    groups: dict[tuple[tuple[str, Label], ...], dict[Label, list[Point]]] = {}
    within = (claim.compare, *_inner_axes(claim))
    for point in results.grid.points:
        if is_within(point.by_axis, claim.at):
            others = tuple(pair for pair in point.labels if pair[0] not in within)
            groups.setdefault(others, {}).setdefault(point.by_axis[claim.compare], []).append(point)
    yield from groups.values()


def _inner_axes(claim: Claim) -> tuple[str, ...]:
    """Return the axes over which each side is reduced to a number for each seed."""
    return (*claim.mean_over, *([] if claim.difference is None else [claim.difference.axis]))


def _judge_at(claim: Claim, results: Results, points: dict[Label, list[Point]]) -> Judgement:
    where = _where(claim, results, points)
    if claim.difference is not None:
        ends = (claim.difference.of, claim.difference.minus)
        points = {label: [p for p in of if p.by_axis[claim.difference.axis] in ends] for label, of in points.items()}
    if gap := _gap(claim, points):
        return Judgement(where, "not judged", gap)
    sides = []
    for factor, label in claim.terms:
        side = _Side((factor,) * results.grid.seeds, shown(factor)) if label is None else None
        if side is None:
            estimate = _reduced(points[label or ""], claim, results)
            if not estimate.values:
                return Judgement(where, "not judged", estimate.missing)
            side = _Side(tuple(factor * value for value in estimate.values), _text(factor, estimate))
        sides.append(side)
    pairs = list(zip(pairwise(sides), claim.signs, strict=True))
    numbers = " ".join(
        [sides[0].text, *(f"{sign} {side.text}" for sign, side in zip(claim.signs, sides[1:], strict=True))]
    )
    is_random = results.grid.experiment.is_random
    verdicts = [_compare(left.values, sign, right.values, claim.within, is_random) for (left, right), sign in pairs]
    if "not judged" in verdicts:
        return Judgement(where, "not judged", f"two sides are alike without a number: {numbers}")
    errors = [_difference_text(left, right) for (left, right), _ in pairs] if is_random else []
    told = f"{numbers}; {', '.join(errors)}" if any(errors) else numbers
    return Judgement(where, _joined(verdicts), told)


def _joined(verdicts: Sequence[Verdict]) -> Verdict:
    for verdict in ("does not hold", "undecided"):
        if verdict in verdicts:
            return verdict
    return "holds"


def _compare(left: Sequence[float], sign: str, right: Sequence[float], within: float, is_random: bool) -> Verdict:
    """Return whether a sign stands rightly between the values of two sides for each seed."""
    pairs = list(zip(left, right, strict=True))
    if any(map(math.isnan, (*left, *right))) or all(a == b and math.isinf(a) for a, b in pairs):
        return "not judged"
    differences = [0.0 if a == b else a - b for a, b in pairs]
    if is_random and len(differences) == 1:
        return "undecided"
    if not all(map(math.isfinite, differences)):
        if sign == "~":
            return "does not hold"
        low, high = min(differences), max(differences)
    else:
        low, high = _interval(differences)
    if sign == "~":
        allowed = within * max(abs(fmean(left)), abs(fmean(right)))
        if max(-low, high) <= allowed:
            return "holds"
        return "does not hold" if low > allowed or high < -allowed else "undecided"
    if sign in (">", ">="):
        low, high = -high, -low
    if high < 0 or (sign in ("<=", ">=") and high == low == 0):
        return "holds"
    return "does not hold" if low > 0 or low == high == 0 else "undecided"


def _interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the mean of differences, less and plus so many standard errors."""
    mean, error = fmean(differences), _error(differences)
    return mean - _ERRORS * error, mean + _ERRORS * error


def _error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _difference_text(left: _Side, right: _Side) -> str:
    """Return the mean paired difference with its standard error; empty if it is not finite or there is one seed."""
    differences = [a - b for a, b in zip(left.values, right.values, strict=True)]
    if len(differences) < 2 or not all(map(math.isfinite, differences)):
        return ""
    return f"difference {shown(fmean(differences))}, standard error {shown(_error(differences))}"


def _gap(claim: Claim, points: dict[Label, list[Point]]) -> str:
    """Return which label the grid leaves out where it has others, empty if none: all sides are over the same."""
    axes = _inner_axes(claim)
    places = {
        label: [tuple(pair for pair in point.labels if pair[0] in axes) for point in of] for label, of in points.items()
    }
    everywhere = dict.fromkeys(place for of in places.values() for place in of)
    for label in [label for _, label in claim.terms if label is not None]:
        for place in everywhere:
            if place not in places.get(label, ()):
                return f"the grid leaves {claim.compare} {label} out {f'at {name_of(place)}' if place else 'there'}"
    return ""


def _reduced(points: list[Point], claim: Claim, results: Results) -> Estimate:
    """Return a quantity with its mean, or the mean of its difference, over points for each seed.

    What stands in the way of a number at one of the points stands in the way of all.
    """
    estimates = [results.estimate(point, claim.quantity) for point in points]
    for estimate in estimates:
        if not estimate.values:
            return estimate
    if len(estimates) == 1:
        return estimates[0]
    signs = [1.0] * len(points)
    if claim.difference is not None:
        signs = [1.0 if p.by_axis[claim.difference.axis] == claim.difference.of else -1.0 for p in points]
    count = len(points) if claim.difference is None else len(points) / 2
    rows = zip(*(estimate.values for estimate in estimates), strict=True)
    values = tuple(add_up(s * v for s, v in zip(signs, of_seed, strict=True)) / count for of_seed in rows)
    return Estimate(
        claim.quantity,
        values=values,
        limit=fmean(e.mean if math.isfinite(e.mean) else e.limit for e in estimates),
        is_diverged=any(estimate.is_diverged for estimate in estimates),
    )


def _where(claim: Claim, results: Results, points: dict[Label, list[Point]]) -> str:
    """Return what tells a combination from the others that a claim is judged at, and what it is a mean of."""
    found = [point for of in points.values() for point in of]
    several = {axis for axis, labels in results.grid.labels.items() if len(labels) > 1}
    several -= {claim.compare, *_inner_axes(claim)}
    labels = {axis: dict.fromkeys(point.by_axis[axis] for point in found) for axis in claim.mean_over}
    parts = [name_of(tuple(pair for pair in found[0].labels if pair[0] in several))]
    parts += [f"mean over {axis} {' and '.join(of)}" for axis, of in labels.items()]
    return ", ".join(filter(None, parts))


def _text(factor: float, side: Estimate) -> str:
    """Return a side with its number."""
    number = shown(side.mean) if math.isfinite(side.mean) else str(side)
    return number if factor == 1 else f"{factor:g} * {number}"
